"""`hetero-ee eval`: modes side by side on a text, how fast each is and what it changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import MODEL_OPTIONS, OFF, PROFILE
from hetero_ee.options.sampling import SAMPLING
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions
from hetero_ee_cli.options.evaluation import EvalOptions
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.placement import Placed, PlacementOptions, open_engine
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.reports.eval_report import INTERVALS, eval_rows, eval_table, save_eval_plot
from hetero_ee_cli.terminal.output import encodable, print_document, printable, say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.evaluation.material import Material
    from hetero_ee.evaluation.open_mode import EngineMode, Variant
    from hetero_ee.evaluation.run import ModeResult, Refused
    from hetero_ee.planning.limits import Limits
    from hetero_ee_profiles.hardware import HardwareProfile


@with_options(
    without={
        "mode": "its --modes are several",
        "risk": "it takes several",
    }
)
def eval(wanted: EvalOptions, limits: LimitOptions, engine: ModelOptions, model: ModelArgument = None) -> None:
    """Run modes on the same texts and show how fast each is and what it changes, with intervals over the texts.

    Texts are greedy and as long as --max-tokens says, whatever ends them. Same until: tokens before the first that is
    not full mode's. Perplexity and KL divergence from full mode are of held-out text, with the keys and values that
    the mode leaves behind. CPU passes: how often the CPU's layers are passed, for each token.
    """
    with ending_at_once():
        from hetero_ee.calibration.plot import picture_format, require_matplotlib
        from hetero_ee.planning.hardware import hardware_from
    if wanted.plot is not None:
        picture_format(wanted.plot)  # refused now, not after minutes of work
        require_matplotlib()
    if wanted.hardware is not None and PROFILE.name in engine.given:
        raise UsageError(PROFILE, " is for this machine and --hardware names another; drop one of them.")
    variants = wanted.variants(limits.limits(engine))
    profile = None if wanted.hardware is None else hardware_from(wanted.hardware)
    content, text_name = wanted.held_out()
    with stage_progress() as progress:
        spec, model_name, folder = engine.model_spec(model, None, progress)
        assert folder is not None, "only random weights have none"
        material = wanted.material(spec, folder, content, text_name)
        longest = max(map(len, material.prompts)) + wanted.max_new_tokens
        opening = _Opening(engine, model, variants, profile, next(iter(limits.flags()), ""), longest, progress)
        found, refused = _results(opening, material, wanted.max_new_tokens, wanted.seed)
    sizes = f"{wanted.n_prompts} texts of {wanted.max_new_tokens} tokens"
    title = f"{printable(model_name)}, {sizes}, {material.description}"
    if profile is not None:
        title += f", emulated on {profile.name}"
    if wanted.plot is not None:
        save_eval_plot(found, title, wanted.plot)
    if wanted.as_json:
        emulated = None if profile is None else profile.name
        document: dict[str, Any] = {"model": model_name, "text": material.description, "emulated": emulated}
        document |= {"n_prompts": wanted.n_prompts, "n_new_tokens": wanted.max_new_tokens, "seed": wanted.seed}
        print_document(document | {"modes": eval_rows([*found, *refused])}, with_version=True)
    else:
        print(f"{title}\n{eval_table(found, encodable(INTERVALS[0], '+-'))}")
        say(f"[ {INTERVALS} ]")


@dataclass(frozen=True, slots=True)
class _Opening:
    """Options that open the modes, one after another."""

    engine: ModelOptions
    model: str | None
    limits: "dict[Variant, Limits]"
    hardware: "HardwareProfile | None"
    asking: str  # the first option that needs a plan, empty if there isn't one
    least_context_tokens: int
    progress: Progress

    @contextmanager
    def mode(self, variant: "Variant") -> "Iterator[EngineMode]":
        from hetero_ee.evaluation.open_mode import FULL, EngineMode

        options = self._options()
        is_off = (options.get("profile") or read_settings().value("profile")) == OFF
        asking = self.asking or ("" if is_off and variant.mode == FULL else "--modes")  # full mode needs no plan
        made = replace(self.limits[variant], context_tokens=options["context_tokens"])
        placed = Placed(asking, made, None, PlacementOptions())
        with open_engine(options, placed, self.progress) as opened:
            yield EngineMode(opened, emulates=self.hardware is not None)

    def _options(self) -> dict[str, Any]:
        """Return the options of Engine.from_pretrained.

        Raises:
            UsageError: if the context is too short.
        """
        options = self.engine.arguments(self.model)
        asked, needed = options["context_tokens"], self.least_context_tokens
        if asked and asked < needed:
            raise UsageError(
                MODEL_OPTIONS["context_tokens"],
                f" is {asked} and the texts have {needed}; raise it, or lower ",
                SAMPLING["max_new_tokens"],
                ".",
            )
        emulated = {} if self.hardware is None else {"profile": self.hardware, "emulate": True}
        return options | {"context_tokens": asked or needed} | emulated


def _results(
    opening: _Opening, material: "Material", n_new_tokens: int, seed: int
) -> "tuple[list[ModeResult], list[Refused]]":
    """Return the results of the modes that could be opened, and the others."""
    from hetero_ee.evaluation.run import Refused, evaluate

    found: list[ModeResult] = []
    refused: list[Refused] = []
    for result in evaluate(
        material, list(opening.limits), opening.mode, n_new_tokens, seed=seed, progress=opening.progress
    ):
        if isinstance(result, Refused):
            opening.progress(f"{result.variant.name} is left out: {result.reason}", 0, 0)
            refused.append(result)
        else:
            found.append(result)
    return found, refused
