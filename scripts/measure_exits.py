"""Measure how good calibrations of several sizes are on other text. Print tables, or one document with --json.

    python scripts/measure_exits.py --calibrate stories_a.txt --evaluate stories_b.txt [--model FOLDER] [--json]

For each of --sizes the model is calibrated on that many tokens of the first text, and all metrics are taken on
the first --tokens of the other. Texts are split at <|endoftext|>. With --shipped, the calibration that the model has
already is evaluated in place of new ones. Nothing is written.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stories import read_stories

from hetero_ee import Engine
from hetero_ee.calibration.fitting import all_metrics, opened
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings
from hetero_ee.calibration.stages import Chunk
from hetero_ee.calibration.texts import text_chunks
from hetero_ee.calibration.traces import drafts_of, trace
from hetero_ee.errors import UsageError
from hetero_ee.hub.resolve import resolve_model
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration, DepthMetrics, ExitLayerMetrics
from hetero_ee.text.tokenizer import Tokenizer

SIZES = (512, 1000, 2000, 5000, 10_000, 20_000)
SHOWN = ("agreement", "drafted_agreement", "exit_rate", "precision", "recall", "acceptance")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of exit layer 1, 2, ... and of them together, on other text than a calibration was made with."""

    exit_layers: tuple[ExitLayerMetrics, ...]
    depths: DepthMetrics


@dataclass(frozen=True, slots=True)
class Measured:
    """One calibration, and its evaluation on the other text."""

    seconds: float  # what it took, 0 for a shipped one
    calibration: Calibration
    evaluation: Evaluation


def main() -> None:
    arguments = parse_arguments()
    with Engine.from_pretrained(arguments.model, threads=arguments.threads, profile="off") as engine:
        tokenizer = Tokenizer.load(resolve_model(arguments.model), engine.spec.vocab_size)

        def chunks_of(file: Path, n_tokens: int) -> list[Chunk]:
            return text_chunks(tokenizer, stories(file, n_tokens), n_tokens, engine.context_tokens)

        other = chunks_of(arguments.evaluate, arguments.tokens)
        if arguments.shipped:
            measured = [shipped(engine, other)]
        else:
            measured = [calibrated(engine, chunks_of(arguments.calibrate, size), other) for size in arguments.sizes]
    if arguments.json:
        print(json.dumps({"schema": 3, "rows": [document(each) for each in measured]}))
    else:
        print_sizes(measured)
        print_exit_layers(measured[-1])
        print_depths(measured[-1].evaluation.depths)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", type=Path, help="text to calibrate on")
    parser.add_argument("--evaluate", type=Path, required=True, help="text to take metrics on")
    parser.add_argument("--shipped", action="store_true", help="evaluate the calibration that is there")
    parser.add_argument("--model", help="folder or id; the demo model without it")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tokens to calibrate on")
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens to take metrics on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.shipped == (arguments.calibrate is not None):
        parser.error("give one of --calibrate and --shipped")
    return arguments


def stories(file: Path, n_tokens: int) -> list[str]:
    """Return the first stories of a file, enough for `n_tokens`. A text without separators is one story."""
    found: list[str] = []
    for story in read_stories([file]):
        if sum(map(len, found)) > 5 * n_tokens:  # characters a token, rather more than they are
            break
        found.append(story)
    return found


def evaluate(executor: Executor, calibration: Calibration, chunks: Sequence[Sequence[int]]) -> Evaluation:
    """The calibration's maps, predictors and thresholds on these chunks, of at least two tokens each."""
    exit_layers = calibration.exit_layers
    maps = {each.exit_layer: each.exit_map for each in exit_layers if each.exit_map is not None}
    is_right, unmapped, gate = [], [], []
    for chunk in chunks:
        drafts = drafts_of(executor, trace(executor, chunk), maps, with_unmapped=True)
        is_right.append(drafts.is_right)
        unmapped.append(drafts.is_right_unmapped)
        gate.append(opened(exit_layers, drafts.features))
    return Evaluation(*all_metrics(exit_layers, is_right, unmapped, gate))


def shipped(engine: Engine, other: list[Chunk]) -> Measured:
    """The calibration that is there."""
    calibration = engine.calibrations.find() if engine.calibrations else None
    if calibration is None:
        raise UsageError("this model has no calibration; run hetero-ee calibrate.")
    return Measured(0.0, calibration, evaluate(engine.executor, calibration, other))


def calibrated(engine: Engine, chunks: list[Chunk], other: list[Chunk]) -> Measured:
    """A new one."""
    start_s = time.perf_counter()
    run = CalibrationRun(engine.executor, CalibrationSettings(), None)
    calibration = run.calibrate(chunks, "a text")
    seconds = time.perf_counter() - start_s
    return Measured(seconds, calibration, evaluate(engine.executor, calibration, other))


def document(measured: Measured) -> dict[str, Any]:
    calibration = measured.calibration
    return {
        "n_tokens": calibration.text.n_tokens,
        "seconds": measured.seconds,
        "map_ranks": [each.exit_map.rank if each.exit_map else None for each in calibration.exit_layers],
        "schedule": list(calibration.schedule),
        "thresholds": [each.threshold for each in calibration.exit_layers],
        "evaluation": asdict(measured.evaluation),
    }


def print_sizes(measured: list[Measured]) -> None:
    n_tokens = sum(measured[-1].evaluation.depths.histogram)
    print(f"means over all exit layers, on {n_tokens} tokens of the other text\n")
    print("| tokens | s | maps | agreement | with map | exit rate | precision | recall | acceptance | mean depth |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for each in measured:
        metrics = each.evaluation.exit_layers
        n_maps = sum(exit_layer.exit_map is not None for exit_layer in each.calibration.exit_layers)
        cells = [f"{each.calibration.text.n_tokens:,}", f"{each.seconds:.0f}", str(n_maps)]
        cells += [f"{sum(getattr(own, name) for own in metrics) / len(metrics):.3f}" for name in SHOWN]
        print(f"| {' | '.join(cells)} | {each.evaluation.depths.mean_depth:.2f} |")


def print_exit_layers(measured: Measured) -> None:
    print("\n| exit layer | rank | agreement | with map | threshold | exit rate | precision | recall | acceptance |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each, metrics in zip(measured.calibration.exit_layers, measured.evaluation.exit_layers, strict=True):
        rank = str(each.exit_map.rank) if each.exit_map else "no map"
        shares = [f"{getattr(metrics, name):.3f}" for name in SHOWN]
        cells = [str(each.exit_layer), rank, *shares[:2], f"{each.threshold:.2f}", *shares[2:]]
        print(f"| {' | '.join(cells)} |")


def print_depths(depths: DepthMetrics) -> None:
    shares = [f"{100 * count / sum(depths.histogram):.1f}" for count in depths.histogram]
    print(f"\ndepth histogram, % from depth 1: {' '.join(shares)}")
    print(f"mean depth {depths.mean_depth:.2f}, with perfect gates {depths.oracle_mean_depth:.2f}")
    print(f"within 2 of the last 5: {depths.locality:.3f}; these cover {depths.near_share:.3f} of the depths")


if __name__ == "__main__":
    main()
