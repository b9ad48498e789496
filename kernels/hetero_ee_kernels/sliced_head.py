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
from hetero_ee_kernels.tile_group import MAGIC_BITS, SLOTS, dot4, entries, load_table, split4, sum_slots, to_float
from hetero_ee_kernels.tile_matrix import TileMatrix, check_rows, output

N_WARPS = 1  # a thread for each slot and candidate


@triton.jit
def add_quad(
    total: tl.tensor,
    w_at: tl.tensor,
    scales_at: tl.tensor,
    codes_at: tl.tensor,
    code_scales_at: tl.tensor,
    n_inside: tl.tensor,
    wanted: tl.tensor,
    table: tl.tensor,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> Any:
    """total (8, 4) plus the share of a quad for each slot and candidate: add_quads of matmul.py for one token.

    Groups from n_inside (8, 1) on add 0.
    """
    TILE: tl.constexpr = 128 if KIND == 2 else 64
    code_scales = split4(tl.load(code_scales_at))
    zero = tl.full(total.shape, MAGIC_BITS, tl.int32)
    sums = (zero, zero, zero, zero)
    for j in tl.static_range(4):
        x = split4(tl.load(codes_at + 8 * j))
        y = split4(tl.load(codes_at + 8 * j + 4))
        a, b = entries(w_at + 16 * j, (n_inside > 0) & wanted, table, KIND, ISA)
        c, d = entries(w_at + TILE + 16 * j, (n_inside > 1) & wanted, table, KIND, ISA)
        e, f = entries(w_at + 2 * TILE + 16 * j, (n_inside > 2) & wanted, table, KIND, ISA)
        g, h = entries(w_at + 3 * TILE + 16 * j, (n_inside > 3) & wanted, table, KIND, ISA)
        sums = (
            dot4(b, x[1], dot4(a, x[0], sums[0], ISA), ISA),
            dot4(d, x[3], dot4(c, x[2], sums[1], ISA), ISA),
            dot4(f, y[1], dot4(e, y[0], sums[2], ISA), ISA),
            dot4(h, y[3], dot4(g, y[2], sums[3], ISA), ISA),
        )
    for i in tl.static_range(4):
        scale = tl.load(scales_at + 16 * i, mask=(n_inside > i) & wanted, other=0.0).to(tl.float32)
        total = tl.fma(to_float(sums[i]), scale * code_scales[i], total)
    return total


@triton.jit(do_not_specialize=["n_candidates", "ids_stride", "n_rows", "n_groups", "one"])
def sliced_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    code_scales_ptr: tl.tensor,
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
    """codes: as words. one: 1, unknown to the compiler."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.program_id(1) * 4 + tl.arange(0, 4)
    wanted = (candidate < n_candidates)[None, :]
    token = tl.load(ids_ptr + row * ids_stride + candidate, mask=candidate < n_candidates, other=0)
    known = (token >= 0) & (token < n_rows)
    token = tl.where(known, token, 0)
    TILE: tl.constexpr = 128 if KIND == 2 else 64
    slot = tl.arange(0, SLOTS)[:, None]
    four = tl.arange(0, 4)[None, None, :]
    tile = (token // 16 * n_groups)[None, :] + 4 * slot
    n_quads = (n_groups + 4 * SLOTS - 1) // (4 * SLOTS) * SLOTS
    quad = (slot + (token * 0)[None, :])[:, :, None]
    table = load_table(table_ptr, slot * (one - 1) + (candidate * 0)[None, :], KIND)
    total = tl.zeros((SLOTS, 4), tl.float32)
    for first in range(0, n_groups, 4 * SLOTS):
        total = add_quad(
            total,
            words_ptr + ((tile + first) * TILE + (token % 16)[None, :]),
            scales_ptr + ((tile + first) * 16 + (token % 16)[None, :]),
            codes_ptr + (((row * n_quads + quad) * 4 + first) * 8 + four),
            code_scales_ptr + ((((row // 2 * n_quads + quad) * 4 + first) * 2 + row % 2 * 4) + four),
            n_groups - first - 4 * slot,
            wanted,
            table,
            KIND,
            ISA,
        )
    y = sum_slots(tl.trans(total)[None]) * factor
    y = tl.where(known[None, :], y, float("nan"))
    tl.store(out_ptr + (row * n_candidates + candidate)[None, :], y, mask=wanted)


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
            ISA=weight.isa,
            num_warps=N_WARPS,
            enable_fp_fusion=False,
        )
    return out
