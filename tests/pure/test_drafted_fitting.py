"""Exits for the candidates of a draft: what counts as a right exit, and that the fit finds where tokens can exit."""

from functools import partial

import numpy as np
import pytest

from hetero_ee.calibration.drafted_fitting import DraftedParts, fit_drafted
from hetero_ee.calibration.fitting import judging
from hetero_ee.calibration.predictor_fitting import PredictorTraining
from hetero_ee.calibration.schedule import ReadBytes
from hetero_ee.calibration.traces import DraftedChunk
from hetero_ee.speculation.exits.features import exit_features

N_EXIT_LAYERS, M = 5, 240
TRAINING = PredictorTraining(n_hidden=8, n_steps=300)


def a_chunk(seed: int, *, n_sure: int = 2) -> DraftedChunk:
    """At the last n_sure exit layers the candidate that leads is the full model's token, before them nobody leads."""
    random = np.random.default_rng(seed)
    candidates = np.stack([random.permutation(50)[:4] for _ in range(M)])
    is_easy = random.random(M) < 0.6
    tokens = np.where(is_easy, candidates[:, 1], 99)
    logits = random.normal(0, 0.3, (N_EXIT_LAYERS, M, 4)).astype(np.float32)
    logits[-n_sure:, is_easy, 1] += 6
    best = np.take_along_axis(np.broadcast_to(candidates, logits.shape), logits.argmax(2)[..., None], 2)[..., 0]
    best[:, ~is_easy] = 77  # the whole lm_head prefers a token that is no candidate
    return DraftedChunk.of(candidates, logits, best, tokens, seed)


def test_labels_and_features_are_those_of_one_token_at_a_time() -> None:
    candidates = np.array([[3, 5, 7, 9], [-1, -1, -1, -1]])
    logits = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
    found = DraftedChunk.of(candidates, logits, np.array([[5, 5], [8, 3]]), np.array([5, 5]), 0)
    assert found.drafted_is_chosen.tolist() == [[True, False], [False, False]]
    assert found.drafted_is_right.tolist() == [[True, False], [False, False]]
    assert found.drafted_is_known.tolist() == [[True, False]]
    assert np.isnan(found.drafted_features[:, 1]).any(1).all() and np.isfinite(found.drafted_features[:, 0]).all()
    softmax = np.zeros((1, 4), np.float32)
    first = exit_features(logits[0, :1], softmax)
    np.testing.assert_array_equal(found.drafted_features[0, :1], first)
    after = exit_features(logits[1, :1], softmax)
    new = exit_features(logits[1, :1], np.zeros((1, 4), np.float32))
    assert any(np.array_equal(found.drafted_features[1, :1], each) for each in (after, new))


@pytest.mark.parametrize("n_sure", [1, 3])
def test_tokens_exit_where_their_candidates_are_known(n_sure: int) -> None:
    parts = DraftedParts(*(a_chunk(seed, n_sure=n_sure) for seed in range(3)))
    read = ReadBytes((100.0,) * (N_EXIT_LAYERS + 1), 50.0, 1.0)
    fit = partial(judging, precision=0.9, training=TRAINING)
    found = fit_drafted("a head", parts, [1.0] * N_EXIT_LAYERS, read, fit)
    assert found.draft == "a head" and found.coverage == pytest.approx(0.6, abs=0.1)
    assert found.schedule[0] == N_EXIT_LAYERS - n_sure + 1
    metrics = [each.metrics for each in found.exit_layers]
    assert all(each.recall > 0.9 and each.precision > 0.9 for each in metrics[-n_sure:])
    assert all(each.oracle < 0.3 for each in metrics[:-n_sure])
