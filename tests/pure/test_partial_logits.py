"""Candidates at later exit layers: the logits are the lm_head's there, of the right tokens, and gaps vary."""

import numpy as np
import pytest
import torch

from hetero_ee.calibration.traces import PartialLogits, Trace, drafts_of, joined, n_pairs, trace
from hetero_ee.hub.config_file import read_spec
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.features import exit_features, likeliest
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.families import random_model, save_checkpoint

CHUNK = tuple(range(3, 60))


def some_logits(n_exit_layers: int, m: int, seed: int = 0) -> PartialLogits:
    """Of random candidates; the full model's token is each of the four, or none, about as often."""
    random = np.random.default_rng(seed)
    values = random.normal(scale=2, size=(n_pairs(n_exit_layers), m, 4)).astype(np.float32)
    return PartialLogits(values, random.integers(0, 5, (n_exit_layers, m)).astype(np.uint8))


NORMED = DraftEnd(is_normed=True)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> ReferenceExecutor:
    folder = save_checkpoint(random_model("llama", num_hidden_layers=5), tmp_path_factory.mktemp("model"))
    spec = read_spec(folder)
    return ReferenceExecutor(spec, load_dense(Checkpoint(folder, spec)), len(CHUNK))


@pytest.fixture(scope="module")
def found(executor: ReferenceExecutor) -> Trace:
    return trace(executor, CHUNK)


def a_map(size: int) -> ExitMap:
    torch.manual_seed(1)
    return ExitMap(torch.randn(3, size) / size, torch.randn(size, 3), torch.randn(size))


def test_each_exit_layer_sees_the_candidates_that_each_before_it_took(
    executor: ReferenceExecutor, found: Trace
) -> None:
    """By the definition: the candidates' rows of the head, on the normed and mapped state."""
    n_exit_layers = executor.spec.n_layers - 1
    maps = {2: a_map(executor.spec.hidden_size)}
    drafts = drafts_of(executor, found, maps, with_unmapped=True)
    normed = [maps[b].apply(found.at(b)) if b in maps else found.at(b) for b in range(1, n_exit_layers + 1)]
    assert drafts.partial.n_exit_layers == n_exit_layers == 4
    for first in range(1, n_exit_layers + 1):
        taken = likeliest(executor.lm_head(normed[first - 1])).token_ids
        rank = [np.flatnonzero(row == token) for row, token in zip(taken, found.tokens.tolist(), strict=True)]
        assert drafts.partial.rank[first - 1].tolist() == [place[0] if len(place) else 4 for place in rank]
        np.testing.assert_array_equal(drafts.is_right[first - 1], drafts.partial.is_right(first, first))
        for exit_layer in range(first, n_exit_layers + 1):
            expected = executor.partial_logits(normed[exit_layer - 1], torch.from_numpy(taken), NORMED).numpy()
            np.testing.assert_allclose(drafts.partial.at(first, exit_layer), expected, atol=1e-5)
            best = np.take_along_axis(taken, expected.argmax(1)[:, None], 1)[:, 0]
            np.testing.assert_array_equal(drafts.partial.is_right(first, exit_layer), best == found.tokens.numpy())


def test_without_a_map_both_drafts_are_the_same(executor: ReferenceExecutor, found: Trace) -> None:
    maps = {2: a_map(executor.spec.hidden_size)}
    drafts = drafts_of(executor, found, maps, with_unmapped=True)
    plain = drafts_of(executor, found, {}, with_unmapped=True)
    np.testing.assert_array_equal(drafts.is_right_unmapped, plain.is_right)
    assert not drafts_of(executor, found, maps, with_unmapped=False).is_right_unmapped[1].any()
    np.testing.assert_array_equal(plain.is_right, plain.is_right_unmapped)
    assert drafts.features.shape == (executor.spec.n_layers - 1, len(CHUNK) - 1, 12)


def test_features_count_the_change_since_the_exit_layer_evaluated_last() -> None:
    partial = some_logits(4, 9)
    softmax = torch.softmax(torch.from_numpy(partial.at(1, 2)), 1).numpy()
    later = torch.softmax(torch.from_numpy(partial.at(1, 4)), 1).numpy()
    features = partial.features(1, 4, 2)
    np.testing.assert_array_equal(features[:, :4], partial.at(1, 4))
    np.testing.assert_allclose(features[:, 8:], later - softmax, atol=1e-6)
    np.testing.assert_allclose(partial.features(1, 4, None)[:, 8:], later, atol=1e-6)


def test_tokens_are_drawn_over_every_first_exit_layer_and_every_gap() -> None:
    n_exit_layers, m = 5, 600
    partial = some_logits(n_exit_layers, m, seed=2)
    features, is_right, took = partial.sampled(np.random.default_rng(3))
    for exit_layer in range(2, n_exit_layers + 1):
        pairs = [(first, previous) for first in range(1, exit_layer) for previous in range(first, exit_layer)]
        counts = dict.fromkeys(pairs, 0)
        for pair in pairs:
            expected = partial.features(pair[0], exit_layer, pair[1])
            hits = np.isclose(features[exit_layer - 1], expected).all(1) & (took[exit_layer - 1] == pair[0])
            counts[pair] = int(hits.sum())
            right = partial.is_right(pair[0], exit_layer)
            np.testing.assert_array_equal(is_right[exit_layer - 1][hits], right[hits])
        assert sum(counts.values()) == m and min(counts.values()) > 0.3 * m / len(pairs)


def test_the_same_seed_draws_the_same_tokens() -> None:
    partial = some_logits(4, 50)
    one, same, other = (partial.sampled(np.random.default_rng(seed))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_joined_logits_are_those_of_all_tokens() -> None:
    parts = [some_logits(3, 5, seed=1), some_logits(3, 7, seed=2)]
    whole = joined(parts)
    for first, exit_layer in ((1, 1), (1, 3), (2, 3)):
        expected = np.concatenate([part.at(first, exit_layer) for part in parts])
        np.testing.assert_array_equal(whole.at(first, exit_layer), expected)
    np.testing.assert_array_equal(whole.is_right(1, 2)[5:], parts[1].is_right(1, 2))


def test_logits_that_are_not_finite_have_features_that_show_it() -> None:
    partial = some_logits(3, 4)
    partial.values[n_pairs(2), 1] = np.nan  # at exit layer 3, of the candidates of exit layer 1
    assert np.isnan(partial.features(1, 3, 1)).any(1).tolist() == [False, True, False, False]
    assert np.isfinite(partial.features(1, 2, 1)).all()
    assert np.isfinite(exit_features(partial.at(1, 1), np.zeros((4, 4), np.float32))).all()
