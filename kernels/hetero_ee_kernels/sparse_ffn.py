"""Sparse FFN that skips inactive neurons: y[m, K] = 2^d sum over n of h[m, n] down[n], h = active x (2^u up[n] . x).

up and down: int4 rows (row_matrix.py), N neurons, K columns. active: fp32 (m, N), each neuron's activated gate, 0 if it
is skipped. Arithmetic, order and therefore all bits are those of the CPU's sparse_ffn.py, whose docstring defines them:
a token's output does not depend on m, the other tokens or the device.

Four launches, however many neurons are active: `list` lists the neurons that a token needs of each block of 128;
`hidden` multiplies their rows of up by x; `sections` adds up their rows of down, blocks in order, with integer sums
inside a block; `fold` adds the sections. `first_sections` and `fold_sections` do this in two steps for an FFN whose
other sections another device computes meanwhile. Every token has its own programs, which read its own neurons. Programs
of the same weights are adjacent, so that weights that several tokens need come from the L2 cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, check_given, output
from hetero_ee_kernels.quantize import magnitude, steps_of
from hetero_ee_kernels.row_matrix import NO_SKIPS, UNIT_COLUMNS, RowMatrix, Skips
from hetero_ee_kernels.row_products import BLOCK, KIND, check_skips, empty_lists, listed, multiply, scales_of
from hetero_ee_kernels.tile_group import MAGIC, MAGIC_BITS, codebook_entries, join4, load_table

MAX_SECTIONS = 32
PASS_TOKENS = 16  # the sections' sums of a whole prompt would need hundreds of MB
UNITS, ROWS, N_WARPS = 8, 8, 1  # units of columns, neurons per step of `sections`; one warp needs no exchange
FOLDED = 256  # columns per program


@triton.jit
def list_kernel(
    active_ptr: tl.tensor,
    least_ptr: tl.tensor,
    may_skip_ptr: tl.tensor,
    neurons_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    n_used_ptr: tl.tensor,
    N: tl.constexpr,
) -> None:
    """List the active neurons of one block for one token, in order, with their activations and their number."""
    n_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64)
    list_number = token * n_blocks + tl.program_id(1)
    neuron = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = neuron < N
    active = tl.load(active_ptr + token * N + neuron, mask=inside, other=0.0)
    is_active = active != 0.0
    if least_ptr is not None:
        least = tl.load(least_ptr + neuron, mask=inside, other=0.0)
        is_active &= tl.where(tl.abs(active) < least, tl.load(may_skip_ptr + token) == 0, True)
    at, count = listed(is_active, neuron, list_number, neurons_ptr, counts_ptr)
    tl.store(hidden_ptr + at, active, mask=is_active)
    if n_used_ptr is not None:
        tl.atomic_add(n_used_ptr, tl.where(tl.load(may_skip_ptr + token) != 0, count, 0).to(tl.int64))


@triton.jit
def weighed(totals: tl.tensor, entries: tl.tensor, weights: tl.tensor) -> Any:
    """Multiply 4 columns' signed bytes by the weights, sum over rows, and add to the integer totals."""
    return (
        totals[0] + tl.sum(((entries << 24) >> 24) * weights, 0),
        totals[1] + tl.sum(((entries << 16) >> 24) * weights, 0),
        totals[2] + tl.sum(((entries << 8) >> 24) * weights, 0),
        totals[3] + tl.sum((entries >> 24) * weights, 0),
    )


@triton.jit
def added_up(sums: tl.tensor, totals: tl.tensor, factor: tl.tensor) -> Any:
    """Multiply a block's totals by the factor (units,) and add them to the sums of 4 columns."""
    factor = tl.broadcast_to(factor[:, None], sums[0].shape)
    return (
        tl.fma(totals[0].to(tl.float32), factor, sums[0]),
        tl.fma(totals[1].to(tl.float32), factor, sums[1]),
        tl.fma(totals[2].to(tl.float32), factor, sums[2]),
        tl.fma(totals[3].to(tl.float32), factor, sums[3]),
    )


