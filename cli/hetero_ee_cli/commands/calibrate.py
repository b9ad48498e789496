"""`hetero-ee calibrate`: how early the model's tokens can be known, measured and kept beside its store."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.options.engine import Revision, engine_options
from hetero_ee_cli.options.planning import ModelArgument
from hetero_ee_cli.options.settings import Offline, Quantizer, Threads
from hetero_ee_cli.terminal.output import printable, say
from hetero_ee_cli.terminal.signals import ending_at_once
from hetero_ee_cli.terminal.text_file import read_text

if TYPE_CHECKING:
    from hetero_ee.calibration.job import CalibrationOutcome, CalibrationRequest
    from hetero_ee.speculation.exits.calibration import Calibration, ExitLayerCalibration

JSON_SCHEMA = 2
STANDARD_INPUT = "-"
MAX_NAMED = 3  # texts named in the description


def calibrate(
    model: ModelArgument = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to calibrate on, - for standard input; several times for several. [default: its own]"),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to calibrate on. [default: 8192]")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw agreement and acceptance by layer into a PNG file; needs the extra [plot]."),
    ] = None,
    revision: Revision = None,
    offline: Offline = None,
    quantizer: Quantizer = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as a JSON document.")] = False,
) -> None:
    """Measure and fit a model's early exits, and keep the result beside its store. An interrupted run can be resumed.

    Half of the text trains exit maps and predictors, a quarter sets thresholds, and the last gives the metrics.
    """
    options = engine_options(
        model=model, revision=revision, offline=offline, quantizer=quantizer, ctx_size=None, threads=threads
    )
    with ending_at_once():
        from hetero_ee.engine import Engine
    from hetero_ee.calibration.plot import plot_png, require_matplotlib
    from hetero_ee_cli.terminal.progress import stage_progress

    if plot is not None:
        require_matplotlib()  # known before minutes are spent
    request = _request(text, tokens)
    with stage_progress() as progress, Engine.from_pretrained(progress=progress, **options) as engine:
        outcome = engine.calibrate(request, progress)
    if plot is not None:
        plot_png(outcome.calibration, plot)
    if as_json:
        print(json.dumps(_document(options["model"], outcome)))
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
    schedule = ", ".join(str(exit_layer) for exit_layer in calibration.schedule)
    print(f"\nexit layers worth judging tokens at: {schedule or 'any one alone'}")
    depths = calibration.depths
    means = f"mean depth {depths.mean_depth:.2f} of {calibration.n_layers} layers"
    print(f"{means} ({depths.oracle_mean_depth:.2f} with perfect gates)")
    print(f"{depths.locality:.0%} of tokens exit within 2 layers of one of the last 5")


def _row(each: "ExitLayerCalibration") -> str:
    metrics = each.metrics
    mapped = f"{metrics.mapped_agreement:8.3f}" if metrics.mapped_agreement is not None else f"{'-':>8}"
    gate = f"{metrics.exit_rate:9.3f}  {metrics.precision:9.3f}  {metrics.recall:6.3f}  {metrics.acceptance:10.3f}"
    return f"{each.exit_layer:8}  {metrics.agreement:9.3f}  {mapped}  {gate}"


def _document(model: str | None, outcome: "CalibrationOutcome") -> dict[str, Any]:
    from dataclasses import asdict

    from hetero_ee import __version__

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
        "schema": JSON_SCHEMA,
        "version": __version__,
        "model": model or "demo",
        "folder": str(outcome.folder),
        "seconds": outcome.seconds,
        "text": asdict(calibration.text),
        "exit_layers": exit_layers,
        "schedule": calibration.schedule,
        "depths": asdict(calibration.depths),
    }
