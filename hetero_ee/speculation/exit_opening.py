"""Drafts by early exit, as the plan wants them and the calibration has fitted them."""

from collections.abc import Callable

from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.round_costs import round_costs
from hetero_ee.speculation.draft_gate import AdaptiveGate, FixedGate, Gate
from hetero_ee.speculation.draft_pace import Pace
from hetero_ee.speculation.drafting import Drafting, ExitHead, ExitLevel, ExitLevels
from hetero_ee.speculation.exits.calibration import Calibration, FittedExitLayer
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.predictor import ExitConfidence
from hetero_ee_profiles.hardware import HardwareProfile


def exit_drafting(
    calibration: Calibration | None,
    plan: Plan,
    spec: ModelSpec,
    profile: HardwareProfile | None,
    warn: Callable[[str], None],
    pace: Pace | None,
    *,
    compiled: bool = False,
) -> Drafting:
    """profile: None judges by calibrated thresholds alone. compiled: the CPU kernels may be used. Raises UsageError
    without a calibration."""
    if calibration is None or plan.exit_layer is None:
        raise UsageError("the plan drafts by early exit and this model has no calibration; run hetero-ee calibrate.")
    fitted = calibration.at(plan.exit_layer)
    gate, layers_ahead = _gate(calibration, spec, profile, plan, plan.exit_layer)
    levels = exit_levels(calibration, plan, compiled=compiled)
    return Drafting(
        plan.exit_layer,
        plan.draft_length,
        gate,
        _exit_head(fitted, compiled=compiled),
        None,
        warn,
        pace,
        drafts_ahead=layers_ahead > 0,
        layers_ahead=layers_ahead,
        levels=levels,
    )


def exit_levels(calibration: Calibration, plan: Plan, *, compiled: bool = False) -> ExitLevels | None:
    """The plan's, and every other exit layer from the first of them to its own, for those that recent exits wake; None
    where it has none. Waking earlier ones too cost 2 points of precision and brought no depth (demo model)."""
    if not plan.exit_levels or plan.exit_layer is None:
        return None
    by_exit_layer = {
        level: _level(calibration.at(level), compiled=compiled) for level in range(plan.exit_levels[0], plan.exit_layer)
    }
    return ExitLevels(by_exit_layer, plan.exit_levels)


def _level(fitted: FittedExitLayer, *, compiled: bool) -> ExitLevel:
    known = fitted.partial_predictor
    sliced = None if known is None else ExitConfidence(known, compiled=compiled).of_candidates
    return ExitLevel(_exit_head(fitted, compiled=compiled), fitted.threshold, sliced, fitted.partial_threshold)


def _gate(
    calibration: Calibration, spec: ModelSpec, profile: HardwareProfile | None, plan: Plan, exit_layer: int
) -> tuple[Gate, int]:
    """By costs where they are known, else the threshold that was calibrated; and the layers worth drafting ahead."""
    if profile is None:
        return FixedGate(calibration.at(exit_layer).threshold), 0
    walk = calibration.statistics().level_walk(exit_layer)
    costs = round_costs(spec, profile, plan, exit_layer, walk)
    return AdaptiveGate(costs.draft_s, costs.verify_s), costs.layers_ahead


def _exit_head(fitted: FittedExitLayer, *, compiled: bool) -> ExitHead:
    exit_map = None if fitted.exit_map is None else _mapped_by(fitted.exit_map)
    judged = ExitConfidence(fitted.predictor, compiled=compiled)
    return ExitHead(exit_map, lambda normed, logits, token_id: judged.of_row(logits))


def _mapped_by(exit_map: ExitMap) -> Callable[[Tensor], Tensor]:
    """The map computes on the CPU, wherever the states lie."""
    return lambda normed: exit_map.apply(normed.cpu())
