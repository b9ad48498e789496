"""Matrix products of a mixture of experts: each chosen expert's weight rows times the rows of x that have chosen it.

All experts' matrices are one matrix in tiles, one expert after the other. Rows of x are gathered and quantized expert
by expert; then every chosen expert is a product of its own (matmul.py), and threads share the chunks of all of them.
So an expert's tiles are read once for all of its rows, and each output has the bits that it has alone. Source: derived.
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.expert_pairs import Pairs
from hetero_ee_cpu_ops.jit.atomics import call_chunk
from hetero_ee_cpu_ops.jit.kernel_files import compiled
from hetero_ee_cpu_ops.jit.lazy import Chunk
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

FUNCTION, MEMBERS, FIRSTS, N_MEMBERS = range(4)  # indices in the argument array of a group of products
IN_ORDER = np.zeros(0, np.int64)


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


MEMBER_CHUNK = Chunk(_member_chunk)


@compiled(nogil=True)
def _describe(x: Any, pairs: Any, workspace: Any, out: Any, template: Any, place: Any, members: Any) -> None:
    """Write the argument array of each chosen expert's product, in rows and blocks of its own.

    place: the first expert's first block, blocks per expert, and the bytes of a block's tiles and scales.
    """
    experts, starts, rows = pairs
    first_block, n_blocks, tile_bytes, scale_bytes = place
    n_terms = template[N_TERMS]
    for i in range(len(experts)):
        member, first, block = members[i], starts[i], first_block + experts[i] * n_blocks
        member[:] = template
        member[TILES] += block * tile_bytes
        member[SCALES] += block * scale_bytes
        member[N_BLOCKS] = n_blocks
        member[INPUT], member[N_COLUMNS] = x.ctypes.data, x.shape[1]
        if rows.size:
            member[SOURCES] = rows.ctypes.data + 8 * first
        else:
            member[INPUT] += 4 * first * x.shape[1]
        member[OUTPUT] = out.ctypes.data + 64 * first * n_blocks
        place_rows(member, workspace, first * n_terms, (starts[i + 1] - first) * n_terms, starts[-1] * n_terms)


@compiled(nogil=True)
def _multiply(
    members: Any, group: Any, firsts: Any, n_inputs: int, functions: Any, shared: int, n_threads: int
) -> None:
    """Quantize the rows of all members and multiply them. functions: of MEMBER_CHUNK, products and quantization."""
    chunk, multiply, quantize = functions
    n = len(members)
    group[MEMBERS], group[FIRSTS], group[N_MEMBERS] = members.ctypes.data, firsts.ctypes.data, n
    group[FUNCTION], firsts[0] = quantize, 0
    for i in range(n):
        firsts[i + 1] = firsts[i] + (members[i, N_ROWS] + ROW_BLOCK - 1) // ROW_BLOCK
    lead(shared if n_inputs >= MIN_SHARED_INPUTS else 0, chunk, group.ctypes.data, firsts[n])
    group[FUNCTION] = multiply
    for i in range(n):
        all_bytes = n * members[i, N_BLOCKS] * members[i, BLOCK_BYTES]
        firsts[i + 1] = firsts[i] + cut(members[i], all_bytes, n_threads)
    lead(shared, chunk, group.ctypes.data, firsts[n])


class GroupedMatmul:
    """Products with chosen experts, whose functions are compiled at first use. Threads may share it."""

    def __init__(self, pool: ThreadPool, matmul: Matmul) -> None:
        self._pool, self._matmul = pool, matmul

    def __call__(self, x: Any, weight: TileMatrix, place: tuple[int, int], pairs: Pairs, *, gather: bool) -> Any:
        """Return the outputs of all pairs, fp32 (n_pairs, n_rows).

        Args:
            x: contiguous fp32 (m, K) if rows are gathered, else (n_pairs, K) with a row for each pair.
            place: row of the matrix with which the first expert begins, and rows per expert, multiples of 16.

        Raises:
            ValueError: if x does not fit, or the matrix lacks rows of chosen experts.
        """
        x, (first_row, n_rows) = whole_groups(x, weight.n_groups), place
        n_pairs, n = len(pairs.rows), len(pairs.experts)
        last_row = first_row + (1 + int(pairs.experts[-1])) * n_rows if n else 0
        if first_row % 16 or n_rows % 16 or last_row > 16 * weight.n_blocks:
            raise ValueError(f"{n_rows} rows per expert from {first_row} on do not fit {weight.n_blocks} blocks of 16.")
        if len(x) != (len(pairs.places) if gather else len(pairs.rows)):
            raise ValueError(f"{len(x)} rows of activations do not fit {len(pairs.rows)} pairs.")
        out = np.empty((n_pairs, n_rows), np.float32)
        if n == 0:
            return out
        workspace = np.empty(n_pairs * weight.n_terms * weight.n_groups * BYTES_PER_GROUP, np.uint8)
        members, firsts, group = np.empty((n, N_ARGUMENTS), np.int64), np.empty(n + 1, np.int64), np.empty(4, np.int64)
        which = pairs.experts, pairs.starts, pairs.rows if gather else IN_ORDER
        functions = MEMBER_CHUNK.address, *self._matmul.functions(weight.kind)
        blocks = first_row // 16, n_rows // 16, *weight.block_bytes
        _describe(x, which, workspace, out, weight.arguments, blocks, members)
        shared = self._pool.enter()
        try:
            _multiply(members, group, firsts, n_pairs * x.shape[1], functions, shared, self._pool.n_threads)
        finally:
            self._pool.leave(shared)
        return out