@triton.jit
def rounded(x: tl.tensor) -> Any:
    """Round x in -127..127 to the nearest integer, ties to even; NaN to 0."""
    return tl.where(x == x, (x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS, 0)


@triton.jit(do_not_specialize=["m", "n_units", "n_blocks", "n_sections", "n_section_blocks", "one"])
def sections_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    neurons_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    m: tl.tensor,
    n_units: tl.tensor,
    n_blocks: tl.tensor,
    n_sections: tl.tensor,
    n_section_blocks: tl.tensor,
    one: tl.tensor,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """Sum one section of a token's neurons, in UNITS units of columns, which are two groups each.

    Args:
        words_ptr, scales_ptr, table_ptr: RowMatrix.words, scale_pairs and table of down.
        neurons_ptr, counts_ptr: the lists, see row_products.py; hidden_ptr: h of the listed neurons.
        sums_ptr: fp32 (n_sections, m, 64 * n_units).
        one: 1, which the compiler does not know; see load_table.
    """
    token = (tl.program_id(0) % m).to(tl.int64)
    section = tl.program_id(0) // m % n_sections
    unit = tl.program_id(0) // m // n_sections * UNITS + tl.arange(0, UNITS)
    here = tl.minimum(unit, n_units - 1)
    row, word = tl.arange(0, ROWS), tl.arange(0, 8)
    words_at = words_ptr + 8 * here[None, :, None] + word[None, None, :]
    zeros = tl.zeros((ROWS, UNITS, 8), tl.int32)
    table = load_table(table_ptr, zeros + (row * (one - 1))[:, None, None], KIND)
    none, nothing = tl.zeros((UNITS, 8), tl.int32), tl.zeros((UNITS, 8), tl.float32)
    low = (nothing, nothing, nothing, nothing)
    high = (nothing, nothing, nothing, nothing)
    first = section * n_section_blocks
    for block in range(first, tl.minimum(first + n_section_blocks, n_blocks)):
        list_number = token * n_blocks + block
        count = tl.load(counts_ptr + list_number)
        if count > 0:
            largest = tl.zeros((ROWS, UNITS), tl.int32)
            next_largest = tl.zeros((ROWS, UNITS), tl.int32)
            for start in range(0, count, ROWS):
                at = list_number * BLOCK + tl.minimum(start + row, count - 1)
                neuron, h = tl.load(neurons_ptr + at).to(tl.int64), tl.load(hidden_ptr + at)
                scale, next_scale = scales_of(scales_ptr + neuron[:, None] * n_units + here[None, :])
                largest = tl.maximum(largest, magnitude(h[:, None] * scale))
                next_largest = tl.maximum(next_largest, magnitude(h[:, None] * next_scale))
            inverse, factor = steps_of(tl.max(largest, 0))
            next_inverse, next_factor = steps_of(tl.max(next_largest, 0))
            totals = (none, none, none, none)
            next_totals = (none, none, none, none)
            for start in range(0, count, ROWS):
                at = list_number * BLOCK + tl.minimum(start + row, count - 1)
                neuron, h = tl.load(neurons_ptr + at).to(tl.int64), tl.load(hidden_ptr + at)
                h = tl.where(start + row < count, h, 0.0)
                scale, next_scale = scales_of(scales_ptr + neuron[:, None] * n_units + here[None, :])
                weights = rounded(h[:, None] * scale * inverse[None, :])
                next_weights = rounded(h[:, None] * next_scale * next_inverse[None, :])
                words = tl.load(words_at + (neuron * (8 * n_units))[:, None, None])
                entries, next_entries = codebook_entries(words, table, ISA)
                totals = weighed(totals, entries, weights[:, :, None])
                next_totals = weighed(next_totals, next_entries, next_weights[:, :, None])
            low = added_up(low, totals, factor)
            high = added_up(high, next_totals, next_factor)
    out_at = (section * m + token) * (n_units * 64) + unit * 64
    out_at = sums_ptr + (out_at[:, None] + 4 * word[None, :])[:, :, None] + tl.arange(0, 4)[None, None, :]
    tl.store(out_at, join4(low), mask=(unit < n_units)[:, None, None])
    tl.store(out_at + 32, join4(high), mask=(unit < n_units)[:, None, None])


@triton.jit(do_not_specialize=["m", "n_columns", "n_padded", "n_sections"])
def fold_kernel(
    sums_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    m: tl.tensor,
    n_columns: tl.tensor,
    n_padded: tl.tensor,
    n_sections: tl.tensor,
    FOLDED: tl.constexpr,
) -> None:
    """Add a token's sections from the last to the first. If `rest` is given, the sum starts with it."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * FOLDED + tl.arange(0, FOLDED)
    inside = column < n_columns
    total = tl.zeros((FOLDED,), tl.float32)
    if rest_ptr is not None:
        total = tl.load(rest_ptr + token * n_columns + column, mask=inside, other=0.0)
    for back in range(1, n_sections + 1):
        total += tl.load(sums_ptr + ((n_sections - back) * m + token) * n_padded + column, mask=inside, other=0.0)
    tl.store(out_ptr + token * n_columns + column, total * factor, mask=inside)


def sparse_ffn(
    x: Any,
    active: Any,
    up: RowMatrix | None,
    down: RowMatrix,
    out: Any = None,
    skips: Skips = NO_SKIPS,
) -> Any:
    """Compute the sparse FFN and return out.

    Args:
        x: fp32 (m, K); may be None without `up`.
        active: fp32 (m, N).
        out: fp32 (m, K), allocated if None.

    Raises:
        ValueError: if an operand does not fit.
    """
    m = len(active)
    out = output(out, active, (m, down.n_columns))
    _check(x, active, up, down, skips)
    for first in range(0, m, PASS_TOKENS):
        rows = slice(first, min(first + PASS_TOKENS, m))
        may_skip = None if skips.may_skip is None else skips.may_skip[rows]
        neurons, hidden, counts = _listed(active[rows], skips._replace(may_skip=may_skip))
        if up is not None:
            multiply(x[rows], up, neurons, counts, hidden=hidden)
        sums = _section_sums(down, neurons, hidden, counts, n_blocks_per_section(down.n_rows))
        fold_sections(sums, down, out[rows])
    return out


def first_sections(
    x: Any,
    active: Any,
    up: RowMatrix | None,
    down: RowMatrix,
    n_section_blocks: int,
    out: Any = None,
    skips: Skips = NO_SKIPS,
) -> Any:
    """Return the sums of an FFN's first sections, fp32 (sections, m, Kp) with Kp whole units, for fold_sections.

    Args:
        up, down: the matrices of the first sections, with N whole sections; the FFN has more neurons.
        n_section_blocks: n_blocks_per_section(...) of the whole FFN.
        out: memory for the sums, allocated if None. The other arguments are those of sparse_ffn, with m <= PASS_TOKENS.

    Raises:
        ValueError: if an operand does not fit.
    """
    _check(x, active, up, down, skips)
    if len(active) > PASS_TOKENS or down.n_rows % (n_section_blocks * BLOCK.value):
        raise ValueError(
            f"{len(active)} tokens and {down.n_rows} neurons do not fit: at most {PASS_TOKENS} tokens and a multiple "
            f"of {n_section_blocks * BLOCK.value} neurons are expected."
        )
    neurons, hidden, counts = _listed(active, skips)
    if up is not None:
        multiply(x, up, neurons, counts, hidden=hidden)
    return _section_sums(down, neurons, hidden, counts, n_section_blocks, out)


def fold_sections(sums: Any, down: RowMatrix, out: Any, rest: Any = None) -> Any:
    """Add sections from the last to the first and multiply by down's factor; return out, fp32 (m, K).

    Args:
        sums: fp32 (sections, m, Kp).
        rest: fp32 (m, K), the sum of the later sections without the factor; may be out.
    """
    n_sections, m, n_padded = sums.shape
    check_given("rest", rest, (m, down.n_columns))
    fold_kernel[(m, -(-down.n_columns // FOLDED))](
        sums, rest, out, down.factor, m, down.n_columns, n_padded, n_sections, FOLDED=FOLDED, num_warps=2, **UNFUSED
    )
    return out


def n_blocks_per_section(n_neurons: int) -> int:
    n_blocks = -(-n_neurons // BLOCK.value)
    return -(-n_blocks // MAX_SECTIONS)


def _listed(active: Any, skips: Skips) -> tuple[Any, Any, Any]:
    """Return lists of active neurons: int32 numbers (m, blocks, 128), their activations, and each block's count."""
    neurons, counts = empty_lists(active)
    hidden = torch.empty_like(neurons, dtype=torch.float32)
    list_kernel[counts.shape](
        active,
        skips.least,
        skips.may_skip,
        neurons,
        hidden,
        counts,
        skips.n_used,
        active.shape[1],
        num_warps=1,
        **UNFUSED,
    )
    return neurons, hidden, counts


def _section_sums(down: RowMatrix, neurons: Any, hidden: Any, counts: Any, size: int, out: Any = None) -> Any:
    """Return the sums of sections of `size` blocks each, fp32 (sections, m, Kp)."""
    m, n_blocks = counts.shape
    n_sections = -(-n_blocks // size)
    shape = n_sections, m, UNIT_COLUMNS * down.n_units
    sums = output(out, counts, shape)
    operands = down.words, down.scale_pairs, down.table, neurons, counts, hidden, sums
    sizes = m, down.n_units, n_blocks, n_sections, size, 1
    constants = {"UNITS": UNITS, "ROWS": ROWS, "ISA": down.isa}
    grid = (m * n_sections * -(-down.n_units // UNITS),)
    sections_kernel[grid](*operands, *sizes, **constants, num_warps=N_WARPS, **UNFUSED)
    return sums


def _check(x: Any, active: Any, up: RowMatrix | None, down: RowMatrix, skips: Skips) -> None:
    """Check the operands' shapes and dtypes. Raises: ValueError: names the first operand that does not fit."""
    if up is not None and (up.n_rows, up.n_columns) != (down.n_rows, down.n_columns):
        raise ValueError(f"up has {up.n_rows} rows of {up.n_columns} columns, down {down.n_rows} of {down.n_columns}.")
    m = len(active)
    check("active", active, (m, down.n_rows))
    if up is not None:
        check("x", x, (m, down.n_columns))
    check_given("least", skips.least, (down.n_rows,))
    check_skips(m, skips)
