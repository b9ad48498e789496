"""How good calibrations of several sizes are on other text. Prints tables, or with --json one document.

    python scripts/measure_exits.py --calibrate stories_a.txt --evaluate stories_b.txt [--model FOLDER] [--json]

For each of --sizes the model is calibrated on the first so many tokens of the one text, and all figures are taken on
the first --tokens of the other. Texts are split at <|endoftext|>. With --shipped, the calibration that the model has
already is evaluated in place of new ones. With --predictors, the kinds of predictors are compared on the rows of the
last size; with --recent N, walks to exit layer N are taken with levels near the last exits. Nothing is written.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exit_predictors import Compared, compare_predictors
from recent_walks import RecentWalks, recent_walks

from hetero_ee import Engine
from hetero_ee.calibration.evaluation import Evaluation, evaluate
from hetero_ee.calibration.predictor_quality import PredictorQuality
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings
from hetero_ee.calibration.texts import Chunk, text_chunks
from hetero_ee.errors import UsageError
from hetero_ee.hub.resolve import resolve_model
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.text.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"  # between stories, as the TinyStories files have it
SIZES = (512, 1000, 2000, 5000, 10_000, 20_000)
FIGURES = ("agreement", "drafted_agreement", "exit_rate", "precision", "recall", "acceptance")


@dataclass(frozen=True, slots=True)
class Measured:
    """One calibration. n_tokens: it was made with; seconds: what it took, 0 for a shipped one; evaluation: on the other
    text."""

    n_tokens: int
    seconds: float
    calibration: Calibration
    evaluation: Evaluation


def main() -> None:
    arguments = parse_arguments()
    with Engine.from_pretrained(arguments.model, threads=arguments.threads) as engine:
        tokenizer = Tokenizer.load(resolve_model(arguments.model), engine.spec.vocab_size)

        def chunks_of(file: Path, n_tokens: int) -> list[Chunk]:
            return text_chunks(tokenizer, stories(file, n_tokens), n_tokens, engine.context_tokens)

        other = chunks_of(arguments.evaluate, arguments.tokens)
        measured = [shipped(engine, other)] if arguments.shipped else []
        for size in () if arguments.shipped else arguments.sizes:
            measured.append(calibrated(engine, chunks_of(arguments.calibrate, size), other))
        compared = []
        if arguments.predictors:
            chunks = chunks_of(arguments.calibrate, arguments.sizes[-1])
            compared = predictors_compared(engine, measured[-1].calibration, chunks, other)
        woken = []
        if arguments.recent:
            woken = list(recent_walks(engine.executor, measured[-1].calibration, other, arguments.recent))
    if arguments.json:
        predictors = [asdict(each) for each in compared]
        rows = [document(each) for each in measured]
        recent = [(name, *each.metrics) for name, each in woken]
        print(json.dumps({"schema": 2, "rows": rows, "predictors": predictors, "recent": recent}))
        return
    print_sizes(measured)
    print_boundaries(measured[-1])
    print_walks(measured[-1])
    print_depths(measured[-1])
    if compared:
        print_predictors(compared)
    if woken:
        print_recent(woken)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", type=Path, help="text to calibrate on")
    parser.add_argument("--evaluate", type=Path, required=True, help="text to take figures on")
    parser.add_argument("--shipped", action="store_true", help="evaluate the calibration that is there")
    parser.add_argument("--model", help="folder or id; the demo model without it")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tokens to calibrate on")
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens to take figures on")
    parser.add_argument("--predictors", action="store_true", help="compare the kinds of predictors as well")
    parser.add_argument("--recent", type=int, metavar="N", help="walks to exit layer N with levels near the last exits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.shipped == (arguments.calibrate is not None):
        parser.error("give one of --calibrate and --shipped")
    if arguments.predictors and arguments.shipped:
        parser.error("--predictors needs a text to fit them to: --calibrate")
    return arguments


def stories(file: Path, n_tokens: int) -> list[str]:
    """The first stories of a file, as many as so many tokens make up; a text without separators is one."""
    pieces = [piece.strip() for piece in file.read_text(encoding="utf-8").split(SEPARATOR)]
    found: list[str] = []
    for piece in filter(None, pieces):
        if sum(map(len, found)) > 5 * n_tokens:  # characters a token, rather more than they are
            break
        found.append(piece)
    return found


def shipped(engine: Engine, other: list[Chunk]) -> Measured:
    """The calibration that is there."""
    calibration = engine.calibrations.find() if engine.calibrations else None
    if calibration is None:
        raise UsageError("this model has no calibration; run hetero-ee calibrate.")
    return Measured(calibration.text.n_tokens, 0.0, calibration, evaluate(engine.executor, calibration, other))


def calibrated(engine: Engine, chunks: list[Chunk], other: list[Chunk]) -> Measured:
    """A new one."""
    start_s = time.perf_counter()
    run = CalibrationRun(engine.executor, CalibrationSettings(), None, time.perf_counter)
    calibration = run.calibrate(chunks, "a text")
    seconds = time.perf_counter() - start_s
    evaluation = evaluate(engine.executor, calibration, other)
    return Measured(calibration.text.n_tokens, seconds, calibration, evaluation)


def predictors_compared(
    engine: Engine, calibration: Calibration, chunks: list[Chunk], other: list[Chunk]
) -> list[Compared]:
    """All kinds, with the calibration's maps."""
    maps = {each.exit_layer: each.exit_map for each in calibration.exit_layers if each.exit_map}
    return compare_predictors(engine.executor, maps, chunks, other, CalibrationSettings().precision)


