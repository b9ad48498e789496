"""y[m, K] = 2^d sum over neurons n of h[m, n] down[n], h = active x (2^u up[n] . x): inactive neurons are not read.

up and down: int4 rows (rows.py), N neurons, K columns; active fp32 (m, N): each neuron's activated gate, 0 where it is
skipped. A neuron's rows are read where any of the m tokens has it active; the others get an exact zero of it. For one
token, whatever m, the other tokens, the threads and the other neurons are:

1. x to int8 in groups g of 32 (quantize.py): codes q, scales a.
2. 16 lanes; of unit i (64 columns) lane l takes columns 64i + 4l .. 64i + 4l + 3, of group g = 2i + l // 8:
   total[l] = fma(sum of entry q, scale_up[n, g] a[g], total[l]), i = 0, 1, ..., from 0; their sum: l with l + 8, then
   l + 4, l + 2, l + 1. h = active (total 2^u). Without an up matrix h = active; 0 where active is 0.
3. Neurons in blocks of 64. c[n, g] = h[n] scale_down[n, g]; M[g] = the largest |c| of the block, NaN before all;
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
from hetero_ee_cpu_ops.quantize import GROUP, quantize_group
from hetero_ee_cpu_ops.row_unit import move_up
from hetero_ee_cpu_ops.rows import UNIT_BYTES, UNIT_COLUMNS, RowMatrix
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import (
    add,
    load16,
    multiply,
    read_float,
    scratch,
    spread,
    store16,
    store_lanes,
)
from hetero_ee_cpu_ops.sparse_section import (
    ACTIVE,
    BLOCK,
    BLOCKS_A_SECTION,
    CODES_STRIDE,
    DOWN,
    F32,
    FACTOR_BYTES,
    FIRST_SECTION,
    FIRST_TOKEN,
    INPUT,
    INPUT_CODES,
    INPUT_SCALES,
    N_ARGUMENTS,
    N_COLUMNS,
    N_NEURONS,
    N_SECTIONS,
    N_TOKENS,
    N_UNITS,
    OUTPUT,
    PASS_TOKENS,
    RESULT_FACTOR,
    SCALES_STRIDE,
    SECTION,
    SUMS,
    SUMS_STRIDE,
    UP,
    USED,
)
from hetero_ee_cpu_ops.thread_pool import ThreadPool, lead

MAX_SECTIONS = 32
FOLD_COLUMNS = 512  # a chunk of the last sum
MIN_SHARED_BYTES = 2**18  # rows times tokens, 7 us of one thread; below, handing over costs more than it saves


def n_blocks_a_section(n_neurons: int) -> int:
    """Section s holds the blocks of 64 neurons from s times this on."""
    n_blocks = -(-n_neurons // BLOCK)
    return -(-n_blocks // MAX_SECTIONS)


def _quantize(arguments: int, index: int) -> None:
    """Token FIRST_TOKEN + index: int8 codes and scales; the offsets that other products want are dropped."""
    dropped, n_groups = scratch(32), 2 * word(arguments, N_UNITS)
    x = word(arguments, INPUT) + (word(arguments, FIRST_TOKEN) + index) * n_groups * GROUP * 4
    codes = word(arguments, INPUT_CODES) + index * word(arguments, CODES_STRIDE)
    scales = word(arguments, INPUT_SCALES) + index * word(arguments, SCALES_STRIDE)
    for group in range(n_groups):
        at = codes + group * GROUP
        quantize_group(x + group * GROUP * 4, at, scales + 4 * group, dropped, dropped + 4, dropped + 8)
        if group & 1:
            move_up(at - GROUP)


def _fold(arguments: int, index: int) -> None:
    """FOLD_COLUMNS columns of one token: the sections' sums from the last to the first."""
    n_columns, n_tokens, stride = word(arguments, N_COLUMNS), word(arguments, N_TOKENS), word(arguments, SUMS_STRIDE)
    n_slices = (n_columns + FOLD_COLUMNS - 1) // FOLD_COLUMNS
    token, begin = index // n_slices, index % n_slices * FOLD_COLUMNS
    sums, used = word(arguments, SUMS) + token * stride, word(arguments, USED)
    out = word(arguments, OUTPUT) + 4 * (word(arguments, FIRST_TOKEN) + token) * n_columns
    factor = spread(read_float(arguments + 8 * RESULT_FACTOR))
    for column in range(begin, min(begin + FOLD_COLUMNS, n_columns), 16):
        total = spread(F32)
        for section in range(word(arguments, N_SECTIONS) - 1, -1, -1):
            if word(used, section):
                total = add(total, load16(sums + section * n_tokens * stride + 4 * column, F32))
        total = multiply(total, factor)
        if column + 16 <= n_columns:
            store16(total, out + 4 * column)
        else:
            store_lanes(total, out + 4 * column, n_columns - column, F32)


