"""Mamba-2 for m new rows, of any mixture of sequences, with its convolution, gate and norm (arXiv 2405.21060).

hetero_ee/layers/mamba.py has the formulas. A head's state is the matrix of a delta rule that replaces nothing, so that
the kernels, the layout of the state and the log are those of delta.py. B and C are its keys and queries, of which
adjacent heads share one each, and a row's time step is its beta. Outputs are normed in groups of heads, after a row's
heads have been computed.
"""

from math import sqrt
from typing import Any

import numpy as np

from hetero_ee_cpu_ops.activate import silu
from hetero_ee_cpu_ops.delta import (
    BETAS,
    CHANNELS,
    CONV_BIAS,
    DECAYS,
    DT_BIAS,
    EPS,
    F32,
    INPUTS,
    KEY_DIM,
    KEY_HEADS,
    OUT,
    OVERLAPS,
    RATES,
    SCALE,
    SKIPS,
    VALUE_DIM,
    VALUE_HEADS,
    WIDTH,
    DeltaRule,
    convolved,
    dot,
    softplus,
)
from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import (
    add,
    exponential,
    load_lanes,
    multiply,
    read_float,
    spread,
    store_lanes,
    write_float,
)


def _mix(arguments: int, row: int) -> None:
    """Compute one row's channels, time steps and decays."""
    query, n, n_groups = convolved(arguments, row), word(arguments, KEY_DIM), word(arguments, KEY_HEADS)
    for group in range(n_groups):
        overlap = dot(query + 4 * n * group, query + 4 * n * (n_groups + group), n)
        write_float(np.float32(overlap), word(arguments, OVERLAPS) + 4 * (row * n_groups + group))
    n_heads = word(arguments, VALUE_HEADS)
    before = word(arguments, CHANNELS) + n_heads * word(arguments, VALUE_DIM)
    steps = word(arguments, INPUTS) + 4 * (word(arguments, WIDTH) * row + before)
    for i in range(0, n_heads, 16):
        count, at = min(16, n_heads - i), 4 * (row * n_heads + i)
        bias = load_lanes(word(arguments, DT_BIAS) + 4 * i, 0, count, F32)
        step = softplus(add(load_lanes(steps + 4 * i, 0, count, F32), bias))
        store_lanes(step, word(arguments, BETAS) + at, count, F32)
        rate = load_lanes(word(arguments, RATES) + 4 * i, 0, count, F32)
        store_lanes(exponential(multiply(rate, step)), word(arguments, DECAYS) + at, count, F32)


def _finish(arguments: int, index: int) -> None:
    """Multiply one group of a row's outputs by SiLU of their gates, and norm them together."""
    n_groups = word(arguments, KEY_HEADS)
    row, group = index // n_groups, index % n_groups
    n_outputs = word(arguments, VALUE_HEADS) * word(arguments, VALUE_DIM)
    n = n_outputs // n_groups
    x, scale = word(arguments, OUT) + 4 * (n_outputs * row + n * group), word(arguments, SCALE) + 4 * n * group
    gate = word(arguments, INPUTS) + 4 * (word(arguments, WIDTH) * row + word(arguments, CHANNELS) + n * group)
    for i in range(0, n, 16):
        count = min(16, n - i)
        y = multiply(load_lanes(x + 4 * i, 0, count, F32), silu(load_lanes(gate + 4 * i, 0, count, F32)))
        store_lanes(y, x + 4 * i, count, F32)
    inverse = spread(np.float32(1.0 / sqrt(dot(x, x, n) / n + read_float(arguments + 8 * EPS))))
    for i in range(0, n, 16):
        count = min(16, n - i)
        y = multiply(load_lanes(x + 4 * i, 0, count, F32), inverse)
        store_lanes(multiply(y, load_lanes(scale + 4 * i, 0, count, F32)), x + 4 * i, count, F32)


MIX, FINISH = Chunk(_mix), Chunk(_finish)


class Mamba2(DeltaRule):
    """Mamba-2 of one layer. Threads may share it.

    Args:
        heads: groups that share B and C, heads, features of B and C, features of a head.
        vectors: weights of the convolution (channels, kernel), a_log and dt_bias (n_heads,).
        conv_bias: (channels,) or None.
        skips: factors of a head's input that are added to its output (n_heads,).
        scale, eps: of the norm of the outputs, scale (n_heads * head_dim,).

    Raises:
        ValueError: see DeltaRule.
    """

    mix_chunk, finish_chunk = MIX, FINISH
    has_steps = True

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        vectors: tuple[Any, Any, Any],
        conv_bias: Any,
        skips: Any,
        scale: Any,
        eps: float,
        pool: ThreadPool,
    ) -> None:
        super().__init__(heads, *vectors, scale, eps, pool, is_tiled=False)
        self._more = np.ascontiguousarray(skips), None if conv_bias is None else np.ascontiguousarray(conv_bias)
        self._arguments[SKIPS] = self._more[0].ctypes.data
        self._arguments[CONV_BIAS] = 0 if self._more[1] is None else self._more[1].ctypes.data
