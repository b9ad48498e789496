"""y[m, N] = 2^e x[m, K] W^T for few rows, W in int4 or int8 tiles, x as it is: the exact-activation form of `matmul`.

A program's shape, its order of sums and so the rule that row t's bits do not depend on m are those of matmul.py;
within a group each column is one fma in fp32 (tile_group.py). Source: derived.

Instructions of the loop for a byte of tiles and scales, as matmul.py counts them: linear 6.6 at 1 row, 14 at 4, 24 at
8; codebook 9.7, 17, 27; int8 tiles 3.7, 7.4, 13. Beyond a few rows they take longer than the memory: where speed
counts, quantized activations (matmul.py) or, from 16 rows on, tensor cores (prefill_matmul.py).
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.compilation import Compilation
from hetero_ee_kernels.tile_group import N_WARPS, SLOTS, add_bytes, add_codes, join4, load_table, split4, sum_slots
from hetero_ee_kernels.tile_kinds import BYTES, CODEBOOK, GCN, LINEAR, PTX
from hetero_ee_kernels.tile_matrix import TileMatrix, check_rows, instructions, output, whole_groups

MAX_ROWS = 8  # a program; 16 would need more registers than there are
MAX_ROWS_AMD = 4  # likewise


@triton.jit
def add_float_groups(
    totals: tl.tensor,
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_ptr: tl.tensor,
    row_place: tl.tensor,
    n_inside: tl.tensor,
    table: tl.tensor,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    ISA: tl.constexpr,
) -> Any:
    """totals, 4 x (M, 32, 4), one for each row of a quad, plus the share of the 32 groups that the pointers begin with.

    row_place: (M,), where the rows of x begin, in groups. Where MASKED, groups from n_inside on add 0.
    """
    slot, quad, four = tl.arange(0, SLOTS), tl.arange(0, 4), tl.arange(0, 4)
    inside = slot < n_inside
    mask = inside[:, None, None] if MASKED else None
    x_mask = inside[None, :, None, None] if MASKED else None
    other = 0.0 if MASKED else None
    LINES: tl.constexpr = 8 if KIND == 2 else 4
    within = (4 * quad[:, None] + four[None, :])[None]
    w_at = words_ptr + ((slot * (16 * LINES))[:, None, None] + within)
    place = (row_place[:, None] + slot[None, :]) * 32
    x_at = x_ptr + (place[:, :, None, None] + (quad * 0)[None, None, :, None] + four[None, None, None, :])
    scales = split4(tl.load(scales_ptr + ((slot * 16)[:, None, None] + within), mask=mask, other=other).to(tl.float32))
    part0 = tl.zeros(totals[0].shape, tl.float32)
    part1, part2, part3 = part0, part0, part0
    for line in tl.static_range(LINES):
        words = split4(tl.load(w_at + 16 * line, mask=mask))
        x = split4(tl.load(x_at + 4 * line, mask=x_mask, other=other).to(tl.float32))
        if KIND == 2:
            part0 = add_bytes(part0, words[0][None], x, ISA)
            part1 = add_bytes(part1, words[1][None], x, ISA)
            part2 = add_bytes(part2, words[2][None], x, ISA)
            part3 = add_bytes(part3, words[3][None], x, ISA)
        else:
            y = split4(tl.load(x_at + (16 + 4 * line), mask=x_mask, other=other).to(tl.float32))
            part0 = add_codes(part0, words[0][None], x, y, table, KIND, ISA)
            part1 = add_codes(part1, words[1][None], x, y, table, KIND, ISA)
            part2 = add_codes(part2, words[2][None], x, y, table, KIND, ISA)
            part3 = add_codes(part3, words[3][None], x, y, table, KIND, ISA)
    return (
        tl.fma(part0, scales[0][None], totals[0]),
        tl.fma(part1, scales[1][None], totals[1]),
        tl.fma(part2, scales[2][None], totals[2]),
        tl.fma(part3, scales[3][None], totals[3]),
    )


@triton.jit(do_not_specialize=["m", "n_rows", "n_groups", "zero"])
def float_matmul_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    m: tl.tensor,
    n_rows: tl.tensor,
    n_groups: tl.tensor,
    zero: tl.tensor,
    M: tl.constexpr,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """zero: 0, unknown to the compiler; see load_table."""
    n_parts = (m + M - 1) // M
    block = tl.program_id(0) // n_parts
    first_row = tl.program_id(0) % n_parts * M
    local = tl.arange(0, M)
    row_place = tl.minimum(local, m - 1 - first_row) * n_groups
    LINES: tl.constexpr = 8 if KIND == 2 else 4
    first_tile = block.to(tl.int64) * n_groups
    words_ptr += first_tile * (16 * LINES)
    scales_ptr += first_tile * 16
    x_ptr += first_row.to(tl.int64) * n_groups * 32
    table = load_table(table_ptr, zero, KIND)
    zeros = tl.zeros((M, SLOTS, 4), tl.float32)
    totals = (zeros, zeros, zeros, zeros)
    for _ in range(n_groups // SLOTS):
        totals = add_float_groups(totals, words_ptr, scales_ptr, x_ptr, row_place, SLOTS, table, KIND, False, ISA)
        words_ptr += SLOTS * 16 * LINES
        scales_ptr += SLOTS * 16
        x_ptr += SLOTS * 32
    rest = n_groups % SLOTS
    if rest != 0:
        totals = add_float_groups(totals, words_ptr, scales_ptr, x_ptr, row_place, rest, table, KIND, True, ISA)
    y = sum_slots(tl.reshape(join4(totals), (M, SLOTS, 16))) * factor
    n = block * 16 + tl.arange(0, 16)
    row = first_row + local
    out_at = out_ptr + (row.to(tl.int64)[:, None] * n_rows + n[None])
    tl.store(out_at, y, mask=(row < m)[:, None] & (n < n_rows)[None])


def float_matmul(x: Any, weight: TileMatrix, out: Any = None) -> Any:
    """x: fp16 or fp32 (m, K), contiguous; out: fp32 (m, n_rows), allocated where None. Returns out.

    Raises ValueError where they don't fit. A K that is no multiple of 32 costs a copy of x.
    """
    check_rows(x, weight)
    m = len(x)
    out = output(out, (m, weight.n_rows), x.device)
    x = whole_groups(x)
    if m:
        width = min(MAX_ROWS_AMD if instructions(x) == GCN else MAX_ROWS, triton.next_power_of_2(m))
        float_matmul_kernel[(weight.n_blocks * -(-m // width),)](
            weight.words,
            weight.scales,
            weight.table,
            x,
            out,
            weight.factor,
            m,
            weight.n_rows,
            weight.n_groups,
            0,
            M=width,
            KIND=weight.kind,
            ISA=instructions(x),
            num_warps=N_WARPS,
        )
    return out


def compilations() -> list[Compilation]:
    """Every kind of tile at the fewest and the most rows a program takes."""
    signature = {"words_ptr": "*i32", "scales_ptr": "*fp16", "table_ptr": "*i32", "x_ptr": "*fp16", "out_ptr": "*fp32"}
    signature |= {"factor": "fp32"} | dict.fromkeys(("m", "n_rows", "n_groups", "zero"), "i32")
    return [
        Compilation(
            f"float_matmul_{name}_{n_rows}{'' if isa == PTX else '_amd'}",
            float_matmul_kernel,
            signature,
            {"M": n_rows, "KIND": kind, "ISA": isa},
            N_WARPS,
            1,
            is_memory_bound=True,
            runs_on_hip=isa == GCN,
            runs_on_cuda=isa == PTX,
        )
        for kind, name in ((LINEAR, "linear"), (CODEBOOK, "codebook"), (BYTES, "int8"))
        for n_rows, isa in ((1, PTX), (MAX_ROWS, PTX), (MAX_ROWS_AMD, GCN))
    ]
