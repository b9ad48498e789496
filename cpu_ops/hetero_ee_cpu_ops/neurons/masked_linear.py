"""Masked product: out[t, n] = 2^e first[n] . x[t] + bias[n] if scores[t, n] > 0 or token t may not skip, else 0.

first: int4 rows (rows.py), N neurons, K columns. The row products are those of steps 1 and 2 of sparse_ffn.py: a
token's bits do not depend on m, the other tokens, the threads or the other neurons. 2^e and then the bias are rounded
one after the other. A pass of tokens (matmul.py sets its size) reads the rows that any of its tokens wants, or all
rows if any token may not skip.

Source: derived; a predictor before the first matrix as in Deja Vu (arXiv 2310.17157) and PowerInfer (arXiv 2312.12456).
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.jit.lazy import array_in, array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool, lead
from hetero_ee_cpu_ops.matmul import MIN_SHARED_BYTES, MIN_SHARED_INPUTS, rows_per_pass
from hetero_ee_cpu_ops.neurons.listed_rows import (
    FIRST_TOKEN,
    LISTS,
    N_NEURONS,
    N_TOKENS,
    N_UNITS,
    OFFSET_BYTES,
    QUANTIZE,
    TILE,
    offset_bytes,
    place_codes,
    whole_units,
    workspace_bytes,
)
from hetero_ee_cpu_ops.neurons.masked_rows import (
    BIAS,
    N_ARGUMENTS,
    NEURONS,
    NEURONS_PER_CHUNK,
    OUTPUT,
    READS_ALL,
    SCORES,
    SKIPS,
)
from hetero_ee_cpu_ops.neurons.rows import UNIT_BYTES, UNIT_COLUMNS, RowMatrix
from hetero_ee_cpu_ops.quantize import INPUT, ROW_BLOCK

CHUNKS_PER_THREAD = 4  # the first rows of each chunk are not prefetched in time, so chunks must not be small
NO_SCORES, NO_BIAS, NO_SKIPS = np.zeros((0, 0), np.float32), np.zeros(0, np.float32), np.zeros(0, np.bool_)
MATRIX = array_in(types.float32, 2)


@entry(
    types.int64(
        MATRIX, MATRIX, array_in(types.float32, 1), array_in(types.bool_, 1), array_out(types.float32, 2),
        array_in(types.int64, 1), array_out(types.int64, 1), types.UniTuple(types.int64, 6),
    ),
    nogil=True,
)  # fmt: skip
def _compute(
    x: Any, scores: Any, bias: Any, may_skip: Any, out: Any, words: Any, workspace: Any, numbers: tuple[int, ...]
) -> int:
    """Compute the outputs, pass after pass. Return 0, or 1 if a shape is wrong.

    Args:
        words: RowMatrix.words.
        workspace: int64: the argument array, a word per token, a word per neuron of whole tiles, the codes of a pass.
        numbers: tokens per pass, bytes per offset, threads, shared memory of the pool, two chunk functions' addresses.
    """
    m, n_neurons, n_units, address = out.shape[0], out.shape[1], words[5], workspace.ctypes.data
    width, offset_bytes, n_threads, shared, quantize, multiply = numbers
    if x.shape[0] != m or x.shape[1] != n_units * UNIT_COLUMNS:
        return 1
    if may_skip.size not in (0, m) or bias.size not in (0, n_neurons):
        return 1
    if (scores.size or may_skip.size) and (scores.shape[0] != m or scores.shape[1] != n_neurons):
        return 1
    for index in range(N_ARGUMENTS):
        workspace[index] = words[index] if index < 5 else 0
    workspace[N_NEURONS], workspace[N_UNITS], workspace[OFFSET_BYTES] = n_neurons, n_units, offset_bytes
    workspace[SCORES], workspace[OUTPUT], workspace[BIAS] = scores.ctypes.data, out.ctypes.data, 0
    if bias.size:
        workspace[BIAS] = bias.ctypes.data
    workspace[SKIPS] = address + 8 * N_ARGUMENTS
    workspace[LISTS] = address + 8 * (N_ARGUMENTS + m)
    n_tiles, n_parts = (n_neurons + TILE - 1) // TILE, CHUNKS_PER_THREAD * n_threads
    workspace[NEURONS_PER_CHUNK] = size = (n_tiles + n_parts - 1) // n_parts * TILE
    place_codes(workspace, workspace[LISTS] + 8 * TILE * n_tiles, min(width, m))
    for first in range(0, m, width):
        n_tokens, reads_all = min(width, m - first), False
        for token in range(first, first + n_tokens):
            skips = may_skip.size > 0 and may_skip[token]
            workspace[N_ARGUMENTS + token] = skips
            reads_all = reads_all or not skips
        workspace[INPUT] = x.ctypes.data + 4 * first * UNIT_COLUMNS * n_units
        workspace[FIRST_TOKEN], workspace[N_TOKENS], workspace[READS_ALL] = first, n_tokens, reads_all
        team = shared if n_tokens * n_units * UNIT_COLUMNS >= MIN_SHARED_INPUTS else 0
        lead(team, quantize, address, (n_tokens + ROW_BLOCK - 1) // ROW_BLOCK)
        team = shared if n_neurons * UNIT_BYTES * n_units * n_tokens >= MIN_SHARED_BYTES else 0
        lead(team, multiply, address, (n_neurons + size - 1) // size)
    return 0


class MaskedLinear:
    """The masked product, whose functions are compiled at first use. Threads may share it."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._functions: Any = None

    def __call__(self, x: Any, scores: Any, rows: RowMatrix, bias: Any = None, may_skip: Any = None) -> Any:
        """Compute the wanted outputs of x, fp32 (m, N), with 0 for the others.

        Args:
            x: fp32 (m, K); scores: fp32 (m, N), or None without may_skip; bias: fp32 (N,) or None. All contiguous.
            may_skip: bool (m,); None if no token may skip.

        Raises:
            ValueError: if a shape, dtype or layout does not fit.
        """
        if x.shape[1:] != (rows.n_columns,) or x.dtype != np.float32 or not x.flags.c_contiguous:
            expected = f"contiguous float32 (m, {rows.n_columns})"
            raise ValueError(f"Activations are {x.dtype} {x.shape}, expected {expected}.")
        m = x.shape[0]
        width = max(1, m) if m <= ROW_BLOCK else rows_per_pass(m, 2 * rows.n_units)
        given = (NO_SCORES if scores is None else scores, NO_BIAS if bias is None else bias)
        skips = NO_SKIPS if may_skip is None else may_skip
        out = np.empty((m, rows.n_rows), np.float32)
        n_bytes = workspace_bytes(rows.n_units, min(width, m))
        workspace = np.empty(N_ARGUMENTS + m + TILE + rows.n_rows + n_bytes // 8 + 1, np.int64)
        functions = self._functions or self.compile()
        shared = self._pool.enter()
        try:
            numbers = (width, offset_bytes(), self._pool.n_threads, shared, *functions)
            status = _compute(whole_units(x, rows.n_units), *given, skips, out, rows.words, workspace, numbers)
        finally:
            self._pool.leave(shared)
        if status:
            shapes = ", ".join(str(each.shape) for each in (*given, skips))
            raise ValueError(f"Scores, bias and may_skip {shapes} do not fit {m} tokens and {rows.n_rows} neurons.")
        return out

    def compile(self) -> tuple[int, int]:
        """Compile or load the chunk functions and return their addresses."""
        self._functions = QUANTIZE.address, NEURONS.address
        return self._functions
