"""Logits of a few candidate tokens: out[t, c] = 2^e x[t] . W[id], id = ids[t, c], or ids[c] if all rows share them.

Arithmetic and order are those of matmul.py, step by step, so the bits are those of the whole product. A tile's line of
64 bytes holds 4 columns of 16 rows, and memory is read 32 bytes at a time: a row costs the bandwidth of 8. An id
without a row gives NaN, because the CPU never sees the ids.
A program computes 4 candidates of one row of x: a head has few candidates (arXiv 2504.08850).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, output
from hetero_ee_kernels.quantize import quantize
from hetero_ee_kernels.tile_group import (
    MAGIC_BITS,
    SLOTS,
    dot4,
    entries,
    load_table,
    load_words,
    split4,
    sum_slots,
    to_float,
)
from hetero_ee_kernels.tile_matrix import TileMatrix, check_rows, check_vocabulary

N_WARPS = 4  # one thread per slot, candidate and group of a quad


@triton.jit
def add_quad(
    total: tl.tensor,
    w_at: tl.tensor,
    scales_at: tl.tensor,
    codes_at: tl.tensor,
    code_scales_at: tl.tensor,
    inside: tl.tensor,
    table: tl.tensor,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> Any:
    """Add a quad's products to total (8, 4), for each slot and candidate, by the steps of add_quads in matmul.py.

    All other tensors are (8, 4, 4), with the quad's groups in the last axis. Groups outside `inside` add 0.
    """
    sums = tl.full(inside.shape, MAGIC_BITS, tl.int32)
    for j in tl.static_range(4):
        low, high = entries(load_words(w_at + 16 * j, j, inside, KIND), j, table, KIND, ISA)
        sums = dot4(low, tl.load(codes_at + 4 * j), dot4(high, tl.load(codes_at + 4 * j + 1), sums, ISA), ISA)
    scale = tl.load(scales_at, mask=inside, other=0.0).to(tl.float32)
    numbers, scales = split4(to_float(sums)), split4(scale * tl.load(code_scales_at))
    for i in tl.static_range(4):
        total = tl.fma(numbers[i], scales[i], total)
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
    TERMS: tl.constexpr,
    KIND: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """Compute 4 candidates of one row. ids: int64, with ids_stride 0 if shared; other arguments: see matmul_kernel."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.program_id(1) * 4 + tl.arange(0, 4)
    wanted = (candidate < n_candidates)[None, :]
    token = tl.load(ids_ptr + row * ids_stride + candidate, mask=candidate < n_candidates, other=0)
    known = (token >= 0) & (token < n_rows)
    token = tl.where(known, token, 0)
    TILE: tl.constexpr = 128 if KIND == 2 else 64
    slot = tl.arange(0, SLOTS)[:, None, None]
    group = 4 * slot + tl.arange(0, 4)[None, None, :]
    tile = (token // 16 * n_groups)[None, :, None] + group
    within = (token % 16)[None, :, None]
    n_quads = (n_groups + 4 * SLOTS - 1) // (4 * SLOTS) * SLOTS
    table = load_table(table_ptr, (group + within) * (one - 1), KIND)
    y = tl.zeros((1, 4), tl.float32)
    for term in tl.static_range(TERMS):
        place = row * TERMS + term
        codes_at = codes_ptr + (place * n_quads + slot) * 32 + (group % 4 // 2 * 16 + group % 2 * 2 + within * 0)
        code_scales_at = code_scales_ptr + (place // 2 * n_quads + slot) * 8
        code_scales_at += place % 2 * 4 + group % 4 + within * 0
        total = tl.zeros((SLOTS, 4), tl.float32)
        for first in range(0, n_groups, 4 * SLOTS):
            total = add_quad(
                total,
                words_ptr + ((tile + first) * TILE + within),
                scales_ptr + ((tile + first) * 16 + within),
                codes_at + first * 8,
                code_scales_at + first * 2,
                (first + group < n_groups) & wanted[:, :, None],
                table,
                KIND,
                ISA,
            )
        total = sum_slots(tl.trans(total)[None])
        y = total if term == 0 else y + total
    y = tl.where(known[None, :], y * factor, float("nan"))
    tl.store(out_ptr + (row * n_candidates + candidate)[None, :], y, mask=wanted)


def sliced_head(x: Any, weight: TileMatrix, ids: Any, out: Any = None) -> Any:
    """Compute the logits of candidates, with the same bits as in matmul(x, weight), and return out.

    Args:
        x: fp32 or fp16 (m, K).
        ids: int64 (c,) for all rows, or (m, c).
        out: fp32 (m, c), allocated if None.

    Raises:
        ValueError: if an operand does not fit.
    """
    check_rows(x, weight)
    check_vocabulary(weight)
    m = len(x)
    fits = ids.dim() == 1 or (ids.dim() == 2 and len(ids) == m)
    if not fits or ids.dtype != torch.int64 or not ids.is_contiguous() or ids.device != x.device:
        raise ValueError(f"Ids are {ids.dtype} {tuple(ids.shape)}, expected contiguous torch.int64 (c,) or ({m}, c).")
    n_candidates = ids.shape[-1]
    out = output(out, x, (m, n_candidates))
    if m and n_candidates:
        codes, code_scales = quantize(x, weight.n_terms)
        operands = weight.words, weight.scales, weight.table, codes.view(torch.int32), code_scales, ids, out
        sizes = n_candidates, n_candidates if ids.dim() == 2 else 0, weight.n_rows, weight.n_groups, 1
        constants = {"TERMS": weight.n_terms, "KIND": weight.kind, "ISA": weight.isa}
        grid = (m, -(-n_candidates // 4))
        sliced_kernel[grid](*operands, weight.quantized_factor, *sizes, **constants, num_warps=N_WARPS, **UNFUSED)
    return out
