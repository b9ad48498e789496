"""Plots a calibration: agreement, acceptance and exits by exit layer. Needs the extra [plot]."""

from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero_ee.errors import UsageError, shown
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.weights.store.filesystem import UNFINISHED_SUFFIX

FORMATS = {".png": "png", ".svg": "svg"}


def picture_format(file: Path) -> str:
    """Return the picture format for the file name's suffix. Raises: UsageError: for an unsupported suffix."""
    found = FORMATS.get(file.suffix.lower())
    if found is None:
        raise UsageError(f"{shown(str(file))} is not a picture; expected a name that ends in .png or .svg.")
    return found


def require_matplotlib() -> ModuleType:
    """Return matplotlib.figure. Raises: UsageError: if it is missing; the message names the extra to install."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise UsageError('pictures need matplotlib; install it with pip install "hetero-ee[plot]".') from error
    module: ModuleType = figure
    return module


def save_picture(figure: Any, file: Path) -> None:
    """Save a figure in the format of its file name, completely or not at all. Raises: UsageError: if it can't be
    written."""
    unfinished = file.with_name(file.name + UNFINISHED_SUFFIX)
    try:
        figure.savefig(unfinished, format=picture_format(file), dpi=120)
        unfinished.replace(file)
    except OSError as error:
        raise UsageError(f"the picture {file} can't be written ({error.strerror}); choose another path.") from error
    finally:
        with suppress(OSError):  # the file may not exist
            unfinished.unlink()


def plot_exits(calibration: Calibration, file: Path) -> None:
    """Plot the curves over the exit layers. Raises: UsageError: without matplotlib, or if the file can't be written."""
    figure = require_matplotlib().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    exit_layers = [each.exit_layer for each in calibration.exit_layers]
    metrics = [each.metrics for each in calibration.exit_layers]
    axes.plot(exit_layers, [each.agreement for each in metrics], marker="o", label="agreement without a map")
    if any(each.mapped_agreement is not None for each in metrics):
        axes.plot(exit_layers, [each.drafted_agreement for each in metrics], marker="o", label="agreement with map")
    axes.plot(exit_layers, [each.acceptance for each in metrics], marker="s", label="acceptance of gated drafts")
    axes.plot(exit_layers, [each.exit_rate for each in metrics], marker="^", linestyle="--", label="exit rate")
    n_tokens = calibration.text.n_held_out_tokens
    axes.set(xlabel="layers run before the exit", ylabel=f"share of {n_tokens} held-out tokens", ylim=(0, 1.02))
    axes.set_title(f"early exits of {calibration.n_layers} layers, calibrated on {calibration.text.description}")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, file)
