"""Models of whose neurons a predictor picks those to compute: nothing else changes, and a token's bits are its own."""

from pathlib import Path

import pytest
import torch

from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.store.manifest import read_manifest
from hetero_ee.weights.store.verification import verify
from tests.executor_support import Model, hidden_alone, on_kernels, reference
from tests.families import random_model, save_checkpoint
from tests.sparse_models import WHOLE_NEURONS, stored_by_neurons, with_predictor

FAMILIES = ("llama-relu", "opt")
IDS = list(range(3, 33))
ALL, NONE = 1e4, -1e4  # biases of predictors that are of one opinion


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(random_model(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return stored_by_neurons(folder, WHOLE_NEURONS)


@pytest.fixture(params=[on_kernels, reference])
def executor_of(request: pytest.FixtureRequest, kernels: Path) -> object:
    return request.param


def test_a_store_has_the_same_weights_in_rows(folder: Path, model: Model) -> None:
    (spec, weights), (_, tiled) = model, stored_by_neurons(folder)
    assert spec.first_in_rows and read_manifest(folder / "whole").version == 4 and not verify(folder / "whole")
    for name, weight in weights.matrices.items():
        assert isinstance(weight, RowWeight) == (".ffn." in name)
        assert torch.equal(weight.dequantize(), tiled.matrices[name].dequantize())


@pytest.mark.parametrize("bias", [ALL, 0.0])
def test_the_kernels_compute_what_the_reference_does(model: Model, bias: float, kernels: Path) -> None:
    model = with_predictor(model, bias)
    found, wanted = (hidden_alone(executor, IDS) for executor in (on_kernels(model), reference(model)))
    assert (found - wanted).norm() < 0.06 * wanted.norm()  # activations in 8 bits


def test_what_is_predicted_alone_is_computed(model: Model, executor_of: object) -> None:
    plain, everything, nothing = (
        hidden_alone(executor_of(each), IDS)  # type: ignore[operator]
        for each in (model, with_predictor(model, ALL), with_predictor(model, NONE))
    )
    assert torch.equal(plain, everything)
    assert torch.equal(plain[:FIRST_SPARSE], nothing[:FIRST_SPARSE])
    assert (plain - nothing)[FIRST_SPARSE:].norm() > 1e-3 * plain.norm()


def test_neurons_are_counted(model: Model, executor_of: object) -> None:
    shares = []
    for bias in (ALL, 0.0, NONE):
        executor: Executor = executor_of(with_predictor(model, bias))  # type: ignore[operator]
        hidden_alone(executor, IDS)
        shares.append(executor.neurons.since(NeuronCounts()))
    (used, every), (_, some), nothing = (each or (-1.0, -1.0) for each in shares)
    assert 0 < used < every == 1 and 0 < some < 1 and nothing == (0, 0)


def test_prompts_use_all_neurons(model: Model, executor_of: object) -> None:
    def read(bias: float) -> torch.Tensor:
        executor: Executor = executor_of(with_predictor(model, bias))  # type: ignore[operator]
        sequence = executor.cache.open_new()
        return executor.hidden(Batch.of_sequence(sequence, 0, IDS, is_prompt=True))

    assert torch.equal(read(ALL), read(NONE))


def test_a_token_s_bits_depend_on_it_alone(model: Model, kernels: Path) -> None:
    model = with_predictor(model)
    executor, alone = on_kernels(model, threads=2), on_kernels(model)
    sequence = alone.cache.open_new()
    one_by_one = [alone.hidden(Batch.of_sequence(sequence, at, [token])) for at, token in enumerate(IDS)]
    assert torch.equal(hidden_alone(executor, IDS), torch.cat(one_by_one))
