"""Sparse FFN that skips inactive neurons: y[m, K] = 2^d sum over n of h[m, n] down[n], h = active x (2^u up[n] . x).

up and down: int4 rows (rows.py), N neurons, K columns. active: fp32 (m, N), each neuron's activated gate, 0 if it is
skipped. A neuron's rows are read if it is active for any of the m tokens; it adds an exact zero to the others. For one
token, whatever m, the other tokens, the threads and the other neurons are:

1. x is quantized to int8 in groups g of 32 (quantize.py): codes q, scales a.
2. total = fma(sum of entry q over group g, scale_up[n, g] a[g], total), g = 0, 1, ..., from 0, as in a tile matmul
   (matmul.py). h = active (total 2^u). Without an up matrix h = active. h = 0 if active is 0.
3. Neurons form blocks of 128. c[n, g] = h[n] scale_down[n, g]; M[g] = the largest |c| of the block, NaN first;
   q[n, g] = rint(c (127 / M)); y[k] = fma(sum over the block of entry[n, k] q[n, g], M / 127, y[k]), blocks ascending.
   If M < 1e-30 both quotients are 0. The integer sum is exact, so skipping zeros changes nothing.
4. The B blocks form S sections of B / 32 blocks, rounded up. Each section is summed from 0. The result is section
   S - 1 + ... + section 1 + section 0, added in this order from 0, times 2^d.

So the sum of the sections from s on is a prefix of the whole sum, and another device can add the first s to it.

Source: derived; skipping after the gate as in PowerInfer (arXiv 2312.12456) and CATS (arXiv 2404.08763).
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.jit.kernel_files import compiled
from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool, lead
from hetero_ee_cpu_ops.neurons.listed_rows import (
    BLOCK,
    FIRST_TOKEN,
    LISTS,
    N_NEURONS,
    N_TOKENS,
    N_UNITS,
    OFFSET_BYTES,
    PASS_TOKENS,
    QUANTIZE,
    offset_bytes,
    place_codes,
    whole_units,
    workspace_bytes,
)
from hetero_ee_cpu_ops.neurons.row_sums import add_sums, in_order
from hetero_ee_cpu_ops.neurons.rows import UNIT_BYTES, UNIT_COLUMNS, RowMatrix
from hetero_ee_cpu_ops.neurons.sparse_section import (
    ACTIVE,
    BLOCKS_PER_SECTION,
    DOWN,
    F32,
    FIRST_SECTION,
    FOUR,
    N_ARGUMENTS,
    N_COLUMNS,
    N_SECTIONS,
    OUTPUT,
    RESULT_FACTOR,
    SECTIONS,
    SECTIONS_PER_CHUNK,
    SUMS,
    SUMS_STRIDE,
    UNIT_SUMS,
    UP,
    USED,
    list_bytes,
)
from hetero_ee_cpu_ops.quantize import INPUT
from hetero_ee_cpu_ops.simd.bytes import word, zeros
from hetero_ee_cpu_ops.simd.floats import multiply, read_float, spread, store16, store_lanes

MAX_SECTIONS = 32
CHUNKS_PER_THREAD = 4  # of sections, at least; the first rows of each chunk are not prefetched in time
FOLD_UNITS = 8  # units per chunk of the last sum
MIN_SHARED_BYTES = 2**18  # rows times tokens, 7 us of one thread; below, sharing costs more than it saves


def n_blocks_per_section(n_neurons: int) -> int:
    n_blocks = -(-n_neurons // BLOCK)
    return -(-n_blocks // MAX_SECTIONS)


def _fold(arguments: int, index: int) -> None:
    """Add up the sections' sums of FOLD_UNITS units for one token, from the last section to the first."""
    n_columns, n_tokens, stride = word(arguments, N_COLUMNS), word(arguments, N_TOKENS), word(arguments, SUMS_STRIDE)
    n_units = word(arguments, N_UNITS)
    n_slices = (n_units + FOLD_UNITS - 1) // FOLD_UNITS
    token, begin = index // n_slices, index % n_slices * FOLD_UNITS
    sums, used = word(arguments, SUMS) + token * stride, word(arguments, USED)
    out = word(arguments, OUTPUT) + 4 * (word(arguments, FIRST_TOKEN) + token) * n_columns
    factor = spread(read_float(arguments + 8 * RESULT_FACTOR))
    for unit in range(begin, min(begin + FOLD_UNITS, n_units)):
        totals = zeros(FOUR)
        for section in range(word(arguments, N_SECTIONS) - 1, -1, -1):
            if word(used, section):
                totals = add_sums(totals, sums + section * n_tokens * stride + UNIT_SUMS * unit)
        column = UNIT_COLUMNS * unit
        for total in in_order(totals):
            n_left = n_columns - column
            if n_left >= 16:
                store16(multiply(total, factor), out + 4 * column)
            elif n_left > 0:
                store_lanes(multiply(total, factor), out + 4 * column, n_left, F32)
            column += 16


FOLD = Chunk(_fold)


