"""y[m, K] = 2^d sum over neurons n of h[m, n] down[n], h = active x (2^u up[n] . x): inactive neurons are not read.

up and down: int4 rows (rows.py), N neurons, K columns; active fp32 (m, N): each neuron's activated gate, 0 where it is
skipped. A neuron's rows are read where any of the m tokens has it active; the others get an exact zero of it. For one
token, whatever m, the other tokens, the threads and the other neurons are:

1. x to int8 in groups g of 32 (quantize.py): codes q, scales a.
2. total = fma(sum of entry q over group g, scale_up[n, g] a[g], total), g = 0, 1, ..., from 0: as a tile matmul has it
   (matmul.py). h = active (total 2^u). Without an up matrix h = active; 0 where active is 0.
3. Neurons in blocks of 128. c[n, g] = h[n] scale_down[n, g]; M[g] = the largest |c| of the block, NaN before all;
   q[n, g] = rint(c (127 / M)); y[k] = fma(sum over the block of entry[n, k] q[n, g], M / 127, y[k]), blocks ascending.
   Where M < 1e-30 both quotients are 0. The integer sum is exact, so what is left out changes nothing.
4. Sections of B / 32 blocks, rounded up, of the B that there are: each is summed from 0, and the result is section
   S - 1 + ... + section 1 + section 0, added up in this order from 0, times 2^d.

So the sections from s on, added up, are a prefix of the sum, and another device can add the first s to it.

Source: derived; skipping after the gate as in PowerInfer (arXiv 2312.12456) and CATS (arXiv 2404.08763).
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.kernel_files import compiled
from hetero_ee_cpu_ops.lazy import Chunk
from hetero_ee_cpu_ops.listed_rows import (
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
from hetero_ee_cpu_ops.quantize import INPUT
from hetero_ee_cpu_ops.row_sums import add_sums, in_order
from hetero_ee_cpu_ops.rows import UNIT_BYTES, UNIT_COLUMNS, RowMatrix
from hetero_ee_cpu_ops.simd.bytes import word, zeros
from hetero_ee_cpu_ops.simd.floats import multiply, read_float, spread, store16, store_lanes
from hetero_ee_cpu_ops.sparse_section import (
    ACTIVE,
    BLOCKS_A_SECTION,
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
    SECTIONS_A_CHUNK,
    SUMS,
    SUMS_STRIDE,
    UNIT_SUMS,
    UP,
    USED,
    list_bytes,
)
from hetero_ee_cpu_ops.thread_pool import ThreadPool, lead

MAX_SECTIONS = 32
CHUNKS_A_THREAD = 4  # of sections, at least: the first rows of each are waited for
FOLD_UNITS = 8  # a chunk of the last sum
MIN_SHARED_BYTES = 2**18  # rows times tokens, 7 us of one thread; below, handing over costs more than it saves


def n_blocks_a_section(n_neurons: int) -> int:
    """Section s holds the blocks of 128 neurons from s times this on."""
    n_blocks = -(-n_neurons // BLOCK)
    return -(-n_blocks // MAX_SECTIONS)


def _fold(arguments: int, index: int) -> None:
    """FOLD_UNITS units of one token: the sections' sums from the last to the first."""
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
    """Pass after pass; `arguments` comes with the matrices' part filled."""
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
        lead(team, functions[1], address, (n_sections + arguments[SECTIONS_A_CHUNK] - 1) // arguments[SECTIONS_A_CHUNK])
        lead(team, functions[2], address, n_tokens * n_slices)


class SparseFfn:
    """The operation with its compiled functions, made at first use. May be called from several threads."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._functions: Any = None

    def __call__(self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix) -> Any:
        """x fp32 (m, K), active fp32 (m, N), contiguous -> y fp32 (m, K); without up x is not read and may be None.

        Raises ValueError where shapes don't fit.
        """
        return self._run(x, active, up, down, 0, None, down.factor)

    def from_section(self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int) -> Any:
        """The sections from `section` on alone, added up, not times 2^d; of `active` nothing before them is read.

        Raises ValueError for a section that is not there, too.
        """
        return self._run(x, active, up, down, section, None, np.float32(1))

    def onto(self, rest: Any, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int) -> Any:
        """The whole sum, of what from_section gives for `section` (fp32 (m, K)) and the sections before it."""
        total = rest
        for each in reversed(range(section)):
            total = total + self._run(x, active, up, down, each, each + 1, np.float32(1))
        return total * np.float32(down.factor)

    def _run(
        self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int, end: int | None, factor: Any
    ) -> Any:
        """The sections from `section` to `end`, all where None."""
        arguments = np.zeros(N_ARGUMENTS, np.int64)
        m, size = _check(x, active, up, down), n_blocks_a_section(down.n_rows)
        n_there = -(-down.n_rows // (BLOCK * size))
        if not 0 <= section < n_there:
            raise ValueError(f"section {section} is none of the {n_there} of {down.n_rows} neurons.")
        n_sections = (n_there if end is None else end) - section
        if up is not None:
            arguments[UP : UP + 5] = up.words[:5]
        arguments[DOWN : DOWN + 5] = down.words[:5]
        arguments[[N_NEURONS, N_UNITS, N_COLUMNS]] = down.n_rows, down.n_units, down.n_columns
        arguments[[BLOCKS_A_SECTION, FIRST_SECTION, N_SECTIONS]] = size, section, n_sections
        arguments[RESULT_FACTOR] = int(np.float32(factor).view(np.int32))
        x = active if up is None else whole_units(x, down.n_units)
        arguments[SECTIONS_A_CHUNK] = a_chunk = max(1, n_sections // (CHUNKS_A_THREAD * self._pool.n_threads))
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
        """Addresses of the chunk functions."""
        self._functions = QUANTIZE.address, SECTIONS.address, FOLD.address
        return self._functions


def _check(x: Any, active: Any, up: RowMatrix | None, down: RowMatrix) -> int:
    """The number of tokens. Raises ValueError where an operand doesn't fit."""
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
        raise ValueError(f"activations are {x.dtype} {x.shape}, expected contiguous float32 {expected}.")
    return int(active.shape[0])
