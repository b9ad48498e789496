"""Matrix product y[m, N] = 2^e x[m, K] W^T, W in tiles of 4 to 8 bits (docs/FORMAT.md), x as int8 (quantize.py).

Symbols: N weight rows in blocks of 16, K columns in G groups of 32 and Q quads of 4 groups, m rows of activations, here
called tokens. Arithmetic and order: tile_group.py, whose integer sums are those of the CPU's matmul. Source: derived.

Tensor cores can read a tile as it is stored: line j of a tile holds, for each row, exactly the words that lane j of a
row's four lanes holds of an operand. So a lane reads 4 rows of a line, 16 bytes, and a warp reads one group of two row
blocks, which are two products of 16 x 32 weights with 8 tokens. The rows of an operand may be in any order: its 8 + 8
are rows 4 i + 0 and 4 i + 1 of the tiles, then 4 i + 2 and 4 i + 3. What is unpacked from a word (bytes of nibbles,
codebook entries, scales) serves 8 tokens after another. Shared memory is only used at the end: each of the 8 warps has
added up every eighth quad.

Activations of two terms have two tokens here, which are adjacent and whose products are added at the end.

A token's bits are the same for every m: different numbers of tokens change what runs in parallel, but no step.

Instructions of the loop per weight, including all loads (SASS for sm_86, Triton 3.9.0, not timed on a card):
linear 1.2 for 1 token, 1.5 for 8, 8.3 for 64; codebook 2.4, 2.8, 10.8; int8 tiles 1.0, 1.4, 9.6.
AMD cards compute one token per program, in plain arithmetic.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, output
from hetero_ee_kernels.quantize import quantize
from hetero_ee_kernels.tile_group import (
    SLOTS,
    entries,
    join4,
    load_table,
    load_words,
    loads_end,
    mma,
    nothing,
    split4,
    sum_slots,
    to_float,
)
from hetero_ee_kernels.tile_matrix import FIVE_ZEROS, GCN, SIX, TileMatrix, check_rows

MAX_EIGHTS = 4  # tokens per program, in eights; 8 need too many registers
MAX_PAIRS = 2  # row blocks per program, in pairs, for prompts: they share the activations that are read
ONE_PAIR = (FIVE_ZEROS, SIX)  # kinds of tile that have too few registers for two pairs


@triton.jit
def added(
    totals: tl.tensor,
    sums: tl.tensor,
    zeros: tl.tensor,
    x_sum: tl.tensor,
    scales: tl.tensor,
    x_scale: tl.tensor,
    KIND: tl.constexpr,
) -> Any:
    """Add a group's products to the totals of 4 rows."""
    return (
        tl.fma(number_of(sums[0], zeros[0], x_sum, KIND), scales[0] * x_scale, totals[0]),
        tl.fma(number_of(sums[1], zeros[1], x_sum, KIND), scales[1] * x_scale, totals[1]),
        tl.fma(number_of(sums[2], zeros[2], x_sum, KIND), scales[2] * x_scale, totals[2]),
        tl.fma(number_of(sums[3], zeros[3], x_sum, KIND), scales[3] * x_scale, totals[3]),
    )


@triton.jit
def number_of(total: tl.tensor, zero: tl.tensor, x_sum: tl.tensor, KIND: tl.constexpr) -> Any:
    """Convert a group's integer sum to fp32 and add zero * x_sum, x_sum being -16 or -8 times the activations' sum."""
    return tl.fma(zero, x_sum, to_float(total)) if KIND == 3 or KIND == 5 else to_float(total)


