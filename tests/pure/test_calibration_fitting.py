"""Fitting: each predictor learns from the rows of its own context, and thresholds from rows that come by."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero_ee.calibration.fitting import fit_calibration
from hetero_ee.calibration.mlp_training import MlpTraining
from hetero_ee.calibration.predictor_quality import NO_EXIT
from hetero_ee.calibration.row_stage import RowStage
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.speculation.exits.calibration import Calibration, CalibrationText
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.schedule import NO_SCHEDULE
from tests.calibration_support import small_spec
from tests.pure.test_sliced_logits import some_logits

SPEC = small_spec()
N_BOUNDARIES, M = SPEC.n_layers - 1, 300
TRAINING = MlpTraining(n_hidden=8, n_steps=300)


def features_of(sureness: np.ndarray) -> np.ndarray:
    """Of candidates of which the first leads by so much."""
    logits = np.zeros((len(sureness), 4), np.float32)
    logits[:, 0] = 4 * sureness
    return exit_features(logits, np.zeros_like(logits))


def rows(n_chunks: int = 8, *, sliced_right: float = 1.0, seed: int = 0) -> RowStage:
    """At a row's first exit layer sure drafts are right, behind it the unsure ones are (a share sliced_right of
    them): a predictor of the one context would be wrong in the other."""
    random = np.random.default_rng(seed)
    stage: Any = RowStage.__new__(RowStage)
    names = ("features", "is_right", "is_right_unmapped", "sliced_features", "sliced_is_right", "sliced_first")
    for name in names:
        setattr(stage, name, [])
    for _ in range(n_chunks):
        sureness, behind = random.random((2, N_BOUNDARIES, M))
        stage.features.append(np.stack([features_of(each) for each in sureness]))
        stage.is_right.append(sureness > 0.5)
        stage.is_right_unmapped.append(sureness > 0.5)
        stage.sliced_features.append(np.stack([features_of(each) for each in behind]))
        stage.sliced_is_right.append((behind < 0.5) & (random.random(behind.shape) < sliced_right))
        stage.sliced_first.append(np.ones((N_BOUNDARIES, M), np.int64))
    stage.sliced = {number: some_logits(N_BOUNDARIES, M, number) for number in (2, 3)}
    return stage  # type: ignore[no-any-return]


def fitted(stage: RowStage) -> Calibration:
    matrices = {
        tensor.name: SimpleNamespace(n_bytes=1000)
        for block in decoder_blocks(SPEC)
        for tensor in block.tensors.values()
    }
    weights = SimpleNamespace(matrices=matrices)
    executor: Any = SimpleNamespace(spec=SPEC, blocks=decoder_blocks(SPEC), weights=weights)
    return fit_calibration(executor, stage, {}, CalibrationText("", 1, 1, 1, 1), {}, 0.9, TRAINING)


def test_each_predictor_learns_from_rows_of_its_own_context() -> None:
    found = fitted(rows())
    sure, unsure = features_of(np.array([0.9], np.float32)), features_of(np.array([0.1], np.float32))
    assert found.at(1).sliced_predictor is None  # nothing lies before it
    for each in found.exit_layers[1:]:
        assert each.opens(sure, is_sliced=False).all() and not each.opens(unsure, is_sliced=False).any()
        assert each.opens(unsure, is_sliced=True).all() and not each.opens(sure, is_sliced=True).any()


def test_a_sliced_threshold_is_set_on_the_rows_that_come_by() -> None:
    """Where the first exit layer lets all rows exit that would be right behind it, none is left to exit there."""
    stage = rows()
    for number in range(len(stage.features)):
        stage.features[number][0] = features_of(np.full(M, 0.9, np.float32))
        stage.is_right[number][0] = True
        wrong = np.arange(M) % 20 == 0  # these come by: exit layer 1 does not know them
        stage.features[number][0, wrong] = features_of(np.full(wrong.sum(), 0.1, np.float32))
        stage.is_right[number][0, wrong] = False
        stage.sliced_is_right[number][:, wrong] = False
    assert all(each.sliced_predictor is None for each in fitted(stage).exit_layers)


@pytest.mark.parametrize("sliced_right", [0.0, 0.3])
def test_without_a_threshold_there_is_no_sliced_predictor_and_no_schedule(sliced_right: float) -> None:
    found = fitted(rows(sliced_right=sliced_right))
    assert [(each.sliced_predictor, each.sliced_threshold) for each in found.exit_layers] == [
        (None, NO_EXIT)
    ] * N_BOUNDARIES
    assert found.schedule == NO_SCHEDULE
    assert all(each.walk.n_evaluated == 1 for each in found.exit_layers)
