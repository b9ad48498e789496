"""Times a sparse FFN's up and down matrices on CPU and GPU, with random rows and random active neurons."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hetero_ee.costs.neurons import NeuronRows
from hetero_ee.layers.tensors import TensorRole
from hetero_ee.models.blocks import Block, neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.gpu import row_matrix
from hetero_ee.ops.gpu_operations import gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.profiling.preset import Preset
from hetero_ee.weights.random_weights import random_rows
from hetero_ee.weights.rows import RowWeight
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.neurons.rows import RowMatrix
from hetero_ee_cpu_ops.neurons.sparse_ffn import SparseFfn
from hetero_ee_profiles.gpu.platform import GpuPlatform
from hetero_ee_profiles.gpu.probe import FREE_SHARE, L2_TURNS, probe_calls
from hetero_ee_profiles.hardware import RowsTime
from hetero_ee_profiles.measurement import Origin, measured
from hetero_ee_profiles.probe_samples import Clock

SHARES = (0.1, 0.5, 1.0)  # of active neurons
TOKENS = (1, 8, 32)  # rows are read once for up to eight tokens


def cpu_rows(spec: ModelSpec, n_threads: int, preset: Preset, origin: Origin, clock: Clock) -> tuple[RowsTime, ...]:
    """Time the CPU's sparse FFN, alternating between several layers' weights. Compiling is not counted."""
    pool = ThreadPool(n_threads)
    multiply = SparseFfn(pool)
    layers = [{name: _cpu_matrix(rows) for name, rows in layer.items()} for layer in _layers(spec, preset.cycle_bytes)]

    def seconds(x: Any, active: Any) -> list[float]:
        calls = [partial(multiply, x, active, layer.get("up"), layer["down"]) for layer in layers]
        calls[0]()
        found = []
        for repeat in range(max(preset.repeats, len(calls))):
            start_s = clock()
            calls[repeat % len(calls)]()
            found.append(max(clock() - start_s, 1e-9))
        return found

    try:
        return _times(spec, origin, seconds)
    finally:
        pool.close()


def gpu_rows(
    spec: ModelSpec, platform: GpuPlatform, registry: Registry, preset: Preset, origin: Origin
) -> tuple[RowsTime, ...]:
    """Time the GPU's sparse FFN. Errors of drivers and compilers are passed on."""
    operation = registry.choose("sparse_ffn", platform.kind)
    multiply = gpu_operations(registry, platform.kind).sparse_ffn
    n_bytes = min(max(preset.cycle_bytes, L2_TURNS * platform.l2_bytes), platform.free_bytes() // FREE_SHARE)
    layers = [
        {name: row_matrix(rows, platform.device) for name, rows in layer.items()} for layer in _layers(spec, n_bytes)
    ]

    def seconds(x: Any, active: Any) -> Sequence[float]:
        inputs = [torch.from_numpy(each).to(platform.device) for each in (x, active)]
        out = platform.allocate(tuple(x.shape), torch.float32)
        calls = [partial(multiply, *inputs, layer.get("up"), layer["down"], out) for layer in layers]
        return probe_calls(platform, calls, len(calls), operation.is_capturable, preset.gpu_sampling)

    with platform.current():
        return _times(spec, origin, seconds)


def _times(spec: ModelSpec, origin: Origin, seconds: Callable[[Any, Any], Sequence[float]]) -> tuple[RowsTime, ...]:
    """Return the times for all TOKENS and SHARES, from seconds(x (m, K), active (m, N)), which samples one FFN."""
    rows, draw, found = NeuronRows.of(_ffn(spec)), np.random.default_rng(0), []
    assert rows is not None, "only sparse FFNs have rows"
    for m in TOKENS:
        x = draw.standard_normal((m, spec.hidden_size), np.float32)
        for share in SHARES:
            active = np.where(draw.random((m, spec.ffn_size)) < share, np.float32(1), np.float32(0))
            time = measured(seconds(x, active), "s", origin)
            found.append(RowsTime(rows.n_rows, rows.n_columns, m, share, time))
    return tuple(found)


def _layers(spec: ModelSpec, n_bytes: int) -> list[dict[str, RowWeight]]:
    """Make random rows for as many layers as fit into n_bytes, at least one."""
    block = _ffn(spec)
    first = _random(block)
    n_layers = n_bytes // sum(rows.n_bytes for rows in first.values())
    return [first, *(_random(block) for _ in range(min(spec.n_layers, n_layers) - 1))]


def _random(block: Block) -> dict[str, RowWeight]:
    return {short: random_rows(t) for short, t in block.tensors.items() if t.role is TensorRole.NEURONS}


def _ffn(spec: ModelSpec) -> Block:
    return neuron_blocks(spec)[0]


def _cpu_matrix(weight: RowWeight) -> RowMatrix:
    return RowMatrix(weight.codes.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook, weight.n_columns)
