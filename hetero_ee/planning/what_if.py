"""The same request with another VRAM budget: what a gigabyte more would bring, and the whole curve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import Statistics
from hetero_ee_profiles.hardware import DERIVED, HardwareProfile

GIB = 2**30
N_CURVE_POINTS = 17
BAR_COLUMNS = 50


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One budget and the rate expected with it."""

    vram_budget_bytes: int
    tokens_per_s: float
    gpu_layers: int


def with_other_vram(
    made: Plan,
    spec: ModelSpec,
    profile: HardwareProfile,
    limits: Limits,
    statistics: Statistics,
    extra_bytes: int,
) -> Plan | None:
    """The plan with so much more VRAM, on a card that has it; None where there is no GPU or nothing would be left."""
    budget = made.vram_budget_bytes + extra_bytes
    if profile.gpu is None or made.vram_budget_bytes == 0 or budget <= 0:
        return None
    card = replace(profile, gpu=replace(profile.gpu, free_bytes=max(profile.gpu.free_bytes, budget)))
    try:
        return plan(
            spec,
            card,
            replace(limits, vram_budget_bytes=budget),
            statistics,
            predict_at_tokens=made.prediction.context_tokens,
        )
    except UsageError:  # what is pinned does not fit any more
        return None


def vram_curve(spec: ModelSpec, profile: HardwareProfile, limits: Limits, statistics: Statistics) -> list[CurvePoint]:
    """Rates at budgets from nothing to what makes everything fit, or to twice the card. Raises UsageError."""
    if profile.gpu is None:
        raise UsageError(f"{profile.name} has no GPU, so there is no curve; choose another machine with --hardware.")
    top = 2 * profile.gpu.free_bytes
    card = replace(profile, gpu=replace(profile.gpu, free_bytes=top))
    points: list[CurvePoint] = []
    refusal = None
    for index in range(N_CURVE_POINTS):
        budget = top * index // (N_CURVE_POINTS - 1)
        try:
            found = plan(spec, card, replace(limits, vram_budget_bytes=budget), statistics)
        except UsageError as error:  # pins that need more, or nothing helps
            refusal = error
            continue
        points.append(CurvePoint(budget, found.prediction.generated_tokens_per_s, found.gpu_layers))
        if found.gpu_layers == spec.n_layers:
            break
    if refusal is not None and not points:
        raise refusal
    return points


def curve_text(points: Sequence[CurvePoint], profile: HardwareProfile) -> str:
    """A bar for each budget."""
    most = max(point.tokens_per_s for point in points)
    lines = [f"{'VRAM GiB':>8}  {'tokens/s':>8}  expected{_marked(profile)}"]
    for point in points:
        bar = "#" * round(BAR_COLUMNS * point.tokens_per_s / most)
        lines.append(f"{point.vram_budget_bytes / GIB:8.2f}  {point.tokens_per_s:8.2f}  {bar}")
    return "\n".join(lines)


def curve_png(points: Sequence[CurvePoint], profile: HardwareProfile, file: Path) -> None:
    """The curve as a picture. Raises UsageError where matplotlib is missing or the file can't be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('pictures need matplotlib; install it with pip install "hetero-ee[plot]".') from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([p.vram_budget_bytes / GIB for p in points], [p.tokens_per_s for p in points], marker="o")
    axes.set(
        xlabel="VRAM budget, GiB", ylabel="expected tokens/s", title=f"{profile.name}{_marked(profile)}", ylim=(0, None)
    )
    axes.grid(alpha=0.3)
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"the picture {file} can't be written ({error.strerror}); choose another folder.") from error


def _marked(profile: HardwareProfile) -> str:
    return " (derived from data sheets, nothing measured)" if profile.kind == DERIVED else ""
