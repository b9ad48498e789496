"""Neuron-major models: the same weights as the checkpoint's, the same logits as the reference, skipped or not."""

from pathlib import Path

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.store.verification import verify
from tests.executor_support import Model, hidden_alone, on_kernels, reference
from tests.families import random_model, save_checkpoint
from tests.sparse_models import NEURONS, stored_by_neurons, with_least

FAMILIES = {"llama-relu": {}, "opt": {}, "qwen2": {}, "phi3": {"hidden_size": 96}}
IDS = list(range(3, 33))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(request.param)
    return save_checkpoint(random_model(request.param, **FAMILIES[request.param]), where)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return stored_by_neurons(folder)


def test_a_store_has_the_checkpoint_s_weights(folder: Path, model: Model) -> None:
    (spec, weights), checkpoint = model, Checkpoint(folder, read_spec(folder))
    assert spec.neuron_major and not verify(folder / "store")
    for layer in range(spec.n_layers):
        prefix = f"layers.{layer}.ffn"
        down = weights.matrices[f"{prefix}.down"]
        assert isinstance(down, RowWeight)
        assert torch.equal(down.dequantize(), expected(checkpoint.tensor(f"{prefix}.down").T))
        if spec.gated:
            first = dict(zip(("gate", "up"), checkpoint.tensor(f"{prefix}.gate_up").chunk(2), strict=True))
        else:
            first = {"up": checkpoint.tensor(f"{prefix}.up")}
        for short, values in first.items():
            assert torch.equal(weights.matrices[f"{prefix}.{short}"].dequantize(), expected(values)), short


def expected(values: torch.Tensor) -> torch.Tensor:
    return quantize(values, NEURONS.matrices).dequantize()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_kernels_compute_what_the_reference_does(model: Model, share: float, kernels: Path) -> None:
    model = with_least(model, share)
    found, wanted = (hidden_alone(executor, IDS) for executor in (on_kernels(model), reference(model)))
    # Activations in 8 bits: 0.03 in the worst of these random models, and some neurons pass the limit there alone.
    assert (found - wanted).norm() < 0.06 * wanted.norm()


def test_what_counts_as_inactive_is_left_out(model: Model, kernels: Path) -> None:
    """Negative control: half of the neurons matter."""
    dense, sparse = (hidden_alone(on_kernels(with_least(model, share)), IDS) for share in (0.0, 0.5))
    assert torch.equal(dense[:FIRST_SPARSE], sparse[:FIRST_SPARSE])
    assert (dense[FIRST_SPARSE:] - sparse[FIRST_SPARSE:]).norm() > 1e-3 * dense.norm()


@pytest.mark.parametrize("make", [on_kernels, reference])
def test_prompts_use_all_neurons(model: Model, make: object, kernels: Path) -> None:
    def read(share: float) -> torch.Tensor:
        executor: Executor = make(with_least(model, share))  # type: ignore[operator]
        sequence = executor.cache.open_new()
        return executor.hidden(Batch.of_sequence(sequence, 0, IDS, is_prompt=True))

    assert torch.equal(read(0.0), read(0.5))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_token_s_bits_depend_on_it_alone(model: Model, share: float, kernels: Path) -> None:
    executor, alone = on_kernels(with_least(model, share), threads=2), on_kernels(with_least(model, share))
    sequence = alone.cache.open_new()
    one_by_one = [alone.hidden(Batch.of_sequence(sequence, at, [token])) for at, token in enumerate(IDS)]
    assert torch.equal(hidden_alone(executor, IDS), torch.cat(one_by_one))


def test_generation_skips_zeros_and_is_refused_where_there_are_none(
    demo: Path, tiny: Path, cache: Path, tmp_path: Path
) -> None:
    relu = random_model("llama-relu", vocab_size=read_spec(demo).vocab_size)
    folder = save_checkpoint(relu, tmp_path / "relu", tokenizer_from=demo)
    texts = []
    for threads in (1, 2):
        with Engine.from_pretrained(folder, sparsity="exact", threads=threads, profile="off") as engine:
            assert engine.spec.neuron_major and type(engine.executor).__name__ == "CpuExecutor"
            texts.append(engine.generate("Once upon", max_new_tokens=8).token_ids)
    assert texts[0] == texts[1]
    with pytest.raises(UsageError, match="no neurons that are exactly 0"):
        Engine.from_pretrained(tiny, sparsity="exact", profile="off")
    for wrong in ("0", "-0.1", "1.5", "nan", "most", True):
        with pytest.raises(UsageError, match="sparsity is"):
            Engine.from_pretrained(folder, sparsity=wrong, profile="off")
    with pytest.raises(UsageError, match="has no sparse FFNs"):
        Engine.from_pretrained(folder, sparsity="exact", quantizer="none", profile="off")
