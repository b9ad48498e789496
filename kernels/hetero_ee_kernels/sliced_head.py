"""Logits of a few candidate tokens: out[t, c] = 2^e x[t] . W[id], id = ids[t, c] or, where all rows share them, ids[c].

The arithmetic and its order are those of matmul.py, step for step, so the bits are those of the whole product. A tile's
line of 64 bytes holds 4 columns of 16 rows and memory is read 32 bytes at a time: a row costs the memory's time of 8.
An id that has no row gives NaN: the CPU never sees the ids.
A program takes 4 candidates of one row of x: a head's candidates are few (arXiv 2504.08850).
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
    load_table,
    split4,
    sum_slots,
    to_float,
)
from hetero_ee_kernels.tile_matrix import (
    TileMatrix,
    check_rows,
    instructions,
    output,
)


@triton.jit
def add_share(
    total: tl.tensor,
    w_at: tl.tensor,
    scale: tl.tensor,
    x_at: tl.tensor,
    x_scales_at: tl.tensor,
    inside: tl.tensor,
    table: tl.tensor,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> Any:
    """total (32, 4) plus the share of 32 groups of 4 candidates: add_groups of matmul.py for one row of x."""
    x_scale = tl.load(x_scales_at, mask=inside, other=0.0)
    mask4 = inside[:, :, None]
    low, high = split4(tl.load(x_at, mask=mask4)), split4(tl.load(x_at + 4, mask=mask4))
    sums = tl.full(total.shape, MAGIC_BITS, tl.int32)
    for line in tl.static_range(8 if KIND == 2 else 4):
        words = tl.load(w_at + 16 * line, mask=inside)
        if KIND == 2:
            sums = dot4(words, low[line] if line < 4 else high[line - 4], sums, ISA)
        else:
            a, b = entry_words(words, table, KIND, ISA)
            sums = dot4(b, high[line], dot4(a, low[line], sums, ISA), ISA)
    return tl.fma(to_float(sums), scale * x_scale, total)


@triton.jit(do_not_specialize=["n_candidates", "ids_stride", "n_rows", "n_groups", "one"])
def sliced_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factor: tl.tensor,
    n_candidates: tl.tensor,
    ids_stride: tl.tensor,
    n_rows: tl.tensor,
    n_groups: tl.tensor,
    one: tl.tensor,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """x: int8 codes as words. one: 1, unknown to the compiler; see matmul_kernel."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.program_id(1) * 4 + tl.arange(0, 4)
    wanted = candidate < n_candidates
    token = tl.load(ids_ptr + row * ids_stride + candidate, mask=wanted, other=0)
    known = (token >= 0) & (token < n_rows)
    token = tl.where(known, token, 0)
    LINES: tl.constexpr = 8 if KIND == 2 else 4
    slot, four = tl.arange(0, SLOTS), tl.arange(0, 4)
    tile = (token // 16 * n_groups)[None, :] + slot[:, None]
    group = row * n_groups + slot[:, None] * one + (four * 0)[None, :]
    table = load_table(table_ptr, one - 1, KIND)
    total = tl.zeros((SLOTS, 4), tl.float32)
    for first in range(0, n_groups, SLOTS):
        inside = (first + slot < n_groups)[:, None] & wanted[None, :]
        w_at = words_ptr + ((tile + first) * (16 * LINES) + (token % 16)[None, :])
        scales_at = scales_ptr + ((tile + first) * 16 + (token % 16)[None, :])
        scale = tl.load(scales_at, mask=inside, other=0.0).to(tl.float32)
        x_at = x_ptr + (((group + first) * 8)[:, :, None] + four[None, None, :])
        total = add_share(total, w_at, scale, x_at, x_scales_ptr + (group + first), inside, table, KIND, ISA)
    y = sum_slots(total[None]) * factor
    y = tl.where(known[None, :], y, float("nan"))
    tl.store(out_ptr + (row * n_candidates + candidate)[None, :], y, mask=wanted[None, :])


def sliced_head(x: Any, weight: TileMatrix, ids: Any, out: Any = None) -> Any:
    """x: fp32 or fp16 (m, K); ids: int64 (c,) for all rows or (m, c), each row its own; out: fp32 (m, c). Returns out.

    The bits of matmul(x, weight) at those columns. Raises ValueError where the shapes don't fit.
    """
    check_rows(x, weight)
    m = len(x)
    fits = ids.dim() == 1 or (ids.dim() == 2 and len(ids) == m)
    if not fits or ids.dtype != torch.int64 or not ids.is_contiguous() or ids.device != x.device:
        raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}, expected contiguous torch.int64 (c,) or ({m}, c).")
    n_candidates = ids.shape[-1]
    out = output(out, (m, n_candidates), x.device)
    if m and n_candidates:
        codes, code_scales = quantize(x)
        sliced_kernel[(m, -(-n_candidates // 4))](
            weight.words,
            weight.scales,
            weight.table,
            codes.view(torch.int32),
            code_scales,
            ids,
            out,
            weight.quantized_factor,
            n_candidates,
            n_candidates if ids.dim() == 2 else 0,
            weight.n_rows,
            weight.n_groups,
            1,
            KIND=weight.kind,
            ISA=instructions(x),
            num_warps=N_WARPS,
        )
    return out
