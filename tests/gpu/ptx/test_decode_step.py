"""Generates tokens with compiled GPU code: the operations of the GPU executor, launched one by one without a graph."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import gpu_cache
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.ops.gpu_operations import gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.runtime.executors.gpu import GpuExecutor
from tests.executor_support import MAX_TOKENS, model_of, on_kernels
from tests.gpu.ptx.launcher import ONLY_HERE, Launcher
from tests.gpu.ptx.test_kernels import launcher
from tests.gpu_support import DEVICE

__all__ = ["launcher"]
pytestmark = [ONLY_HERE, pytest.mark.sample(0)]
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 2}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
PROMPT, N_TOKENS = [1, 17, 130, 3, 99], 3


@pytest.mark.parametrize(("family", "sizes"), [("llama-tied", SMALL), ("qwen3-next", LAYERS)])
def test_the_tokens_are_the_cpus(family: str, sizes: dict[str, Any], launcher: Launcher, tmp_path: Path) -> None:
    """A prompt and decode steps, embedding and head included; also of a gated delta layer and mixtures of experts."""
    model = spec, weights = model_of(family, "int4", tmp_path, **sizes)
    blocks, layers, device = decoder_blocks(spec), range(spec.n_layers), torch.device(DEVICE)
    cache = gpu_cache(spec, MAX_TOKENS, device=device, layers=layers, kind="fp32", n_slots=2)
    gpu = GpuExecutor(spec, weights, blocks, cache, gpu_operations(Registry(), "cuda"), len(PROMPT))
    cpu = on_kernels(model)
    for each in (gpu, cpu):
        each.cache.open(0)
    batch = Batch.of_sequence(0, 0, PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + N_TOKENS):
        cache.admit(batch)
        hidden = gpu.forward(gpu.embed(batch), batch, blocks[1 : 1 + 2 * spec.n_layers])
        found = gpu.lm_head(gpu.final_norm(hidden[-1:]))[0]
        expected = cpu.to_logits(cpu.hidden(batch)[-1:])[0]
        assert found.argmax() == expected.argmax()
        assert (found - expected).square().sum() <= 2e-3 * expected.square().sum()  # int8 activations
        batch = Batch.of_sequence(0, position, [int(expected.argmax())])
    assert len(launcher.launches) > 10 * N_TOKENS
