"""Expected tokens per second along the VRAM budget, as bars or as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from hetero_ee_profiles.units import GIB

if TYPE_CHECKING:
    from hetero_ee.planning.reports.what_if import Curve, CurvePoint, Request

BAR_COLUMNS = 50
USED, ALL = "you are here", "all layers on the GPU"


def curve_text(curve: "Curve", request: "Request") -> str:
    """Return a bar for each budget."""
    most = max(point.tokens_per_s for point in curve.points)
    lines = [*_title(request), "", f"{'VRAM GiB':>8}  {'tokens/s':>8}"]
    for point in curve.points:
        bar = "#" * round(BAR_COLUMNS * point.tokens_per_s / most)
        marks = ", ".join(_marks(curve, point))
        line = f"{point.vram_budget_bytes / GIB:8.2f}  {point.tokens_per_s:8.2f}  {bar}"
        lines.append(f"{line:{BAR_COLUMNS + 20}}  <- {marks}" if marks else line)
    return "\n".join([*lines, *_out_of_reach(curve)])


def save_curve(curve: "Curve", request: "Request", file: Path) -> None:
    """Save the curve as PNG or SVG.

    Raises:
        UsageError: if matplotlib is missing, or the file can't be written.
    """
    from hetero_ee.calibration.plot import require_matplotlib, save_picture

    figure = require_matplotlib().Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([p.vram_budget_bytes / GIB for p in curve.points], [p.tokens_per_s for p in curve.points], marker=".")
    for words, n_bytes, side, offset in ((USED, curve.used_bytes, "right", -3), (ALL, curve.all_bytes, "left", 3)):
        if n_bytes <= curve.points[-1].vram_budget_bytes:
            axes.axvline(n_bytes / GIB, color="C1", linestyle="--")
            place, upright = (n_bytes / GIB, 0), {"rotation": 90, "ha": side, "va": "bottom"}
            axes.annotate(words, place, (offset, 8), textcoords="offset points", **upright)
    axes.set(
        xlabel="VRAM budget, GiB",
        ylabel="expected tokens/s",
        ylim=(0, None),
        xlim=(0, curve.points[-1].vram_budget_bytes / GIB),
    )
    axes.set_title("\n".join([*_title(request), *_out_of_reach(curve)]), fontsize="medium")
    axes.grid(alpha=0.3)
    save_picture(figure, file)


def _title(request: "Request") -> list[str]:
    made = request.made
    derived = "" if made.hardware_kind == "measured" else " (derived from data sheets, nothing measured)"
    context = f"context {made.context_tokens}, rates after {made.prediction.context_tokens} tokens"
    return [f"{made.name or made.model} on {made.hardware}{derived}", f"{context}, {made.kv_type} keys and values"]


def _marks(curve: "Curve", point: "CurvePoint") -> list[str]:
    known = ((USED, curve.used_bytes), (ALL, curve.all_bytes))
    return [words for words, n_bytes in known if point.vram_budget_bytes == n_bytes]


def _out_of_reach(curve: "Curve") -> list[str]:
    """Return how much more memory all layers need, if the card has too little."""
    if curve.all_bytes <= curve.points[-1].vram_budget_bytes:
        return []
    return [f"{ALL} would take {curve.all_bytes / GIB:.2f} GiB"]
