"""`hetero-ee calibrate`: after how many layers a model's tokens are known, measured and kept."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.options.engine import EngineOptions, ModelArgument
from hetero_ee_cli.options.flags import Json, with_options
from hetero_ee_cli.terminal.output import print_document, printable, say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.calibration.job import CalibrationOutcome, CalibrationRequest
    from hetero_ee.speculation.exits.calibration import Calibration, ExitLayerCalibration

STANDARD_INPUT = "-"
MAX_NAMED = 3  # texts named in the description


@with_options(without={"profile": "nothing is planned for it"})
def calibrate(
    engine: EngineOptions,
    model: ModelArgument = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to calibrate on, - for standard input; can be given more than once. [default: the model's own]"
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to calibrate on. [default: 8192]")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot agreement and acceptance by layer to a PNG file; needs the extra [plot]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure and fit a model's early exits, and keep the result next to its converted weights.

    Half of the text trains exit maps and predictors, a quarter sets thresholds, and the rest gives the metrics. If
    interrupted, run it again: it resumes.
    """
    options = engine.arguments(model)
    with ending_at_once():
        from hetero_ee.engine import Engine
    from hetero_ee.calibration.plot import plot_png, require_matplotlib

    if plot is not None:
        require_matplotlib()  # refused now, not after minutes of work
    request = _request(text, tokens)
    with stage_progress() as progress, Engine.from_pretrained(progress=progress, **options) as opened:
        outcome = opened.calibrate(request, progress)
    if plot is not None:
        plot_png(outcome.calibration, plot)
    if as_json:
        print_document(_document(options["model"], outcome), with_version=True)
    else:
        _print_table(outcome.calibration)
    n_tokens = outcome.calibration.text.n_tokens
    say(f"[ {n_tokens:,} tokens | {outcome.seconds:.0f} s | {printable(str(outcome.folder))} ]")


def _request(files: list[Path] | None, n_tokens: int | None) -> "CalibrationRequest":
    from hetero_ee.calibration.job import CalibrationRequest

    changes: dict[str, Any] = {} if n_tokens is None else {"n_tokens": n_tokens}
    if not files:
        return CalibrationRequest(**changes)
    texts = tuple(read_text("text", None if str(file) == STANDARD_INPUT else file) for file in files)
    names = [printable(file.name) for file in files]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return CalibrationRequest(texts=texts, description=", ".join(names[:MAX_NAMED]) + more, **changes)


def _print_table(calibration: "Calibration") -> None:
    print("exit layer  agreement  with map  exit rate  precision  recall  acceptance")
    for each in calibration.exit_layers:
        print(_row(each))
    candidates = ", ".join(map(str, calibration.schedule))
    print(f"\ncandidate exit layers: {candidates or 'a single one'}")
    depths = calibration.depths
    means = f"mean depth {depths.mean_depth:.2f} of {calibration.n_layers} layers"
    print(f"{means} ({depths.oracle_mean_depth:.2f} with perfect predictors)")
    print(f"{depths.locality:.0%} of tokens exit within 2 layers of one of the previous 5")


def _row(each: "ExitLayerCalibration") -> str:
    metrics = each.metrics
    mapped = f"{metrics.mapped_agreement:8.3f}" if metrics.mapped_agreement is not None else f"{'-':>8}"
    gate = f"{metrics.exit_rate:9.3f}  {metrics.precision:9.3f}  {metrics.recall:6.3f}  {metrics.acceptance:10.3f}"
    return f"{each.exit_layer:8}  {metrics.agreement:9.3f}  {mapped}  {gate}"


def _document(model: str | None, outcome: "CalibrationOutcome") -> dict[str, Any]:
    calibration = outcome.calibration
    exit_layers = [
        {
            "exit_layer": each.exit_layer,
            "map_rank": each.exit_map.rank if each.exit_map else None,
            "threshold": each.threshold,
            "partial_threshold": each.partial_threshold if each.partial_predictor else None,
            **asdict(each.metrics),
        }
        for each in calibration.exit_layers
    ]
    return {
        "model": model or "demo",
        "folder": str(outcome.folder),
        "seconds": outcome.seconds,
        "text": asdict(calibration.text),
        "exit_layers": exit_layers,
        "schedule": calibration.schedule,
        "depths": asdict(calibration.depths),
    }
