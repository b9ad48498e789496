"""Sparsity curves: thresholds that leave out what was asked for, errors that are those of the model, and dealing."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.models.blocks import least_activations, neuron_blocks
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.sparsity.curves import (
    MAX_KL_NATS,
    SHARES,
    Measurement,
    Thresholds,
    dealt_shares,
    largest_within,
    total_error,
)
from hetero_ee.sparsity.fit import SparsityFit, weighted_scores
from hetero_ee.sparsity.recorder import ScoreRecorder
from tests.sparse_models import random_chunks, some_curves, sparse_model

FAMILIES = ("llama", "llama-relu", "opt")  # SiLU, ReLU, and ReLU without a gate


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_neurons_are_left_out_of_other_text_as_were_asked_for(family: str) -> None:
    spec, weights = sparse_model(family)
    fit = SparsityFit(spec, weights, random_chunks(spec))
    curves = fit.measured(fit.curves(), (0.25, 0.6, 0.7))
    natural = fit.measure(Thresholds(0.01, (0.0,) * spec.n_layers)).share
    assert natural == 0 if family == "llama" else 0.3 < natural < 0.6
    for found in curves.measured:
        assert found.share == pytest.approx(max(natural, found.target), abs=0.03 if found.target > natural else 0.06)
    by_target = sorted(curves.measured, key=lambda each: each.target)
    assert len(by_target) > 3 and all(one.kl_nats <= two.kl_nats + 1e-4 for one, two in itertools.pairwise(by_target))


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_are_those_of_a_model_with_one_sparse_layer(family: str) -> None:
    spec, weights = sparse_model(family)
    chunk = random_chunks(spec, n_chunks=1)
    curves = SparsityFit(spec, weights, chunk).curves()
    batch = Batch.of_sequence(0, 0, list(chunk[0]))
    for layer, index in itertools.product(range(spec.n_layers), (3, 10, 19)):
        alone = [0.0] * spec.n_layers
        alone[layer] = float(curves.thresholds[layer, index])
        states = []
        for least in ({}, Thresholds(SHARES[index], tuple(alone)).least(spec, weights)):
            sparse = replace(weights, vectors=weights.vectors | least)
            executor = ReferenceExecutor(spec, sparse, 64, BatchedTorchOps())
            executor.cache.open(0)
            states.append(executor.run(batch, None, range(layer + 1))[FIRST_SPARSE:])
        dense, sparse_states = states
        expected = (dense - sparse_states).square().sum(1) / dense.square().sum(1)
        assert curves.errors[layer, index] == pytest.approx(float(expected.mean()), rel=1e-3, abs=1e-9)


def test_quantiles_are_to_a_128th() -> None:
    spec, weights = sparse_model("llama")
    chunks = random_chunks(spec, n_chunks=3)
    scores = weighted_scores(spec, weights)
    recorder = ScoreRecorder(spec, weights, scores)
    seen: list[torch.Tensor] = []
    watch = recorder.watch
    recorder.watch = (
        lambda layer, active, *rest: (  # type: ignore[method-assign]
            seen.append(scores(layer, active[FIRST_SPARSE:])) if layer == 2 else None,
            watch(layer, active, *rest),
        )[1]
    )
    executor = ReferenceExecutor(spec, weights, 64, recorder)
    for chunk in chunks:
        executor.cache.open(0)
        executor.run(Batch.of_sequence(0, 0, list(chunk)), None, range(spec.n_layers))
        executor.cache.close(0)
    expected = np.quantile(torch.cat(seen).numpy(), SHARES[1:])
    np.testing.assert_allclose(recorder.quantiles(SHARES)[2, 1:], expected, rtol=1 / 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_activation_is_the_threshold_over_the_norm(family: str) -> None:
    spec, weights = sparse_model(family)
    name = neuron_blocks(spec)[1].tensors["down"].name
    weights.matrices[name].dequantize()[5] = 0.0
    least = Thresholds(0.5, (0.3,) * spec.n_layers).least(spec, weights)
    assert set(least) == {least_activations(block) for block in neuron_blocks(spec)}
    active = torch.randn(50, spec.ffn_size)
    of_layer = least[least_activations(neuron_blocks(spec)[1])]
    scores = weighted_scores(spec, weights)(1, active)
    is_near = (scores - 0.3).abs() < 1e-6
    assert (((active.abs() < of_layer) == (scores < 0.3)) | is_near).all()
    assert (active[:, 5].abs() < of_layer[5]).all()  # what adds nothing is left out
    for vector in Thresholds(0.5, (0.0,) * spec.n_layers).least(spec, weights).values():
        assert not vector.any()


def test_what_relu_has_at_zero_is_left_out_without_a_change() -> None:
    spec, weights = sparse_model("llama-relu")
    fit = SparsityFit(spec, weights, random_chunks(spec))
    found = fit.measure(fit.curves().at(0.2))
    assert found.kl_nats == 0 and found.share > 0.3


@given(
    st.lists(st.lists(st.floats(0, 9, width=32), min_size=19, max_size=19), min_size=1, max_size=7),
    st.floats(0.01, SHARES[-1]),
)
def test_dealing_is_never_worse_than_the_same_share_everywhere(added: list[list[float]], target: float) -> None:
    errors = np.cumsum([[0.0, *row] for row in added], axis=1).astype(np.float32)
    shares = dealt_shares(errors, target)
    assert shares.mean() == pytest.approx(target) and shares.min() >= 0 and shares.max() <= SHARES[-1] + 1e-9
    assert total_error(errors, shares) <= total_error(errors, np.full(len(errors), target))


@given(st.lists(st.lists(st.floats(0, 9, width=32), min_size=19, max_size=19), min_size=2, max_size=2))
def test_of_rising_steps_dealing_finds_the_best(added: list[list[float]]) -> None:
    errors = np.cumsum([[0.0, *sorted(row)] for row in added], axis=1).astype(np.float32)
    best = min(errors[0, first] + errors[1, 20 - first] for first in range(1, 20))
    assert total_error(errors, dealt_shares(errors, 0.5)) == pytest.approx(best, rel=1e-5)


def test_a_layer_that_costs_less_takes_more() -> None:
    spec, weights = sparse_model("llama")  # whose layers add the more to the stream the later they are
    curves = SparsityFit(spec, weights, random_chunks(spec)).curves()
    shares = dealt_shares(curves.errors, 0.5)
    assert shares[0] > shares[-1]


@pytest.mark.parametrize("limit", [0.0, 0.3, 0.45, 0.95])
def test_auto_is_the_largest_target_within_the_bound(limit: float) -> None:
    found = largest_within(lambda target: Measurement(target, target, 0.0 if target <= limit else 1.0))
    assert len(found) <= 5
    curves = replace(some_curves(3), measured=tuple(found))
    if limit:
        assert curves.auto() == curves.at(limit)
    else:
        with pytest.raises(UsageError, match="no share of neurons"):
            curves.auto()


def test_auto_obeys_another_bound() -> None:
    curves = some_curves(3)  # 0.001 nats at 0.25 and 0.02 at 0.5
    assert curves.auto().target == 0.25 and MAX_KL_NATS == 0.005
    assert curves.auto(0.02) == curves.at(0.5)
