"""The CPU kernels behind the executor: near the fp32 reference on the same int4 weights, and exact among themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.quantizers import quantize
from tests.e2e.test_families import PROMPT, greedy
from tests.families import DISTINCT, random_model, save_checkpoint

INT8_ACTIVATIONS = 2e-3  # normalised squared error of logits after 3 layers: 7 products of 3e-5 each, and their spread
RECURRENT = 4  # times as much for recurrent layers, which norm each head's output, however small it is


@pytest.fixture(scope="module", params=DISTINCT)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, ModelWeights]:
    """A random model of each family in int4, matrices and vocabulary by every kind of tile alternately."""
    folder = save_checkpoint(random_model(request.param), tmp_path_factory.mktemp(request.param))
    spec = read_spec(folder)
    kinds = [("codebook", "int8"), ("rtn", "int8"), ("codebook", "codebook")]
    if spec.own_layers:  # a token's 4-bit embedding can leave a recurrent head next to nothing, which its norm enlarges
        kinds.pop()
    return spec, tiled(spec, Checkpoint(folder, spec), *kinds[DISTINCT.index(request.param) % len(kinds)])


def tiled(spec: ModelSpec, checkpoint: Checkpoint, matrices: str, vocabulary: str) -> ModelWeights:
    weights = ModelWeights({}, {})
    for tensor in checkpoint.tensors():
        values = checkpoint.tensor(tensor.name)
        if is_quantized(tensor.role):
            kind = vocabulary if tensor.role.value == "vocabulary" else matrices
            weights.matrices[tensor.name] = quantize(values, kind)
        else:
            weights.vectors[tensor.name] = values
    return weights


def cpu_executor(family: tuple[ModelSpec, ModelWeights], threads: int = 1) -> Any:
    import os

    use_kernel_cache(Path(os.environ["HETERO_EE_CACHE_DIR"]))
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    return CpuExecutor(*family, 160, threads)


def test_logits_are_those_of_the_reference_but_for_int8_activations(family: tuple[ModelSpec, ModelWeights]) -> None:
    logits = []
    for executor in (cpu_executor(family), ReferenceExecutor(*family, 160, BatchedTorchOps())):
        executor.cache.open(0)
        logits.append(executor.logits(Batch.of_sequence(0, 0, PROMPT), range(len(PROMPT))))
    tolerance = INT8_ACTIVATIONS * (RECURRENT if family[0].own_layers else 1)
    assert (logits[0] - logits[1]).square().sum() <= tolerance * logits[1].square().sum()


def test_groups_of_experts_are_chosen_by_their_two_best(tmp_path: Path) -> None:
    """As in DeepSeek-V3; a group of DeepSeek-V2, which is among the families, by its best."""
    save_checkpoint(random_model("deepseek3"), tmp_path)
    spec = read_spec(tmp_path)
    assert spec.layer(1).ffn.router.groups == (4, 2, 2)
    weights = tiled(spec, Checkpoint(tmp_path, spec), "rtn", "int8")
    test_logits_are_those_of_the_reference_but_for_int8_activations((spec, weights))


def test_a_row_has_the_same_bits_in_every_batch_chunk_and_team(family: tuple[ModelSpec, ModelWeights]) -> None:
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:9]]
    together, batched_steps = greedy(cpu_executor(family, threads=3), prompts, 12)
    for sequence, prompt in enumerate(prompts):
        alone, steps = greedy(cpu_executor(family), [prompt], 12)
        assert together[sequence] == alone[0]
        for batched, single in zip(batched_steps, steps, strict=True):
            assert torch.equal(batched[sequence], single[0])
    chunked = cpu_executor(family)
    chunked.cache.open(0)
    chunked.hidden(Batch.of_sequence(0, 0, PROMPT[:5]))
    last = chunked.logits(Batch.of_sequence(0, 5, PROMPT[5:]), [len(PROMPT) - 6])
    assert torch.equal(last[0], batched_steps[0][0])


def test_truncating_rolls_back_exactly(family: tuple[ModelSpec, ModelWeights]) -> None:
    executor = cpu_executor(family)
    executor.cache.open(0)
    executor.hidden(Batch.of_sequence(0, 0, PROMPT))
    expected = executor.logits(Batch.of_sequence(0, len(PROMPT), [9]), [0])
    executor.hidden(Batch.of_sequence(0, len(PROMPT) + 1, [8, 7, 6]))
    executor.cache.truncate(0, len(PROMPT))
    assert torch.equal(executor.logits(Batch.of_sequence(0, len(PROMPT), [9]), [0]), expected)


@pytest.mark.sample(4)
def test_dense_weights_are_refused(family: tuple[ModelSpec, ModelWeights]) -> None:
    from hetero_ee.weights.model_weights import expanded

    with pytest.raises(TypeError, match="multiply tiles"):
        cpu_executor((family[0], expanded(family[1])))


def test_preparing_runs_passes_of_the_given_lengths_and_keeps_nothing(
    family: tuple[ModelSpec, ModelWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, seen = cpu_executor(family), list[int]()
    run = executor.hidden
    monkeypatch.setattr(executor, "hidden", lambda batch: (seen.append(len(batch)), run(batch))[1])
    executor.prepare(n_tokens=(1, 3))
    assert seen == [1, 3] and not executor.cache.sequences
