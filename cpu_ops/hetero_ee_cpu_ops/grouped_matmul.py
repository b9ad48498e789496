"""Matrix products of a mixture of experts: each chosen expert's weight rows times the rows of x that have chosen it.

All experts' matrices are one matrix in tiles, one expert after the other. Rows of x are gathered and quantized expert
by expert; then every chosen expert is a product of its own (matmul.py), and threads share the chunks of all of them.
So an expert's tiles are read once for all of its rows, and each output has the bits that it has alone. Source: derived.
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.expert_pairs import Pairs
from hetero_ee_cpu_ops.jit.atomics import call_chunk
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool, lead
from hetero_ee_cpu_ops.matmul import (
    BLOCK_BYTES,
    MIN_SHARED_INPUTS,
    N_ARGUMENTS,
    N_BLOCKS,
    N_ROWS,
    N_TERMS,
    OUTPUT,
    SCALES,
    SOURCES,
    TILES,
    Matmul,
    TileMatrix,
    cut,
    place_rows,
)
from hetero_ee_cpu_ops.quantize import BYTES_PER_GROUP, INPUT, N_COLUMNS, ROW_BLOCK, whole_groups
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import add, load16, store16

# Indices in the argument array of a group of products. FUNCTION: of a product's chunk. The last four are for biases.
FUNCTION, MEMBERS, FIRSTS, N_MEMBERS, BIAS_ROWS, EXPERTS, STARTS, OUTPUTS, N_OUTPUTS = range(9)
# Indices in an ExpertMatrix's description, after the arguments of a product: the first expert's first block of 16
# rows, blocks per expert, the bytes of a block's tiles and scales, addresses of compiled functions and of the bias.
FIRST_BLOCK, N_OWN_BLOCKS, TILE_BYTES, SCALE_BYTES, MULTIPLY, QUANTIZE, BIAS, N_WORDS = range(
    N_ARGUMENTS, N_ARGUMENTS + 8
)
F32, IN_ORDER = np.float32(0), np.zeros(0, np.int64)  # type of a loaded value; stands for rows in order
INTEGERS, MATRIX_IN, MATRIX_OUT = array_in(types.int64, 1), array_in(types.float32, 2), array_out(types.float32, 2)
BYTES_OUT = array_out(types.uint8, 1)


def _member_chunk(arguments: int, index: int) -> None:
    """Find the product that chunk `index` of the group belongs to, and run the chunk."""
    firsts, low, high = word(arguments, FIRSTS), 0, word(arguments, N_MEMBERS)
    while high - low > 1:
        middle = (low + high) // 2
        if word(firsts, middle) <= index:
            low = middle
        else:
            high = middle
    member = word(arguments, MEMBERS) + 8 * N_ARGUMENTS * low
    call_chunk(word(arguments, FUNCTION), member, index - word(firsts, low))


def _bias_chunk(arguments: int, index: int) -> None:
    """Add its bias to the outputs of the index-th chosen expert."""
    row_bytes = 4 * word(arguments, N_OUTPUTS)
    bias = word(arguments, BIAS_ROWS) + row_bytes * word(word(arguments, EXPERTS), index)
    starts = word(arguments, STARTS)
    for pair in range(word(starts, index), word(starts, index + 1)):
        out = word(arguments, OUTPUTS) + row_bytes * pair
        for i in range(0, row_bytes, 64):
            store16(add(load16(out + i, F32), load16(bias + i, F32)), out + i)


MEMBER_CHUNK, BIAS_CHUNK = Chunk(_member_chunk), Chunk(_bias_chunk)


@inner
def _describe(
    x: Any, experts: Any, starts: Any, rows: Any, matrix: Any, workspace: Any, out: Any, members: Any, one_row: bool
) -> None:
    """Write the argument array of each chosen expert's product, in rows and blocks of its own.

    one_row: all products are with the same row of x, whose codes they share.
    """
    n_blocks, n_terms = matrix[N_OWN_BLOCKS], matrix[N_TERMS]
    n_rows = 1 if one_row else starts[len(experts)]
    for i in range(len(experts)):
        member, first, block = members[i], starts[i], matrix[FIRST_BLOCK] + experts[i] * n_blocks
        member[:] = matrix[:N_ARGUMENTS]
        member[TILES] += block * matrix[TILE_BYTES]
        member[SCALES] += block * matrix[SCALE_BYTES]
        member[N_BLOCKS] = n_blocks
        member[INPUT], member[N_COLUMNS] = x.ctypes.data, x.shape[1]
        if rows.size:
            member[SOURCES] = rows.ctypes.data + 8 * first
        else:
            member[INPUT] += 4 * first * x.shape[1]
        member[OUTPUT] = out.ctypes.data + 64 * first * n_blocks
        n_own = (starts[i + 1] - first) * n_terms
        place_rows(member, workspace, 0 if one_row else first * n_terms, n_own, n_rows * n_terms)


@inner
def multiply_pairs(
    x: Any, experts: Any, starts: Any, rows: Any, matrix: Any, workspace: Any, out: Any, chunk: int, bias_chunk: int,
    shared: int, n_threads: int,
) -> None:  # fmt: skip
    """Multiply rows of x by the rows of their experts. The arguments are those of _products."""
    n = len(experts)
    if n == 0:
        return
    members, firsts, group = np.empty((n, N_ARGUMENTS), np.int64), np.empty(n + 1, np.int64), np.empty(9, np.int64)
    one_row = rows.size > 0 and len(x) == 1
    _describe(x, experts, starts, rows, matrix, workspace, out, members, one_row)
    group[MEMBERS], group[FIRSTS], group[N_MEMBERS] = members.ctypes.data, firsts.ctypes.data, n
    group[FUNCTION], firsts[0] = matrix[QUANTIZE], 0
    for i in range(n):
        firsts[i + 1] = firsts[i] + (members[i, N_ROWS] + ROW_BLOCK - 1) // ROW_BLOCK
    is_large = starts[n] * x.shape[1] >= MIN_SHARED_INPUTS
    lead(shared if is_large else 0, chunk, group.ctypes.data, 1 if one_row else firsts[n])
    group[FUNCTION] = matrix[MULTIPLY]
    for i in range(n):
        all_bytes = n * members[i, N_BLOCKS] * members[i, BLOCK_BYTES]
        firsts[i + 1] = firsts[i] + cut(members[i], all_bytes, n_threads)
    lead(shared, chunk, group.ctypes.data, firsts[n])
    if matrix[BIAS]:
        group[BIAS_ROWS], group[EXPERTS], group[STARTS] = matrix[BIAS], experts.ctypes.data, starts.ctypes.data
        group[OUTPUTS], group[N_OUTPUTS] = out.ctypes.data, out.shape[1]
        lead(shared if is_large else 0, bias_chunk, group.ctypes.data, n)


@entry(
    types.int64(
        MATRIX_IN, INTEGERS, INTEGERS, INTEGERS, INTEGERS, BYTES_OUT, MATRIX_OUT, *[types.int64] * 4
    ),
    nogil=True,
)  # fmt: skip
def _products(
    x: Any, experts: Any, starts: Any, rows: Any, matrix: Any, workspace: Any, out: Any, chunk: int, bias_chunk: int,
    shared: int, n_threads: int,
) -> int:  # fmt: skip
    """Multiply rows of x by the rows of their experts.

    Args:
        rows: rows of x in the order of the pairs, IN_ORDER if each pair has a row of its own.
        matrix: an ExpertMatrix's description.
        chunk, bias_chunk: addresses of MEMBER_CHUNK and BIAS_CHUNK.
    """
    multiply_pairs(x, experts, starts, rows, matrix, workspace, out, chunk, bias_chunk, shared, n_threads)
    return 0


class ExpertMatrix:
    """A matrix of several experts, with the same number of rows for each, prepared for the kernels.

    Args:
        first_row: with which the first expert begins, and n_rows, of each expert: multiples of 16.
        bias: contiguous fp32 (n_experts * n_rows,) or None.

    Raises:
        ValueError: if the matrix lacks rows of n_experts experts.
    """

    def __init__(
        self, matmul: Matmul, tiles: TileMatrix, first_row: int, n_rows: int, n_experts: int, bias: Any = None
    ) -> None:
        if first_row % 16 or n_rows % 16 or first_row + n_experts * n_rows > 16 * tiles.n_blocks:
            raise ValueError(
                f"{n_experts} experts of {n_rows} rows from {first_row} on do not fit {tiles.n_blocks} blocks of 16."
            )
        self.tiles, self.n_rows, self.n_experts, self._bias = tiles, n_rows, n_experts, bias
        address = 0 if bias is None else bias.ctypes.data
        place = first_row // 16, n_rows // 16, *tiles.block_bytes, *matmul.functions(tiles.kind), address
        self.description = np.array([*tiles.fresh_arguments(), *place])

    def workspace_bytes(self, n_pairs: int) -> int:
        """Return the bytes that the codes of n_pairs rows of activations need."""
        return n_pairs * self.tiles.n_terms * self.tiles.n_groups * BYTES_PER_GROUP

    def check(self, pairs: Pairs) -> None:
        """Raise ValueError unless the matrix has all experts of these pairs."""
        if len(pairs.experts) and pairs.experts[-1] >= self.n_experts:
            raise ValueError(f"Expert {pairs.experts[-1]} is not among {self.n_experts}.")


class GroupedMatmul:
    """Products with chosen experts, whose functions are compiled at first use. Threads may share it."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __call__(self, x: Any, matrix: ExpertMatrix, pairs: Pairs, *, gather: bool) -> Any:
        """Return the outputs of all pairs, fp32 (n_pairs, n_rows).

        Args:
            x: contiguous fp32 (m, K) if rows are gathered, else (n_pairs, K) with a row for each pair.

        Raises:
            ValueError: if x does not fit, or the matrix lacks chosen experts.
        """
        x, n_pairs = whole_groups(x, matrix.tiles.n_groups), len(pairs.rows)
        matrix.check(pairs)
        if len(x) != (len(pairs.places) if gather else n_pairs):
            raise ValueError(f"{len(x)} rows of activations do not fit {n_pairs} pairs.")
        out, workspace = (
            np.empty((n_pairs, matrix.n_rows), np.float32),
            np.empty(matrix.workspace_bytes(n_pairs), np.uint8),
        )
        rows, functions = pairs.rows if gather else IN_ORDER, (MEMBER_CHUNK.address, BIAS_CHUNK.address)
        shared = self._pool.enter()
        try:
            team = shared, self._pool.n_threads
            _products(x, pairs.experts, pairs.starts, rows, matrix.description, workspace, out, *functions, *team)
        finally:
            self._pool.leave(shared)
        return out