def document(measured: Measured) -> dict[str, Any]:
    return {
        "n_tokens": measured.n_tokens,
        "seconds": measured.seconds,
        "map_ranks": [each.exit_map.rank if each.exit_map else None for each in measured.calibration.exit_layers],
        "schedule": list(measured.calibration.schedule.exit_layers),
        "thresholds": [each.threshold for each in measured.calibration.exit_layers],
        "evaluation": asdict(measured.evaluation),
    }


def mean(measured: Measured, figure: str) -> float:
    """A figure's mean over the exit layers."""
    values = [getattr(each, figure) for each in measured.evaluation.exit_layers]
    return float(sum(values)) / len(values)


def print_sizes(measured: list[Measured]) -> None:
    print(f"means over all exit layers, on {measured[-1].evaluation.n_tokens} tokens of the other text\n")
    print("| tokens | s | maps | agreement | with map | exit rate | precision | recall | acceptance | mean depth |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for each in measured:
        n_maps = sum(exit_layer.exit_map is not None for exit_layer in each.calibration.exit_layers)
        cells = [f"{each.n_tokens:,}", f"{each.seconds:.0f}", str(n_maps)]
        cells += [f"{mean(each, figure):.3f}" for figure in FIGURES]
        print(f"| {' | '.join(cells)} | {each.evaluation.depths.mean_depth:.2f} |")


def print_boundaries(measured: Measured) -> None:
    print("\n| exit layer | rank | agreement | with map | threshold | exit rate | precision | recall | acceptance |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each, metrics in zip(measured.calibration.exit_layers, measured.evaluation.exit_layers, strict=True):
        rank = str(each.exit_map.rank) if each.exit_map else "no map"
        shares = [f"{getattr(metrics, name):.3f}" for name in FIGURES]
        cells = [str(each.exit_layer), rank, *shares[:2], f"{each.threshold:.2f}", *shares[2:]]
        print(f"| {' | '.join(cells)} |")


def print_walks(measured: Measured) -> None:
    evaluation, schedule = measured.evaluation, measured.calibration.schedule
    print(f"\nwalks past the schedule's exit layers, {list(schedule.exit_layers)}, against the exit layer alone\n")
    print("| exit layer | exit rate | precision | refused precision | mean exit depth | judged at |")
    print("|---|---|---|---|---|---|")
    for each, alone, walk in zip(
        measured.calibration.exit_layers, evaluation.exit_layers, evaluation.walks, strict=True
    ):
        pairs = ((walk.exit_rate, alone.exit_rate), (walk.precision, alone.precision))
        cells = [str(each.exit_layer), *(f"{ours:.3f} ({other:.3f})" for ours, other in pairs)]
        cells.append(f"{walk.refused_precision:.3f} ({alone.refused_precision:.3f})")
        print(f"| {' | '.join(cells)} | {walk.mean_exit_depth:.2f} ({each.exit_layer}) | {walk.n_evaluated:.2f} |")


def print_predictors(compared: list[Compared]) -> None:
    names = [each.kind for each in compared]
    print("\npredictors: exit rate, precision, recall at the calibrated threshold\n")
    print(f"| exit layer | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for place in range(len(compared[0].qualities)):
        print(f"| {place + 1} | {' | '.join(figures_of(each.qualities[place]) for each in compared)} |")
    print(f"| mean | {' | '.join(figures_of(each.mean) for each in compared)} |")
    print(f"| microseconds a row | {' | '.join(f'{each.microseconds:.0f}' for each in compared)} |")
    print(f"| seconds to fit | {' | '.join(f'{each.fit_s:.2f}' for each in compared)} |")


def print_recent(woken: list[tuple[str, RecentWalks]]) -> None:
    print("\n| levels | exit rate | precision | mean exit depth | judged at |\n|---|---|---|---|---|")
    for name, each in woken:
        rate, precision, depth, n_evaluated = each.metrics
        print(f"| {name} | {rate:.3f} | {precision:.3f} | {depth:.2f} | {n_evaluated:.2f} |")


def figures_of(quality: PredictorQuality) -> str:
    return ", ".join(f"{share:.3f}" for share in (quality.exit_rate, quality.precision, quality.recall))


def print_depths(measured: Measured) -> None:
    depths = measured.evaluation.depths
    shares = [f"{100 * count / sum(depths.histogram):.1f}" for count in depths.histogram]
    print(f"\ndepth histogram, % from depth 1: {' '.join(shares)}")
    print(f"mean depth {depths.mean_depth:.2f}, with perfect gates {depths.oracle_mean_depth:.2f}")
    print(f"within 2 of the last 5: {depths.locality:.3f}; these cover {depths.near_share:.3f} of the depths")


if __name__ == "__main__":
    main()
