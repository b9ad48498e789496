"""Executors over random models of a family, with weights and a KV cache of any kind."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import ModelWeights, is_quantized, load_dense
from hetero_ee.weights.quantizers import quantize
from tests.families import random_model, save_checkpoint
from tests.kv_contents import read_back

MAX_TOKENS = 160
Model = tuple[ModelSpec, ModelWeights]


def model_of(family: str, weights: str, folder: Path, **changes: Any) -> Model:
    """weights: "fp32" or "int4". changes: of the family's configuration."""
    save_checkpoint(random_model(family, **changes), folder)
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, spec)
    if weights == "fp32":
        return spec, load_dense(checkpoint)
    tiled = ModelWeights({}, {})
    for tensor in checkpoint.tensors():
        values = checkpoint.tensor(tensor.name)
        if is_quantized(tensor.role):
            quantizer = "int8" if tensor.role.value == "vocabulary" else "codebook"
            tiled.matrices[tensor.name] = quantize(values, quantizer)
        else:
            tiled.vectors[tensor.name] = values
    return spec, tiled


def new_cache(spec: ModelSpec, kind: str = "fp32") -> KvCache:
    return host_cache(spec, MAX_TOKENS, kind)


def reference(model: Model, kind: str = "fp32", ops: TorchOps | None = None) -> Executor:
    return ReferenceExecutor(*model, MAX_TOKENS, ops, cache=new_cache(model[0], kind))


def on_kernels(model: Model, kind: str = "fp32", threads: int = 1) -> Executor:
    use_kernel_cache(Path(os.environ["HETERO_EE_CACHE_DIR"]))
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    return CpuExecutor(*model, MAX_TOKENS, threads, cache=new_cache(model[0], kind))


def executor_for(model: Model, weights: str, kind: str = "fp32") -> Executor:
    return reference(model, kind) if weights == "fp32" else on_kernels(model, kind)


def contents(executor: Executor, sequence: int) -> Iterator[torch.Tensor]:
    """Keys and values of each layer, as far as it holds them."""
    for layer in range(executor.spec.n_layers):
        yield from read_back(executor.cache, layer, sequence, 0, executor.cache.length_at(sequence, layer))


def hidden_alone(executor: Executor, token_ids: list[int]) -> torch.Tensor:
    """(n, hidden) of a text in a sequence of its own, which is closed again."""
    sequence = executor.cache.open_new()
    hidden = executor.hidden(Batch.of_sequence(sequence, 0, token_ids))
    executor.cache.close(sequence)
    return hidden
