"""How good calibrations of several sizes are on other text. Prints tables, or with --json one document.

    python scripts/measure_exits.py --calibrate stories_a.txt --evaluate stories_b.txt [--model FOLDER] [--json]

For each of --sizes the model is calibrated on the first so many tokens of the one text, and all figures are taken on
the first --tokens of the other. Texts are split at <|endoftext|>. With --shipped, the calibration that the model has
already is evaluated in place of new ones. Nothing is written.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_ee import Engine
from hetero_ee.decoding.calibration_text import Chunk, text_chunks
from hetero_ee.decoding.tokenizer import Tokenizer
from hetero_ee.errors import UsageError
from hetero_ee.exits.calibration import Calibration
from hetero_ee.exits.calibration_run import CalibrationRun, CalibrationSettings
from hetero_ee.exits.evaluation import Evaluation, evaluate
from hetero_ee.models.hub import resolve_model

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
    if arguments.json:
        print(json.dumps({"schema": 1, "rows": [document(each) for each in measured]}))
    else:
        print_sizes(measured)
        print_boundaries(measured[-1])
        print_depths(measured[-1])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", type=Path, help="text to calibrate on")
    parser.add_argument("--evaluate", type=Path, required=True, help="text to take figures on")
    parser.add_argument("--shipped", action="store_true", help="evaluate the calibration that is there")
    parser.add_argument("--model", help="folder or id; the demo model without it")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tokens to calibrate on")
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens to take figures on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.shipped == (arguments.calibrate is not None):
        parser.error("give one of --calibrate and --shipped")
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


def document(measured: Measured) -> dict[str, Any]:
    return {
        "n_tokens": measured.n_tokens,
        "seconds": measured.seconds,
        "map_ranks": [each.exit_map.rank if each.exit_map else None for each in measured.calibration.boundaries],
        "thresholds": [each.threshold for each in measured.calibration.boundaries],
        "evaluation": asdict(measured.evaluation),
    }


def mean(measured: Measured, figure: str) -> float:
    """A figure's mean over the boundaries."""
    values = [getattr(each, figure) for each in measured.evaluation.boundaries]
    return float(sum(values)) / len(values)


def print_sizes(measured: list[Measured]) -> None:
    print(f"means over all boundaries, on {measured[-1].evaluation.n_tokens} tokens of the other text\n")
    print("| tokens | s | maps | agreement | with map | exit rate | precision | recall | acceptance | mean depth |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for each in measured:
        n_maps = sum(boundary.exit_map is not None for boundary in each.calibration.boundaries)
        cells = [f"{each.n_tokens:,}", f"{each.seconds:.0f}", str(n_maps)]
        cells += [f"{mean(each, figure):.3f}" for figure in FIGURES]
        print(f"| {' | '.join(cells)} | {each.evaluation.depths.mean_depth:.2f} |")


def print_boundaries(measured: Measured) -> None:
    print("\n| boundary | rank | agreement | with map | threshold | exit rate | precision | recall | acceptance |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each, figures in zip(measured.calibration.boundaries, measured.evaluation.boundaries, strict=True):
        rank = str(each.exit_map.rank) if each.exit_map else "no map"
        shares = [f"{getattr(figures, name):.3f}" for name in FIGURES]
        cells = [str(each.boundary), rank, *shares[:2], f"{each.threshold:.2f}", *shares[2:]]
        print(f"| {' | '.join(cells)} |")


def print_depths(measured: Measured) -> None:
    depths = measured.evaluation.depths
    shares = [f"{100 * count / sum(depths.histogram):.1f}" for count in depths.histogram]
    print(f"\ndepth histogram, % from depth 1: {' '.join(shares)}")
    print(f"mean depth {depths.mean_depth:.2f}, with perfect gates {depths.oracle_mean_depth:.2f}")
    print(f"within 2 of the last 5: {depths.locality:.3f}; these cover {depths.near_share:.3f} of the depths")


if __name__ == "__main__":
    main()
