"""Drafting made ready: the calibration's predictors, a rule by the plan's costs, every registered source."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT, SEQUENCE, Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.opening import Opened
from hetero_ee.speculation import opening
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.opening import DraftKnowledge, open_drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule
from hetero_ee_kernels.reference import judged
from hetero_ee_profiles.hardware import HardwareProfile
from tests.calibration_support import some_calibration
from tests.device_support import SPEC as TWO_LAYERS
from tests.device_support import round_profile
from tests.draft_sources import ScriptedSource, following
from tests.scripted_model import HIDDEN, PROMPT, ScriptedModel, decoding, successor

N_LAYERS, EXIT_LAYER, PLENTY = 6, 4, 2**33
SPEC: ModelSpec = replace(TWO_LAYERS, n_layers=N_LAYERS, sliding_windows=(None,) * N_LAYERS)
CALIBRATION = some_calibration(SPEC)


def roomy_profile() -> HardwareProfile:
    """The machine of round numbers, whose GPU takes a quarter of the CPU's time."""
    found = round_profile()
    assert found.gpu is not None
    cpu = tuple(replace(times, free_bytes=PLENTY) for times in found.cpu)
    gpu, machine = (replace(found.gpu, free_bytes=PLENTY), replace(found.machine, ram_bytes=PLENTY, vram_bytes=PLENTY))
    return replace(found, cpu=cpu, gpu=gpu, machine=machine)


PROFILE = roomy_profile()


def drafting_plan(drafts: str, **limits: Any) -> Plan:
    found = plan(SPEC, PROFILE, Limits(context_tokens=64, mode="full", **limits))
    exit_layer = EXIT_LAYER if drafts == EXIT else 0
    return replace(found, mode="exact", drafts=drafts, exit_layer=exit_layer, draft_length=3)


def opened(drafts: str, executor: Any = None, placement: PlanRequest | None = None, **limits: Any) -> Opened:
    unquantized: Any = SimpleNamespace(spec=SPEC, weights=SimpleNamespace(quantizer="none"))
    return Opened(executor or unquantized, lambda: 0.0, drafting_plan(drafts, **limits), request=placement)


def exits(profile: HardwareProfile | None = PROFILE, **limits: Any) -> Drafting:
    found = open_drafting(DraftKnowledge(CALIBRATION), opened(EXIT, **limits), profile, print)
    assert found is not None and found.origin == "exit after layer 4"
    return found


def test_confidences_are_the_predictors() -> None:
    found, fitted, logits = exits(), CALIBRATION.at(EXIT_LAYER), torch.linspace(0, 3, 32)
    assert (found.exit_layer, found.draft_length, found.sources) == (EXIT_LAYER, 3, ())
    best = logits.topk(4).values.numpy()
    expected = fitted.predictor.probability(exit_features(best[None], np.zeros((1, 4), np.float32)))
    end = found.exit_end
    assert end is not None and end.judge is not None and (end.state_map is None) == (fitted.exit_map is None)
    assert end.judge.of_row(logits) == pytest.approx(float(expected[0]), rel=1e-5)
    assert float(judged(logits, *end.judge.network)) == pytest.approx(float(expected[0]), rel=1e-5)  # on a GPU


def test_the_rule_goes_by_costs_where_they_are_known() -> None:
    assert isinstance(exits().rule, MarginalRule)
    unpriced = exits(None)
    assert isinstance(unpriced.rule, FixedThreshold) and unpriced.async_layers == 0
    assert unpriced.rule.is_worth([CALIBRATION.at(EXIT_LAYER).threshold], 0.0)
    with pytest.raises(UsageError, match="this model has no calibration"):
        open_drafting(DraftKnowledge(), opened(EXIT), PROFILE, print)


@pytest.mark.parametrize(("gpu_layers", "async_layers"), [(0, 0), (2, 2), (4, 4), (6, 0)])
def test_guesses_begin_where_the_gpu_is_done_before_the_cpu(gpu_layers: int, async_layers: int) -> None:
    assert exits(gpu_layers=gpu_layers).async_layers == async_layers


@pytest.mark.parametrize(
    ("mode", "draft_length", "has_switch"), [("exact", None, False), (None, None, True), (None, 3, True)]
)
def test_who_asks_for_exact_mode_gets_it_at_its_length(
    mode: str | None, draft_length: int | None, has_switch: bool
) -> None:
    """Else the switch may turn drafting off; and a length that nobody asked for is the rule's to find."""
    placement = PlanRequest(PROFILE, Limits(mode=mode, draft_length=draft_length))
    found = open_drafting(DraftKnowledge(), opened(SEQUENCE, placement=placement), PROFILE, print)
    assert found is not None and (found.switch is not None) == has_switch
    assert found.draft_length == (3 if draft_length else 8)


def test_a_source_that_is_registered_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_source(request: opening.DraftingRequest) -> ScriptedSource | None:
        return ScriptedSource(following(successor), HIDDEN) if request.profile is None else None

    def found(profile: HardwareProfile | None, executor: Any = None) -> Drafting:
        drafting = open_drafting(DraftKnowledge(), opened(SEQUENCE, executor), profile, print)
        assert drafting is not None
        return drafting

    monkeypatch.setattr(opening, "SOURCES", (*opening.SOURCES, open_source))
    model, counts = ScriptedModel(successor, successor), DraftCounts()
    drafting = found(None, model)
    assert drafting.origin == "scripted" and found(PROFILE).origin == "n-grams"
    tokens = list(decoding(model, drafting, [PROMPT], 12, counts))
    assert tokens == list(decoding(ScriptedModel(successor, successor), None, [PROMPT]))
    (origin,) = counts.statistics(model.spec.n_layers, 0).origins
    assert (origin.origin, origin.precision) == ("scripted", 1.0) and origin.n_drafted > 6


@pytest.mark.parametrize(("gpu_layers", "is_emulated", "n_drafts"), [(None, False, 1), (None, True, 0), (0, False, 0)])
def test_a_gpu_has_made_a_draft_before_a_text_asks_for_one(
    gpu_layers: int | None, is_emulated: bool, n_drafts: int
) -> None:
    """So that kernels, weights and a graph are there; a clock that is emulated stands still."""
    ends = []
    executor: Any = SimpleNamespace(spec=SPEC, weights=SimpleNamespace(quantizer="none"))
    executor.draft = lambda hidden, noise, end: ends.append(end)
    found = replace(opened(EXIT, executor, gpu_layers=gpu_layers), running=lambda: executor, is_emulated=is_emulated)
    drafting = open_drafting(DraftKnowledge(CALIBRATION), found, PROFILE, print)
    assert drafting is not None and ends == [drafting.exit_end] * n_drafts
