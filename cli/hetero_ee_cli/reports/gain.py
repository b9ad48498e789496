"""The gain of a calibration: expected and measured tokens per second with it and without it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_ee.config import Progress
from hetero_ee.errors import UsageError

if TYPE_CHECKING:
    from hetero_ee.engine import Engine
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.plan import Plan
    from hetero_ee.planning.request import PlanRequest
    from hetero_ee_profiles.hardware import HardwareProfile

MAX_S = 3.0  # maximum seconds of decoding in one mode
MIN_TOKENS, MAX_TOKENS = 64, 256  # a text that ends sooner is followed by another; of one text
MEASURING = "Generating short texts with and without the calibration"
ABOUT_THE_MODE = ("Exact mode", "Drafts")  # the beginnings of a plan's reasons that are


@dataclass(frozen=True, slots=True)
class Speed:
    mode: str
    drafts: str | None  # where they come from, None in full mode
    expected_tokens_per_s: float | None  # by the planner; None if the acceptance is unknown
    measured_tokens_per_s: float

    @property
    def words(self) -> str:
        return "full mode" if self.mode == "full" else f"exact mode, drafts by {self.drafts}"

    @property
    def measures(self) -> list[tuple[str, float | None]]:
        return [("expected", self.expected_tokens_per_s), ("measured", self.measured_tokens_per_s)]

    def figures(self, against: "Speed | None" = None) -> str:
        """Return the known tokens per second, each with its change against another speed if one is given."""
        others = self.measures if against is None else against.measures
        pairs = zip(self.measures, others, strict=True)
        return ", ".join(
            f"{what} {value:.1f}{_change(value, other) if against else ''}"
            for (what, value), (_, other) in pairs
            if value is not None
        )


def _change(new: float, old: float | None) -> str:
    return f" ({new / old - 1:+.0%})" if old else ""


@dataclass(frozen=True, slots=True)
class Gain:
    """Speeds before and after a calibration, each in the mode that the planner chooses."""

    before: Speed
    after: Speed
    forced: Speed | None  # exact mode, where the planner declines it
    reasons: tuple[str, ...]  # the planner's, for the mode

    def is_loss(self, share: float) -> bool:
        """Return whether the planner stays in full mode and expects less than this share of its speed otherwise."""
        forced, full = self.forced, self.after.expected_tokens_per_s
        if self.after.mode != "full":
            return False
        return forced is None or not full or (forced.expected_tokens_per_s or 0.0) < share * full

    @property
    def line(self) -> str:
        from hetero_ee.planning.schedule import WORTH_IT, is_worth_it

        before, after, forced = self.before, self.after, self.forced
        if before != after:
            pairs = zip(before.measures, after.measures, strict=True)
            changes = [
                f"{what} {old:.1f} -> {new:.1f}{_change(new, old)}" for (what, old), (_, new) in pairs if old and new
            ]
            way = f"still {after.words}" if before.words == after.words else f"{before.words} became {after.words}"
            return f"Tokens/s before and after: {', '.join(changes)}; {way}."
        found = [f"Tokens/s: {after.figures()}; still {after.words}."]
        if forced is None or forced.expected_tokens_per_s is None:
            found += self.reasons
        if forced is None:
            return " ".join(found)
        found.append(
            f"Exact mode: {forced.figures(after)}; it is used if at least {1 / WORTH_IT - 1:.0%} more are expected."
        )
        measured, full = forced.measured_tokens_per_s, after.measured_tokens_per_s
        if full and is_worth_it(measured, full):
            found.append("The measurement speaks for it, which a busy machine can distort: compare with --mode exact.")
        return " ".join(found)


@dataclass(frozen=True, slots=True)
class _Run:
    """A plan and the measurements of its run."""

    spec: "ModelSpec"
    plan: "Plan"
    placement: "PlanRequest"
    speed: Speed
    context_tokens: int  # context length in the middle of the generated texts, at which speed is predicted


def measured_gain(options: dict[str, Any], progress: Progress) -> Gain:
    """Open the model with plans for this machine, and generate texts with and without the calibration.

    If this machine has no profile for the model, it is measured first. `options` are those of Engine.from_pretrained.
    """
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.planner import plan as make_plan
    from hetero_ee.profiling.automatic import automatic_profile
    from hetero_ee_profiles.host.process import usable_threads

    def find(spec: "ModelSpec", folder: Path) -> "HardwareProfile | None":
        threads = usable_threads(options["threads"])
        return automatic_profile(spec, folder, threads, progress, measures=True)

    after = _run(options | {"profile": find, "progress": progress})
    progress(MEASURING, 1, 2)
    made, placement, profile = after.plan, after.placement, after.placement.profile
    assert profile is not None, "it was found or measured"
    limits = replace(placement.limits, context_tokens=made.context_tokens, threads=made.threads)
    # Plan again for the length of these texts, so that its reasons quote the numbers that are measured here.
    here = make_plan(after.spec, profile, limits, placement.statistics, predict_at_tokens=after.context_tokens)
    reasons = [each for each in here.reasons if each.startswith(ABOUT_THE_MODE)] if here.mode == made.mode else []
    before, forced = after.speed, None
    known = {"profile": profile, "progress": progress}
    if made.mode == "full":
        try:
            forced = _run(options | known | {"limits": Limits(mode="exact")}).speed
        except UsageError as error:  # nothing exits anywhere, say
            reasons.append(f"It can't be forced: {str(error).partition(';')[0]}.")
    else:
        former = make_plan(after.spec, profile, limits, replace(placement.statistics, exits=None))
        if _decided(former) != _decided(made):
            before = _run(options | known | {"plan": former, "context_tokens": 0}).speed
    progress(MEASURING, 2, 2)
    return Gain(before, after.speed, forced, tuple(reasons))


def _run(options: dict[str, Any]) -> _Run:
    from hetero_ee.calibration.texts import OPENINGS
    from hetero_ee.engine import Engine
    from hetero_ee.options.sampling import SamplingParams
    from hetero_ee.planning.times.prediction import predicted_text_s

    params = SamplingParams(temperature=0.0, max_new_tokens=MAX_TOKENS)
    n_new, seconds = 0, 0.0
    with Engine.from_pretrained(**options) as engine:
        engine.generate(OPENINGS[0], replace(params, max_new_tokens=4))  # warms up, and does not count
        for opening in OPENINGS:
            n_more, took_s = _decoded(engine, opening, params, MAX_S - seconds)
            n_new, seconds = n_new + n_more, seconds + took_s
            if n_new >= MIN_TOKENS or seconds >= MAX_S:
                break
        made, placement, n_prompt = engine.plan, engine.plan_request, engine.count_tokens(OPENINGS[0])
        assert made is not None and placement is not None and placement.profile is not None
        n_new = max(1, n_new)
        expected_s = predicted_text_s(engine.spec, placement.profile, made, placement.statistics, n_new, n_prompt)
        expected = None if expected_s is None else n_new / expected_s
        measured = n_new / seconds if seconds else 0.0
        speed = Speed(made.mode, engine.draft_origin or None, expected, measured)
        return _Run(engine.spec, made, placement, speed, n_prompt + n_new // 2)


def _decoded(engine: "Engine", prompt: str, params: Any, limit_s: float) -> tuple[int, float]:
    """Return the number of tokens after the first and their seconds. Generation ends after limit_s seconds."""
    first_s = last_s = None
    n_new = -1
    for token in engine.stream(prompt, params):
        first_s, last_s = token.elapsed_s if first_s is None else first_s, token.elapsed_s
        n_new += 1
        if last_s - first_s >= limit_s:
            break
    return (n_new, last_s - first_s) if first_s is not None and last_s is not None else (0, 0.0)


def _decided(made: "Plan") -> tuple[object, ...]:
    """Return the parts of a plan that depend on the calibration."""
    return made.mode, made.drafts, made.exit_layer, made.draft_length, made.decode_placements
