"""Fitting: each predictor learns from tokens of its own context, and thresholds from tokens that come by."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero_ee.calibration.fitting import fit_calibration
from hetero_ee.calibration.predictor_fitting import PredictorTraining
from hetero_ee.calibration.traces import ChunkDrafts
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.speculation.exits.calibration import NO_EXIT, Calibration, CalibrationText
from hetero_ee.speculation.exits.features import exit_features
from tests.calibration_support import small_spec
from tests.pure.test_partial_logits import some_logits

SPEC = small_spec()
N_EXIT_LAYERS, M = SPEC.n_layers - 1, 300
TRAINING = PredictorTraining(n_hidden=8, n_steps=300)


def features_of(sureness: np.ndarray) -> np.ndarray:
    """Of candidates of which the first leads by so much."""
    logits = np.zeros((len(sureness), 4), np.float32)
    logits[:, 0] = 4 * sureness
    return exit_features(logits, np.zeros_like(logits))


def chunks(n_chunks: int = 8, *, partial_right: float = 1.0, seed: int = 0) -> list[ChunkDrafts]:
    """At a token's first exit layer sure drafts are right, after it the unsure ones are (a share partial_right of
    them): a predictor of the one context would be wrong in the other."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(n_chunks):
        sureness, later = random.random((2, N_EXIT_LAYERS, M))
        found.append(
            ChunkDrafts(
                np.stack([features_of(each) for each in sureness]),
                sureness > 0.5,
                sureness > 0.5,
                np.stack([features_of(each) for each in later]),
                (later < 0.5) & (random.random(later.shape) < partial_right),
                np.ones((N_EXIT_LAYERS, M), np.int64),
            )
        )
    return found


def fitted(drafts: list[ChunkDrafts]) -> Calibration:
    matrices = {
        tensor.name: SimpleNamespace(n_bytes=1000)
        for block in decoder_blocks(SPEC)
        for tensor in block.tensors.values()
    }
    weights = SimpleNamespace(matrices=matrices)
    executor: Any = SimpleNamespace(spec=SPEC, blocks=decoder_blocks(SPEC), weights=weights)
    partial = [some_logits(N_EXIT_LAYERS, M, 2)]
    return fit_calibration(executor, drafts, partial, {}, CalibrationText("", 1, 1, 1), 0.9, TRAINING)


def test_each_predictor_learns_from_tokens_of_its_own_context() -> None:
    found = fitted(chunks())
    sure, unsure = features_of(np.array([0.9], np.float32)), features_of(np.array([0.1], np.float32))
    assert found.at(1).partial_predictor is None  # nothing lies before it
    for each in found.exit_layers[1:]:
        assert each.opens(sure, is_partial=False).all() and not each.opens(unsure, is_partial=False).any()
        assert each.opens(unsure, is_partial=True).all() and not each.opens(sure, is_partial=True).any()


def test_a_partial_threshold_is_set_on_the_tokens_that_come_by() -> None:
    """Where the first exit layer lets all tokens exit that would be right after it, none is left to exit there."""
    drafts = chunks()
    for each in drafts:
        each.features[0] = features_of(np.full(M, 0.9, np.float32))
        each.is_right[0] = True
        wrong = np.arange(M) % 20 == 0  # these come by: exit layer 1 does not know them
        each.features[0, wrong] = features_of(np.full(wrong.sum(), 0.1, np.float32))
        each.is_right[0, wrong] = False
        each.partial_is_right[:, wrong] = False
    assert all(each.partial_predictor is None for each in fitted(drafts).exit_layers)


@pytest.mark.parametrize("partial_right", [0.0, 0.3])
def test_without_a_threshold_there_is_no_partial_predictor_and_one_exit_layer_judges(partial_right: float) -> None:
    found = fitted(chunks(partial_right=partial_right))
    assert [(each.partial_predictor, each.partial_threshold) for each in found.exit_layers] == [
        (None, NO_EXIT)
    ] * N_EXIT_LAYERS
    assert len(found.schedule) == 1