@triton.jit
def load_scales(at: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> Any:
    return tl.load(at, mask=mask, other=0.0 if MASKED else None)


@triton.jit
def load_zeros(at: tl.tensor, mask: tl.tensor, KIND: tl.constexpr, MASKED: tl.constexpr) -> Any:
    """Load the numbers that follow the scales: zero points, or the scales of the second half of the columns."""
    return load_scales(at, mask, MASKED) if KIND == 3 or KIND >= 5 else 0


@triton.jit
def zero_points(zeros: tl.tensor, b: tl.tensor, KIND: tl.constexpr, ISA: tl.constexpr) -> Any:
    """Return 4 rows' zero points, and -16 (5 bits: -8) times the activations' sums of tokens 2 j and 2 j + 1.

    b: see mma.
    """
    SIZE: tl.constexpr = -8.0 if KIND == 5 else -16.0
    if KIND == 3 or KIND == 5:
        ones = tl.full((1, 1, b[0].shape[2]), 0x01010101, tl.int32)
        zeros = split4(zeros.to(tl.float32))
        sums = mma((ones, ones, ones, ones), b, ISA)
        return zeros, to_float(sums[0]) * SIZE, to_float(sums[1]) * SIZE
    else:
        return (0, 0, 0, 0), 0, 0


@triton.jit
def add_quads(
    totals: tl.tensor,
    at: tl.tensor,
    n_inside: tl.tensor,
    j: tl.tensor,
    table: tl.tensor,
    IS_ONE: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    ISA: tl.constexpr,
) -> Any:
    """Add each warp's quad to the totals, 4 rows each for tokens 2 j and 2 j + 1; return them and the next `at`.

    Args:
        at: addresses of words and scales of weights, (PAIRS, 1, T, 4), and of words of token r and scales of token 2 j,
            (1, EIGHTS, T, 4).
        n_inside: (T,), the group from which on a thread's groups add 0, if MASKED.
        j: (1, 1, T, 1), each thread's j.
        IS_ONE: only the first token counts.
    """
    TILE: tl.constexpr = 128 if KIND == 2 else 96 if KIND == 6 else 80 if KIND >= 4 else 64
    SCALES: tl.constexpr = 32 if KIND == 3 or KIND >= 5 else 16
    STEP: tl.constexpr = 4 * SLOTS
    words_at, scales_at, codes_at, code_scales_at = at
    even, odd = totals
    groups = nothing()
    for i in tl.static_range(4 if IS_ONE else 0):  # more tokens would have too few registers
        mask = (n_inside > i)[None, None, :, None] if MASKED else None
        scales = load_scales(scales_at + SCALES * i, mask, MASKED)
        zeros = load_zeros(scales_at + SCALES * i + 16, mask, KIND, MASKED)
        groups += ((load_words(words_at + TILE * i, j, mask, KIND), scales, zeros),)
    even_scales = split4(tl.load(code_scales_at))
    odd_scales = even_scales if IS_ONE else split4(tl.load(code_scales_at + 4))
    if IS_ONE:
        loads_end(n_inside, ISA)
    for i in tl.static_range(4):
        mask = (n_inside > i)[None, None, :, None] if MASKED else None
        words = groups[i][0] if IS_ONE else load_words(words_at + TILE * i, j, mask, KIND)
        low, high = entries(words, j, table, KIND, ISA)
        low, high = split4(low), split4(high)
        scales = groups[i][1] if IS_ONE else load_scales(scales_at + SCALES * i, mask, MASKED)
        scales = split4(scales.to(tl.float32))
        if i % 2 == 0:  # not both at once, since a prompt's program has too few registers
            x = split4(tl.load(codes_at + 8 * i))
        b = (x[i % 2 * 2], x[i % 2 * 2 + 1])
        if KIND == 6:
            second = split4(
                (groups[i][2] if IS_ONE else load_zeros(scales_at + SCALES * i + 16, mask, KIND, MASKED)).to(tl.float32)
            )
            none = low[0] * 0
            c = mma((low[0], low[1], none, none), b, ISA)
            d = mma((low[2], low[3], none, none), b, ISA)
            even = added(even, (c[0], c[2], d[0], d[2]), (0, 0, 0, 0), 0, scales, even_scales[i], KIND)
            if not IS_ONE:
                odd = added(odd, (c[1], c[3], d[1], d[3]), (0, 0, 0, 0), 0, scales, odd_scales[i], KIND)
            scales, low = second, (none, none, none, none)
        c = mma((low[0], low[1], high[0], high[1]), b, ISA)
        # For prompts between the products, else after them; the other way round needs too many registers on sm_75/80.
        if words_at.shape[0] > 1 or KIND == 5:
            zeros = groups[i][2] if IS_ONE else load_zeros(scales_at + SCALES * i + 16, mask, KIND, MASKED)
            zeros, even_sum, odd_sum = zero_points(zeros, b, KIND, ISA)
        d = mma((low[2], low[3], high[2], high[3]), b, ISA)
        if words_at.shape[0] == 1 and KIND != 5:
            zeros = groups[i][2] if IS_ONE else load_zeros(scales_at + SCALES * i + 16, mask, KIND, MASKED)
            zeros, even_sum, odd_sum = zero_points(zeros, b, KIND, ISA)
        even = added(even, (c[0], c[2], d[0], d[2]), zeros, even_sum, scales, even_scales[i], KIND)
        if not IS_ONE:
            odd = added(odd, (c[1], c[3], d[1], d[3]), zeros, odd_sum, scales, odd_scales[i], KIND)
    at = (words_at + STEP * TILE, scales_at + STEP * SCALES, codes_at + STEP * 8, code_scales_at + STEP * 2)
    return (even, odd), at


@triton.jit(do_not_specialize=["m", "n_rows", "n_groups", "n_experts", "one"])
def matmul_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    code_scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factor: tl.tensor,
    m: tl.tensor,
    n_rows: tl.tensor,
    n_groups: tl.tensor,
    n_experts: tl.tensor,
    one: tl.tensor,
    TOKENS: tl.constexpr,
    TERMS: tl.constexpr,
    PAIRS: tl.constexpr,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """Multiply 32 x PAIRS rows by TOKENS tokens: a multiple of 8, or 1, which stands for all TERMS of one.

    Programs of the same rows are adjacent in the grid, so that the later ones read the weights from the L2 cache.
    In a product with experts, programs of the same tokens multiply with the rows of one expert.

    Args:
        words_ptr, scales_ptr, table_ptr: TileMatrix.words, scales and table.
        codes_ptr, code_scales_ptr: quantize(x), the codes as int32 words.
        out_ptr: fp32 (m / TERMS, n_rows), multiplied by `factor`.
        experts_ptr: None, or fp32 with the index of each program's expert; those outside of n_experts have no rows.
        pairs_ptr: int32 (m / TERMS,), the rows of `out`, none if below 0; None for rows in order.
        bias_ptr: None, or fp32 (n_experts * n_rows,), added to the products with experts.
        n_rows: rows of an expert, if there are experts.
        one: 1, which the compiler does not know; see load_table.
        KIND, ISA: constants of tile_matrix.py.
    """
    IS_ONE: tl.constexpr = TOKENS == 1
    EIGHTS: tl.constexpr = TERMS if IS_ONE else TOKENS // 8
    EACH: tl.constexpr = 1 if IS_ONE else 2
    EIGHT: tl.constexpr = 1 if IS_ONE else 8
    N_TOKENS: tl.constexpr = EIGHTS * EIGHT
    STEP: tl.constexpr = 4 * SLOTS
    TILE: tl.constexpr = 128 if KIND == 2 else 96 if KIND == 6 else 80 if KIND >= 4 else 64
    SCALES: tl.constexpr = 32 if KIND == 3 or KIND >= 5 else 16
    n_parts = (m + N_TOKENS - 1) // N_TOKENS
    n_quads = (n_groups + STEP - 1) // STEP * SLOTS
    first_row = tl.program_id(0) // n_parts * (32 * PAIRS)
    first = tl.program_id(0) % n_parts * N_TOKENS
    if experts_ptr is not None:
        expert = tl.load(experts_ptr + tl.program_id(0) % n_parts).to(tl.int32)
        if (expert < 0) | (expert >= n_experts):
            return
        before = expert * ((n_rows + 15) // 16)  # blocks of rows
    else:
        before = 0
    thread = tl.arange(0, 32 * SLOTS)
    row, j, slot = thread % 32 // 4, thread % 4, thread // 32
    four = tl.arange(0, 4)[None, None, None, :]
    block = first_row // 16 + 2 * tl.arange(0, PAIRS)[:, None] + (row // 4)[None, :]
    tile = (before + tl.minimum(block, (n_rows + 15) // 16 - 1)).to(tl.int64) * n_groups + (4 * slot)[None, :]
    words_at = words_ptr + (tile * TILE + (16 * j + row % 4 * 4)[None, :])[:, None, :, None] + four
    scales_at = scales_ptr + (tile * SCALES + (row % 4 * 4)[None, :])[:, None, :, None] + four
    eight = first + EIGHT * tl.arange(0, EIGHTS)[:, None]
    token = tl.minimum(eight + ((EACH - 1) * row)[None, :], m - 1).to(tl.int64)
    even = tl.minimum(eight + ((EACH - 1) * 2 * j)[None, :], (m - 1) // EACH * EACH).to(tl.int64)
    codes_at = codes_ptr + ((token * n_quads + slot[None, :]) * 32 + (4 * j)[None, :])[None, :, :, None] + four
    code_scales = (even // 2 * n_quads + slot[None, :]) * 8 + even % 2 * 4
    code_scales_at = code_scales_ptr + code_scales[None, :, :, None] + four
    table = load_table(table_ptr, ((thread * (one - 1))[:, None] + 0 * tl.arange(0, 4)[None, :])[None, None], KIND)
    zeros = tl.zeros((PAIRS, EIGHTS, 32 * SLOTS), tl.float32)
    totals = ((zeros, zeros, zeros, zeros), (zeros, zeros, zeros, zeros))
    at, lane = (words_at, scales_at, codes_at, code_scales_at), j[None, None, :, None]
    n_whole = n_groups // STEP * STEP
    if PAIRS > 1:  # a second loop body, without masks, would need too many registers in a prompt's program
        for group in range(0, n_groups, STEP):
            totals, at = add_quads(totals, at, n_groups - group - 4 * slot, lane, table, IS_ONE, KIND, True, ISA)
    else:
        for _ in range(0, n_whole, STEP):
            totals, at = add_quads(totals, at, slot, lane, table, IS_ONE, KIND, False, ISA)
        if n_whole < n_groups:
            totals, at = add_quads(totals, at, n_groups - n_whole - 4 * slot, lane, table, IS_ONE, KIND, True, ISA)
    y = join4(totals[0]) if IS_ONE else tl.join(join4(totals[0]), join4(totals[1]))
    y = tl.reshape(y, (PAIRS, EIGHTS, SLOTS, 8, 4, 4, EACH))  # ., ., slot, row, j, rows of a lane, even or odd token
    # A single token is in all four lanes, of which the first is stored.
    y = tl.permute(y, (4, 1, 6, 0, 3, 5, 2)) if IS_ONE else tl.permute(y, (1, 4, 6, 0, 3, 5, 2))
    y = sum_slots(tl.reshape(y, (EIGHTS * 4 * EACH, PAIRS * 32, SLOTS)))
    if TERMS == 2:
        high, low = tl.split(tl.permute(tl.reshape(y, (EIGHTS * 2 * EACH, 2, PAIRS * 32)), (0, 2, 1)))
        y = high + low
    n = first_row + tl.arange(0, PAIRS * 32)
    local = tl.arange(0, EIGHTS * 4 * EACH // TERMS)
    row_of_out = first // TERMS + local
    is_token = local < tl.minimum(N_TOKENS, m - first) // TERMS
    if pairs_ptr is not None:
        row_of_out = tl.load(pairs_ptr + row_of_out, mask=is_token, other=-1)
        is_token = row_of_out >= 0
    y *= factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + before.to(tl.int64) * 16 + n, mask=n < n_rows, other=0.0)[None]
    out_at = out_ptr + (row_of_out.to(tl.int64)[:, None] * n_rows + n[None])
    tl.store(out_at, y, mask=is_token[:, None] & (n < n_rows)[None])


def matmul(x: Any, weight: TileMatrix, out: Any = None) -> Any:
    """Return x times the transposed weight, fp32 (m, n_rows).

    Args:
        x: fp32 or fp16 (m, K), contiguous.
        out: fp32 (m, n_rows), allocated if None.

    Raises:
        ValueError: if an operand does not fit.
    """
    check_rows(x, weight)
    m = len(x)
    out = output(out, x, (m, weight.n_rows))
    if m:
        quantized = quantize(x, weight.n_terms)
        m = len(quantized[0])
        eights = min(MAX_EIGHTS, triton.next_power_of_2(-(-m // 8)))
        n_tokens = 1 if m == 1 or weight.isa == GCN else 8 * eights
        launch(weight, quantized, out, n_tokens, has_more=m > n_tokens > 1)
    return out


def launch(
    weight: TileMatrix,
    quantized: tuple[Any, Any],
    out: Any,
    n_tokens: int,
    of_experts: tuple[Any, Any, Any, int] = (None, None, None, 0),
    *,
    has_more: bool,
) -> None:
    """Launch the product.

    Args:
        quantized: codes and scales of the activations.
        n_tokens: rows of codes per program, 1 or a multiple of 8.
        of_experts: the kernel's experts, pairs, bias and n_experts.
        has_more: whether several programs of many tokens multiply with the same rows.
    """
    codes, code_scales = quantized
    n_rows, n_pairs = out.shape[-1], MAX_PAIRS if has_more and weight.kind not in ONE_PAIR else 1
    n_parts = -(-len(codes) // (weight.n_terms if n_tokens == 1 else n_tokens))
    *pointers, n_experts = of_experts
    operands = weight.words, weight.scales, weight.table, codes.view(torch.int32), code_scales, out, *pointers
    sizes = weight.quantized_factor, len(codes), n_rows, weight.n_groups, n_experts, 1
    constants = {"TOKENS": n_tokens, "TERMS": weight.n_terms, "PAIRS": n_pairs, "KIND": weight.kind}
    grid = (-(-n_rows // (32 * n_pairs)) * n_parts,)
    matmul_kernel[grid](*operands, *sizes, **constants, ISA=weight.isa, num_warps=SLOTS.value, **UNFUSED)