QUANTIZE, FOLD = Chunk(_quantize), Chunk(_fold)


@compiled(nogil=True)
def _compute(x: Any, active: Any, out: Any, arguments: Any, codes: Any, sums: Any, functions: Any, shared: int) -> None:
    """Pass after pass; `arguments` comes with the matrices' part filled."""
    n_units, n_sections, address = arguments[N_UNITS], arguments[N_SECTIONS], arguments.ctypes.data
    arguments[INPUT], arguments[ACTIVE], arguments[OUTPUT] = x.ctypes.data, active.ctypes.data, out.ctypes.data
    codes_stride = UNIT_COLUMNS * n_units + 64
    scales_stride = 8 * n_units + FACTOR_BYTES
    arguments[CODES_STRIDE], arguments[SCALES_STRIDE] = codes_stride, scales_stride
    arguments[SUMS_STRIDE] = 4 * UNIT_COLUMNS * n_units + 64
    arguments[INPUT_CODES], arguments[INPUT_SCALES] = codes.ctypes.data, codes.ctypes.data + PASS_TOKENS * codes_stride
    arguments[USED], arguments[SUMS] = sums.ctypes.data, sums.ctypes.data + 8 * MAX_SECTIONS
    n_slices = (arguments[N_COLUMNS] + FOLD_COLUMNS - 1) // FOLD_COLUMNS
    for first in range(0, out.shape[0], PASS_TOKENS):
        n_tokens = min(PASS_TOKENS, out.shape[0] - first)
        arguments[FIRST_TOKEN], arguments[N_TOKENS] = first, n_tokens
        is_small = arguments[N_NEURONS] * UNIT_BYTES * n_units * n_tokens < MIN_SHARED_BYTES
        team = 0 if is_small else shared
        if arguments[UP] != 0:
            lead(team, functions[0], address, n_tokens)
        lead(team, functions[1], address, n_sections)
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
        return self._run(x, active, up, down, 0, down.factor)

    def from_section(self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int) -> Any:
        """The sections from `section` on alone, added up, not times 2^d; of `active` nothing before them is read.

        Raises ValueError for a section that is not there, too.
        """
        return self._run(x, active, up, down, section, np.float32(1))

    def _run(self, x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, section: int, factor: Any) -> Any:
        arguments = np.zeros(N_ARGUMENTS, np.int64)
        m, size = _check(x, active, up, down), n_blocks_a_section(down.n_rows)
        n_sections = -(-down.n_rows // (BLOCK * size)) - section
        if section < 0 or n_sections <= 0:
            raise ValueError(f"section {section} is none of the {n_sections + section} of {down.n_rows} neurons.")
        if up is not None:
            arguments[UP : UP + 5] = up.words
        arguments[DOWN : DOWN + 5] = down.words
        arguments[[N_NEURONS, N_UNITS, N_COLUMNS]] = down.n_rows, down.n_units, down.n_columns
        arguments[[BLOCKS_A_SECTION, FIRST_SECTION, N_SECTIONS]] = size, section, n_sections
        arguments[RESULT_FACTOR] = int(np.float32(factor).view(np.int32))
        x = active if up is None else _whole_units(x, down.n_units)
        tokens = min(m, PASS_TOKENS)
        codes = np.empty(PASS_TOKENS * ((UNIT_COLUMNS + 8) * down.n_units + 64 + FACTOR_BYTES), np.uint8)
        sums = np.empty(8 * MAX_SECTIONS + n_sections * tokens * (256 * down.n_units + 64), np.uint8)
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
        self._functions = QUANTIZE.address, SECTION.address, FOLD.address
        return self._functions


def _whole_units(x: Any, n_units: int) -> Any:
    """x with zeros up to whole units."""
    if x.shape[1] == n_units * UNIT_COLUMNS:
        return x
    padded = np.zeros((x.shape[0], n_units * UNIT_COLUMNS), np.float32)
    padded[:, : x.shape[1]] = x
    return padded


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
