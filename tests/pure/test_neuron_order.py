"""Neurons in the order of how often they are active: fitted, kept beside a store, and the same model in that order."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_ee.errors import StoreError
from hetero_ee.models.blocks import least_activations, neuron_blocks
from hetero_ee.models.spec import CURVE_POINTS
from hetero_ee.sparsity.order import NeuronOrder, fitted_order, read_order, write_order
from hetero_ee.weights.rows import RowWeight
from tests.executor_support import Model, hidden_alone, reference
from tests.families import random_model, save_checkpoint
from tests.sparse_models import WHOLE_NEURONS, random_chunks, stored_by_neurons, with_least, with_predictor

IDS = list(range(3, 20))


def some_order(n_layers: int, ffn_size: int) -> NeuronOrder:
    random = np.random.default_rng(0)
    rows = [random.permutation(ffn_size).astype(np.int64) for _ in range(n_layers)]
    return NeuronOrder(np.stack(rows), tuple((i / CURVE_POINTS) ** 0.5 for i in range(1, CURVE_POINTS + 1)))


@pytest.fixture(scope="module", params=["llama-relu", "opt", "predicted"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """FFNs of a size that fills no whole tiles."""
    family = "llama-relu" if request.param == "predicted" else request.param
    size = {"ffn_dim" if family == "opt" else "intermediate_size": 300}
    folder = save_checkpoint(random_model(family, **size), tmp_path_factory.mktemp(family))
    if request.param == "predicted":
        return with_least(with_predictor(stored_by_neurons(folder, WHOLE_NEURONS)), 0.3)
    return with_least(stored_by_neurons(folder), 0.3)


def test_the_model_is_the_same_in_another_order(model: Model) -> None:
    spec, weights = model
    least = {least_activations(b): 0.3 * torch.rand(spec.ffn_size) for b in neuron_blocks(spec)}
    weights = replace(weights, vectors=weights.vectors | least)
    order = some_order(spec.n_layers, spec.ffn_size)
    ordered = order.applied(spec, weights)
    assert ordered[0] == replace(spec, hot_curve=order.curve)
    copied = [weights.matrices[name] for name in weights.matrices if ".ffn." in name and "predictor_in" not in name]
    assert ordered[1].held_bytes == sum(weight.n_bytes for weight in copied)
    for block, row in zip(neuron_blocks(spec), order.order, strict=True):
        name = block.tensors["down"].name
        assert torch.equal(ordered[1].matrices[name].dequantize(), weights.matrices[name].dequantize()[row])
        assert isinstance(ordered[1].matrices[name], RowWeight)
    found, wanted = (hidden_alone(reference(each), IDS) for each in (ordered, (spec, weights)))
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("model", ["opt"], indirect=True)  # biases make it so by hand
def test_the_hottest_come_first(model: Model) -> None:
    """Of neurons of which some are made to be active always, some never."""
    spec, weights = model
    vectors = dict(weights.vectors)
    for block in neuron_blocks(spec):
        bias = vectors[block.tensors["up_bias"].name].clone()
        bias[::7], bias[1::7] = -100.0, 100.0
        vectors[block.tensors["up_bias"].name] = bias
    order = fitted_order(spec, replace(weights, vectors=vectors), random_chunks(spec))
    assert order is not None and len(order.curve) == CURVE_POINTS and order.curve[-1] == pytest.approx(1)
    for row in order.order:
        place = np.argsort(row)
        assert place[1::7].max() < place[::7].min()
    assert order.curve[CURVE_POINTS // 2] > 0.6 and order.curve[3] > 0.15
    for block in neuron_blocks(spec):
        vectors[block.tensors["up_bias"].name] = torch.full((300,), 100.0)
    assert fitted_order(spec, replace(weights, vectors=vectors), random_chunks(spec)) is None, "all are active"


def test_a_file_of_it_is_read_again_and_a_damaged_one_is_not(model: Model, tmp_path: Path) -> None:
    spec, file = model[0], tmp_path / "store.calibration.order"
    order = some_order(spec.n_layers, spec.ffn_size)
    assert read_order(file, spec, "key") is None
    write_order(order, "key", file)
    read = read_order(file, spec, "key")
    assert read is not None and np.array_equal(read.order, order.order)
    assert read.curve == pytest.approx(order.curve)
    assert read_order(file, spec, "another") is None
    assert read_order(file, replace(spec, n_layers=spec.n_layers + 1), "key") is None
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="order of neurons"):
        read_order(file, spec, "key")
    twice = order.order.copy()
    twice[0, 0] = twice[0, 1]
    with pytest.raises(ValueError, match="some twice"):
        NeuronOrder(twice, order.curve)
    with pytest.raises(ValueError, match="does not ascend"):
        NeuronOrder(order.order, order.curve[::-1])
