"""Drafts by exit, made ready: levels of the plan, predictors of the calibration, a gate by the plan's costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT, Plan
from hetero_ee.planning.planner import plan
from hetero_ee.speculation.draft_gate import AdaptiveGate, FixedGate
from hetero_ee.speculation.exit_opening import exit_drafting, exit_levels
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee_profiles.hardware import HardwareProfile
from tests.calibration_support import some_calibration
from tests.device_support import SPEC as TWO_LAYERS
from tests.device_support import round_profile

N_LAYERS = 6
SPEC: ModelSpec = replace(TWO_LAYERS, n_layers=N_LAYERS, sliding_windows=(None,) * N_LAYERS)
PLENTY = 2**33
CALIBRATION = some_calibration(SPEC)


def roomy_profile() -> HardwareProfile:
    """The machine of round numbers, whose GPU takes a quarter of the CPU's time."""
    found = round_profile()
    assert found.gpu is not None
    cpu = tuple(replace(times, free_bytes=PLENTY) for times in found.cpu)
    gpu, machine = (replace(found.gpu, free_bytes=PLENTY), replace(found.machine, ram_bytes=PLENTY, vram_bytes=PLENTY))
    return replace(found, cpu=cpu, gpu=gpu, machine=machine)


PROFILE = roomy_profile()


def exit_plan(**limits: Any) -> Plan:
    found = plan(SPEC, PROFILE, Limits(context_tokens=64, mode="full", **limits))
    return replace(found, mode="exact", drafts=EXIT, exit_layer=4, exit_levels=(1, 3), draft_length=3)


def test_every_boundary_before_the_plans_is_a_level_and_the_plans_own_are_scheduled() -> None:
    levels = exit_levels(CALIBRATION, exit_plan())
    assert levels is not None and levels.scheduled == (1, 3) and sorted(levels.by_exit_layer) == [1, 2, 3]
    for exit_layer, level in levels.by_exit_layer.items():
        fitted = CALIBRATION.at(exit_layer)
        assert (level.threshold, level.sliced_threshold) == (fitted.threshold, fitted.sliced_threshold)
        assert (level.sliced is None) == (fitted.sliced_predictor is None)
        assert (level.head.map is None) == (fitted.exit_map is None)
    assert exit_levels(CALIBRATION, replace(exit_plan(), exit_levels=())) is None


def test_confidences_are_the_predictors() -> None:
    levels, fitted = exit_levels(CALIBRATION, exit_plan()), CALIBRATION.at(2)
    assert levels is not None and fitted.sliced_predictor is not None
    level, logits = levels.by_exit_layer[2], torch.linspace(0, 3, 32)
    best = logits.topk(4).values.numpy()
    first = fitted.predictor.probability(exit_features(best[None], np.zeros((1, 4), np.float32)))
    assert level.head.confidence_of(torch.zeros(3), logits, 0, True) == pytest.approx(float(first[0]), rel=1e-5)
    softmax = np.array([0.7, 0.1, 0.1, 0.1], np.float32)
    later = fitted.sliced_predictor.probability(exit_features(best[None], softmax[None].copy()))
    assert level.sliced is not None and level.sliced(best, softmax) == pytest.approx(float(later[0]), rel=1e-5)
    assert softmax == pytest.approx(torch.softmax(torch.from_numpy(best), 0).numpy())  # for the next level


def test_the_gate_goes_by_costs_where_they_are_known() -> None:
    arguments: Any = (CALIBRATION, exit_plan(), SPEC)
    assert isinstance(exit_drafting(*arguments, PROFILE, print, None).gate, AdaptiveGate)
    fixed = exit_drafting(*arguments, None, print, None)
    assert isinstance(fixed.gate, FixedGate) and not fixed.drafts_ahead
    with pytest.raises(UsageError, match="this model has no calibration"):
        exit_drafting(None, exit_plan(), SPEC, PROFILE, print, None)


@pytest.mark.parametrize(("gpu_layers", "layers_ahead"), [(0, 0), (2, 2), (4, 4), (6, 0)])
def test_rows_begin_ahead_where_the_gpu_is_done_before_the_cpu(gpu_layers: int, layers_ahead: int) -> None:
    made = exit_plan(gpu_layers=gpu_layers)
    found = exit_drafting(CALIBRATION, made, SPEC, PROFILE, print, None)
    assert (found.drafts_ahead, found.layers_ahead) == (layers_ahead > 0, layers_ahead)