@compiled(nogil=True)
def _compute(x: Any, active: Any, out: Any, arguments: Any, codes: Any, sums: Any, functions: Any, shared: int) -> None:
    """Compute the sections' sums, pass after pass. `arguments` already describes the matrices."""
    n_units, n_sections, address = arguments[N_UNITS], arguments[N_SECTIONS], arguments.ctypes.data
    arguments[ACTIVE], arguments[OUTPUT] = active.ctypes.data, out.ctypes.data
    arguments[SUMS_STRIDE] = UNIT_SUMS * n_units + 64
    place_codes(arguments, codes.ctypes.data, min(PASS_TOKENS, out.shape[0]))
    arguments[USED], arguments[SUMS] = sums.ctypes.data, sums.ctypes.data + 8 * MAX_SECTIONS
    n_slices = (n_units + FOLD_UNITS - 1) // FOLD_UNITS
    for first in range(0, out.shape[0], PASS_TOKENS):
        n_tokens = min(PASS_TOKENS, out.shape[0] - first)
        arguments[INPUT] = x.ctypes.data + 4 * first * UNIT_COLUMNS * n_units
        arguments[FIRST_TOKEN], arguments[N_TOKENS] = first, n_tokens
        is_small = arguments[N_NEURONS] * UNIT_BYTES * n_units * n_tokens < MIN_SHARED_BYTES
        team = 0 if is_small else shared
        if arguments[UP] != 0:
            lead(0, functions[0], address, 1)
        lead(
            team,
            functions[1],
            address,
            (n_sections + arguments[SECTIONS_PER_CHUNK] - 1) // arguments[SECTIONS_PER_CHUNK],
        )
        lead(team, functions[2], address, n_tokens * n_slices)


class SparseFfn:
    """The sparse FFN, whose functions are compiled at first use. Threads may share it."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._functions: Any = None

    def __call__(self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix) -> Any:
        """Compute the FFN's output y, fp32 (m, K).

        Args:
            x: contiguous fp32 (m, K); may be None without `up`.
            active: contiguous fp32 (m, N).

        Raises:
            ValueError: if a shape, dtype or layout does not fit.
        """
        return self._run(x, active, up, down, 0, None, down.factor)

    def from_section(self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int) -> Any:
        """Return the sum of the sections from `section` on, without 2^d. `active` of earlier neurons is not read.

        Raises:
            ValueError: if an operand does not fit or the section does not exist.
        """
        return self._run(x, active, up, down, section, None, np.float32(1))

    def onto(self, rest: Any, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int) -> Any:
        """Complete y: add the sections before `section` to `rest`, fp32 (m, K), which from_section returned for it."""
        total = rest
        for each in reversed(range(section)):
            total = total + self._run(x, active, up, down, each, each + 1, np.float32(1))
        return total * np.float32(down.factor)

    def _run(
        self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int, end: int | None, factor: Any
    ) -> Any:
        """Return `factor` times the sum of sections `section` .. end - 1. If `end` is None, all later ones count."""
        arguments = np.zeros(N_ARGUMENTS, np.int64)
        m, size = _check(x, active, up, down), n_blocks_per_section(down.n_rows)
        n_there = -(-down.n_rows // (BLOCK * size))
        if not 0 <= section < n_there:
            raise ValueError(f"Section {section} does not exist; {down.n_rows} neurons have {n_there} sections.")
        n_sections = (n_there if end is None else end) - section
        if up is not None:
            arguments[UP : UP + 5] = up.words[:5]
        arguments[DOWN : DOWN + 5] = down.words[:5]
        arguments[[N_NEURONS, N_UNITS, N_COLUMNS]] = down.n_rows, down.n_units, down.n_columns
        arguments[[BLOCKS_PER_SECTION, FIRST_SECTION, N_SECTIONS]] = size, section, n_sections
        arguments[RESULT_FACTOR] = int(np.float32(factor).view(np.int32))
        x = active if up is None else whole_units(x, down.n_units)
        arguments[SECTIONS_PER_CHUNK] = a_chunk = max(1, n_sections // (CHUNKS_PER_THREAD * self._pool.n_threads))
        tokens, n_listed = min(m, PASS_TOKENS), -(-n_sections // a_chunk) * a_chunk * size * BLOCK
        n_bytes = workspace_bytes(down.n_units, tokens)
        codes = np.empty(n_bytes + list_bytes(n_listed, tokens), np.uint8)
        arguments[OFFSET_BYTES], arguments[LISTS] = offset_bytes(), codes.ctypes.data + n_bytes
        sums = np.empty(8 * MAX_SECTIONS + n_sections * tokens * (UNIT_SUMS * down.n_units + 64), np.uint8)
        out = np.empty((m, down.n_columns), np.float32)
        functions = self._functions or self.compile()
        shared = self._pool.enter()
        try:
            _compute(x, active, out, arguments, codes, sums, functions, shared)
        finally:
            self._pool.leave(shared)
        return out

    def compile(self) -> tuple[int, int, int]:
        """Compile or load the chunk functions and return their addresses."""
        self._functions = QUANTIZE.address, SECTIONS.address, FOLD.address
        return self._functions


def _check(x: Any, active: Any, up: RowMatrix | None, down: RowMatrix) -> int:
    """Check the operands and return the number of tokens. Raises: ValueError: if an operand does not fit."""
    if up is not None and (up.n_rows, up.n_columns) != (down.n_rows, down.n_columns):
        raise ValueError(f"up has {up.n_rows} rows of {up.n_columns} columns, down {down.n_rows} of {down.n_columns}.")
    if (
        active.ndim != 2
        or active.dtype != np.float32
        or not active.flags.c_contiguous
        or active.shape[1] != down.n_rows
    ):
        raise ValueError(f"active is {active.dtype} {active.shape}, expected contiguous float32 (m, {down.n_rows}).")
    expected = (active.shape[0], down.n_columns)
    if up is not None and (x.shape != expected or x.dtype != np.float32 or not x.flags.c_contiguous):
        raise ValueError(f"Activations are {x.dtype} {x.shape}, expected contiguous float32 {expected}.")
    return int(active.shape[0])
