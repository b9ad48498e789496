"""y[m, N] = 2^e x[m, K] W^T for few rows, W in int4 or int8 tiles (docs/FORMAT.md), x quantized to int8 (quantize.py).

Symbols: N weight rows in blocks of 16, K columns in G groups of 32, m rows of activations. Arithmetic: tile_group.py,
whose integer sums are those of the CPU's matmul. Source: derived.

A program computes the 16 rows of a block for up to 8 rows of x: 4 warps, each on 8 groups at a time. A thread holds 4
rows of one group: it reads them 16 bytes at a time, and so it does the activations, whose words it uses for all 4. More
rows of x are further programs, next to each other so that the weights come from the L2 cache. Row t's bits are the same
for every m, because 1, 2, 4 and 8 rows a program differ in how often a step is done and in no step itself.

Instructions of the loop for a byte of tiles and scales, all loads included (sm_86 and sm_89, Triton 3.7.1, never timed
on a card): linear 1.8 at 1 row, 3.9 at 4, 6.7 at 8; codebook 4.0, 6.1, 8.8; int8 tiles 0.6, 1.7, 3.4. A card of 15
TFLOP/s and 272 GB/s issues 28 in that time.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.quantize import quantize
from hetero_ee_kernels.tile_group import (
    MAGIC_BITS,
    N_WARPS,
    SLOTS,
    dot4,
    entry_words,
    join4,
    load_table,
    split4,
    sum_slots,
    to_float,
)
from hetero_ee_kernels.tile_matrix import (
    GCN,
    TileMatrix,
    check_rows,
    instructions,
    output,
)

MAX_ROWS = 8  # a program; 16 would need more registers than there are
MAX_ROWS_AMD = 2  # likewise


@triton.jit
def add_groups(
    totals: tl.tensor,
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    code_scales_ptr: tl.tensor,
    row_start: tl.tensor,
    n_inside: tl.tensor,
    one: tl.tensor,
    table: tl.tensor,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    ISA: tl.constexpr,
) -> Any:
    """totals, 4 x (M, 32, 4), one for each row of a quad, plus the share of the 32 groups that the pointers begin with.

    row_start: (M,), where the rows of x begin, in groups. Where MASKED, groups from n_inside on add 0.
    """
    slot, quad, four = tl.arange(0, SLOTS), tl.arange(0, 4), tl.arange(0, 4)
    inside = slot < n_inside
    mask = inside[:, None, None] if MASKED else None
    x_mask = inside[None, :, None, None] if MASKED else None
    other = 0.0 if MASKED else None
    LINES: tl.constexpr = 8 if KIND == 2 else 4
    within = (4 * quad[:, None] + four[None, :])[None]
    w_at = words_ptr + ((slot * (16 * LINES))[:, None, None] + within)
    group = row_start[:, None] + slot[None, :]
    x_at = codes_ptr + ((group * 8)[:, :, None, None] + (quad * 0)[None, None, :, None] + four[None, None, None, :])
    x_scales_at = code_scales_ptr + ((group * one)[:, :, None] + (quad * 0)[None, None, :])
    scales = split4(tl.load(scales_ptr + ((slot * 16)[:, None, None] + within), mask=mask, other=other).to(tl.float32))
    x_scale = tl.load(x_scales_at, mask=inside[None, :, None] if MASKED else None, other=other)
    low = split4(tl.load(x_at, mask=x_mask))
    high = split4(tl.load(x_at + 4, mask=x_mask))
    sums0 = tl.full(totals[0].shape, MAGIC_BITS, tl.int32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    for line in tl.static_range(LINES):
        words = split4(tl.load(w_at + 16 * line, mask=mask))
        if KIND == 2:
            x = low[line] if line < 4 else high[line - 4]
            sums0 = dot4(words[0][None], x, sums0, ISA)
            sums1 = dot4(words[1][None], x, sums1, ISA)
            sums2 = dot4(words[2][None], x, sums2, ISA)
            sums3 = dot4(words[3][None], x, sums3, ISA)
        else:
            x, y = low[line], high[line]
            a, b = entry_words(words[0], table, KIND, ISA)
            sums0 = dot4(b[None], y, dot4(a[None], x, sums0, ISA), ISA)
            a, b = entry_words(words[1], table, KIND, ISA)
            sums1 = dot4(b[None], y, dot4(a[None], x, sums1, ISA), ISA)
            a, b = entry_words(words[2], table, KIND, ISA)
            sums2 = dot4(b[None], y, dot4(a[None], x, sums2, ISA), ISA)
            a, b = entry_words(words[3], table, KIND, ISA)
            sums3 = dot4(b[None], y, dot4(a[None], x, sums3, ISA), ISA)
    return (
        tl.fma(to_float(sums0), scales[0][None] * x_scale, totals[0]),
        tl.fma(to_float(sums1), scales[1][None] * x_scale, totals[1]),
        tl.fma(to_float(sums2), scales[2][None] * x_scale, totals[2]),
        tl.fma(to_float(sums3), scales[3][None] * x_scale, totals[3]),
    )


@triton.jit(do_not_specialize=["m", "n_rows", "n_groups", "one"])
def matmul_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    code_scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    m: tl.tensor,
    n_rows: tl.tensor,
    n_groups: tl.tensor,
    one: tl.tensor,
    M: tl.constexpr,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """one: 1, unknown to the compiler: knowing that neighbours' x scales are neighbours, it would spread the threads
    for that load and then move each scale through shared memory."""
    n_parts = (m + M - 1) // M
    block = tl.program_id(0) // n_parts
    first_row = tl.program_id(0) % n_parts * M
    local = tl.arange(0, M)
    row_start = tl.minimum(local, m - 1 - first_row) * n_groups
    LINES: tl.constexpr = 8 if KIND == 2 else 4
    first_tile = block.to(tl.int64) * n_groups
    words_ptr += first_tile * (16 * LINES)
    scales_ptr += first_tile * 16
    first_group = first_row.to(tl.int64) * n_groups
    codes_ptr += first_group * 8
    code_scales_ptr += first_group
    table = load_table(table_ptr, one - 1, KIND)
    zeros = tl.zeros((M, SLOTS, 4), tl.float32)
    totals = (zeros, zeros, zeros, zeros)
    for _ in range(n_groups // SLOTS):
        totals = add_groups(
            totals, words_ptr, scales_ptr, codes_ptr, code_scales_ptr, row_start, SLOTS, one, table, KIND, False, ISA
        )
        words_ptr += SLOTS * 16 * LINES
        scales_ptr += SLOTS * 16
        codes_ptr += SLOTS * 8
        code_scales_ptr += SLOTS
    rest = n_groups % SLOTS
    if rest != 0:
        totals = add_groups(
            totals, words_ptr, scales_ptr, codes_ptr, code_scales_ptr, row_start, rest, one, table, KIND, True, ISA
        )
    y = sum_slots(tl.reshape(join4(totals), (M, SLOTS, 16))) * factor
    n = block * 16 + tl.arange(0, 16)
    row = first_row + local
    out_at = out_ptr + (row.to(tl.int64)[:, None] * n_rows + n[None])
    tl.store(out_at, y, mask=(row < m)[:, None] & (n < n_rows)[None])


def matmul(x: Any, weight: TileMatrix, out: Any = None) -> Any:
    """x: fp32 or fp16 (m, K), contiguous; out: fp32 (m, n_rows), allocated where None. Returns out.

    Raises ValueError where they don't fit.
    """
    check_rows(x, weight)
    m = len(x)
    out = output(out, (m, weight.n_rows), x.device)
    if m:
        codes, code_scales = quantize(x)
        width = min(MAX_ROWS_AMD if instructions(codes) == GCN else MAX_ROWS, triton.next_power_of_2(m))
        matmul_kernel[(weight.n_blocks * -(-m // width),)](
            weight.words,
            weight.scales,
            weight.table,
            codes.view(torch.int32),
            code_scales,
            out,
            weight.quantized_factor,
            m,
            weight.n_rows,
            weight.n_groups,
            1,
            M=width,
            KIND=weight.kind,
            ISA=instructions(codes),
            num_warps=N_WARPS,
        )
    return out
