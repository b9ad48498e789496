"""Drafts by early exit, as the plan wants them and the calibration has fitted them."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.prediction import step_times
from hetero_ee.speculation.draft_gate import AdaptiveGate, FixedGate, Gate
from hetero_ee.speculation.draft_pace import Pace
from hetero_ee.speculation.drafting import Drafting, ExitHead
from hetero_ee.speculation.exits.calibration import Calibration, FittedExitLayer
from hetero_ee.speculation.exits.confidence import ExitConfidence
from hetero_ee.speculation.exits.exit_map import ExitMap
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
    )


def _gate(
    calibration: Calibration, spec: ModelSpec, profile: HardwareProfile | None, plan: Plan, exit_layer: int
) -> tuple[Gate, int]:
    """By costs where they are known, else the threshold that was calibrated; and the layers worth drafting ahead."""
    if profile is None:
        return FixedGate(calibration.at(exit_layer).threshold), 0
    times = step_times(spec, profile, plan)
    gate = AdaptiveGate(times.draft_s(exit_layer), partial(times.verify_s, exit_layer))
    return gate, times.layers_ahead(exit_layer)


def _exit_head(fitted: FittedExitLayer, *, compiled: bool) -> ExitHead:
    exit_map = None if fitted.exit_map is None else _mapped_by(fitted.exit_map)
    judged = ExitConfidence(fitted.predictor, compiled=compiled)
    return ExitHead(exit_map, lambda normed, logits, token_id: judged.of_row(logits))


def _mapped_by(exit_map: ExitMap) -> Callable[[Tensor], Tensor]:
    """The map computes on the CPU, wherever the states lie."""
    return lambda normed: exit_map.apply(normed.cpu())
