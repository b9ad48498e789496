"""Attention of m new rows of any sequences against the pages.

out[r, h] = sum over p of softmax_p(q[r, h] k[p] / sqrt(d)) v[p],  p = max(0, position + 1 - window) .. position,
with k, v of the row's own sequence and of key head h // (n_heads / n_kv_heads); m rows, d = head_dim.

A program takes a row, a key head, up to 4 of its query heads (they share the loads) and 256 absolute positions. Its
lane i sees every position p = i modulo the number of lanes, with an online softmax (arXiv 1805.02867, 2205.14135) of
its own, so that no lane waits for another; lanes meet in a tree at the end, and a second launch adds up the parts of
256 in order of position. What lies where follows from absolute positions alone: a row's bits depend on its query,
position, window and the keys and values it sees, never on other rows, pages, slots or the longest context. Positions
outside the window are never loaded.
fp32 multiplies and sums, no tensor cores, which Turing could not use: at 4 query heads memory is the limit.

Layout: pages.py; queries (m, features) fp32, heads side by side from `first` on. Any d up to 256; any number of heads.
Slots and positions are read from device memory. Parts beyond a row's position cost a program that ends at once.
"""

from math import sqrt
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check
from hetero_ee_kernels.pages import (
    PAGE_TOKENS,
    PART_TOKENS,
    Pages,
    attention_workspace,
    check_rows,
    workspace_size,
)
from hetero_ee_kernels.tile_group import split4

MAX_GROUP = 4  # query heads a program: with 8, no register is left; the second program reads from the L2 cache
TILE = 4096  # heads x lanes x features of a step: 32 sums a thread; twice that leaves no registers (measured, 255)
MAX_HEAD_DIM = 256
N_WARPS, COMBINE_WARPS, N_STAGES = 4, 1, 1


@triton.jit
def dot_fours(x: tl.tensor, y: tl.tensor) -> Any:
    """(A, 1, 4 n), (1, B, 4 n) -> (A, B, n): sums of 4 products, three of them fused with their addition."""
    x0, x1, x2, x3 = split4(tl.reshape(x, (x.shape[0], 1, x.shape[2] // 4, 4)))
    y0, y1, y2, y3 = split4(tl.reshape(y, (1, y.shape[1], y.shape[2] // 4, 4)))
    return tl.fma(x3, y3, tl.fma(x2, y2, tl.fma(x1, y1, x0 * y0)))


@triton.jit(do_not_specialize=["layer"])
def attention_kernel(
    queries_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    states_ptr: tl.tensor,
    factor: tl.tensor,
    layer: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGES_A_SLOT: tl.constexpr,
    N_PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Writes, for each head of the program, sums (HEAD_DIM,) of weight x value, greatest score and sum of weights."""
    row, part = tl.program_id(0), tl.program_id(2)
    n_turns: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
    kv_head, turn = tl.program_id(1) // n_turns, tl.program_id(1) % n_turns
    position = tl.load(positions_ptr + row)
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else 0
    low, high = tl.maximum(first, part * PART), tl.minimum(position + 1, (part + 1) * PART)
    if low < high:
        head = turn * GROUP_BLOCK + tl.arange(0, GROUP_BLOCK)
        lane = tl.arange(0, LANES)
        feature = tl.arange(0, DIM_BLOCK)[None, None, :]
        is_feature, is_head = feature < HEAD_DIM, head < GROUP
        query_head = kv_head * GROUP + head
        query_at = queries_ptr + row.to(tl.int64) * FEATURES + FIRST + query_head[:, None, None] * HEAD_DIM + feature
        query = tl.load(query_at, mask=is_head[:, None, None] & is_feature, other=0.0) * factor
        best = tl.full((GROUP_BLOCK, LANES), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_BLOCK, LANES), tl.float32)
        sums = tl.zeros((GROUP_BLOCK, LANES, DIM_BLOCK), tl.float32)
        pages = table_ptr + tl.load(slots_ptr + row) * PAGES_A_SLOT
        for block in range(low // PAGE, (high + PAGE - 1) // PAGE):
            page = tl.load(pages + block).to(tl.int64)
            line = (((page * N_LAYERS + layer) * 2) * N_KV_HEADS + kv_head) * PAGE
            for step in tl.static_range(0, PAGE, LANES):
                at = block * PAGE + step + lane
                seen = (at >= low) & (at < high)
                lines = line + step + lane
                code = lines[None, :, None] * HEAD_DIM + feature
                loaded = seen[None, :, None] & is_feature
                key = tl.load(codes_ptr + code, mask=loaded, other=0.0).to(tl.float32)
                values = codes_ptr + N_KV_HEADS * PAGE * HEAD_DIM
                value = tl.load(values + code, mask=loaded, other=0.0).to(tl.float32)
                score = tl.sum(dot_fours(query, key), 2)
                if scales_ptr is not None:
                    score *= tl.load(scales_ptr + lines, mask=seen, other=0.0)[None, :]
                score = tl.where(seen[None, :], score, float("-inf"))
                higher = tl.maximum(best, score)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                correction, weight = tl.exp(best - base), tl.exp(score - base)
                total = tl.fma(total, correction, weight)
                if scales_ptr is not None:
                    weight *= tl.load(scales_ptr + N_KV_HEADS * PAGE + lines, mask=seen, other=0.0)[None, :]
                sums = tl.fma(weight[:, :, None], value, sums * correction[:, :, None])
                best = higher
        greatest = tl.max(best, 1)
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        share = tl.exp(best - base[:, None])
        entry = (row.to(tl.int64) * (N_KV_HEADS * GROUP) + query_head) * N_PARTS + part
        tl.store(states_ptr + 2 * entry, greatest, mask=is_head)
        tl.store(states_ptr + 2 * entry + 1, tl.sum(total * share, 1), mask=is_head)
        out = tl.sum(sums * share[:, :, None], 1)
        column = tl.arange(0, DIM_BLOCK)[None, :]
        at_out = sums_ptr + entry[:, None] * HEAD_DIM + column
        tl.store(at_out, out, mask=is_head[:, None] & (column < HEAD_DIM))


@triton.jit
def combine_kernel(
    sums_ptr: tl.tensor,
    states_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    N_PARTS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """One row and head: its parts in order of position."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else 0
    feature = tl.arange(0, DIM_BLOCK)
    inside = feature < HEAD_DIM
    entry = row.to(tl.int64) * N_HEADS + head
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    sums = tl.zeros((DIM_BLOCK,), tl.float32)
    for part in range(first // PART, position // PART + 1):
        score = tl.load(states_ptr + 2 * (entry * N_PARTS + part))
        weights = tl.load(states_ptr + 2 * (entry * N_PARTS + part) + 1)
        more = tl.load(sums_ptr + (entry * N_PARTS + part) * HEAD_DIM + feature, mask=inside, other=0.0)
        higher = tl.maximum(best, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        correction, share = tl.exp(best - base), tl.exp(score - base)
        total = tl.fma(weights, share, total * correction)
        sums = tl.fma(more, share, sums * correction)
        best = higher
    tl.store(out_ptr + entry * HEAD_DIM + feature, sums / total, mask=inside)


def attention(
    queries: Any,
    pages: Pages,
    slots: Any,
    positions: Any,
    layer: int,
    window: int | None,
    out: Any,
    *,
    first: int = 0,
    workspace: Any = None,
) -> Any:
    """queries: fp32 (m, features), the heads from feature `first` on; slots, positions: int32 (m,); window: positions
    seen, the row's own included, None for all; out: fp32 or fp16 (m, n_heads x head_dim). Returns out.

    workspace: attention_workspace's for at least m rows, allocated where None. Each row's own key and value must be
    written already. Raises ValueError for other shapes, dtypes or layouts.
    """
    check_rows(queries, pages, slots, positions, layer)
    m, head_dim = queries.shape[0], pages.head_dim
    n_heads = out.shape[1] // head_dim
    group = n_heads // pages.n_kv_heads
    check("out", out, (m, group * pages.n_kv_heads * head_dim), torch.float32, torch.float16)
    if not 1 <= head_dim <= MAX_HEAD_DIM or group < 1:
        raise ValueError(f"out {tuple(out.shape)} doesn't hold {pages.n_kv_heads} x n heads of {head_dim}.")
    if first < 0 or first + out.shape[1] > queries.shape[1] or (window is not None and window < 1):
        raise ValueError(f"queries {tuple(queries.shape)}, {out.shape[1]} features from {first} on, window {window}.")
    if m == 0:
        return out
    workspace = attention_workspace(pages, m, n_heads) if workspace is None else workspace
    parts = pages.n_parts
    n_entries = m * n_heads * parts
    check("workspace", workspace, (workspace.numel(),))
    if workspace.numel() < workspace_size(n_entries, head_dim):
        raise ValueError(f"the workspace has {workspace.numel()} numbers of {workspace_size(n_entries, head_dim)}.")
    states, sums = workspace, workspace[workspace_size(n_entries, 0) :]
    common = {"WINDOW": window or 0, "N_PARTS": parts, "PART": PART_TOKENS}
    sizes = _sizes(group, head_dim) | common | {"N_LAYERS": pages.n_layers, "PAGE": PAGE_TOKENS}
    sizes |= {"N_KV_HEADS": pages.n_kv_heads, "FEATURES": queries.shape[1], "FIRST": first}
    grid = (m, pages.n_kv_heads * triton.cdiv(group, sizes["GROUP_BLOCK"]), parts)
    attention_kernel[grid](
        queries, pages.codes, pages.scales, pages.table, slots, positions, sums, states, 1 / sqrt(head_dim), layer,
        **sizes, PAGES_A_SLOT=pages.pages_a_slot, num_warps=N_WARPS, num_stages=N_STAGES, **UNFUSED,
    )  # fmt: skip
    shape = {"N_HEADS": n_heads, "HEAD_DIM": head_dim, "DIM_BLOCK": sizes["DIM_BLOCK"]}
    combine_kernel[(m, n_heads)](
        sums, states, positions, out, **shape, **common, num_warps=COMBINE_WARPS, num_stages=N_STAGES, **UNFUSED
    )
    return out


def _sizes(group: int, head_dim: int) -> dict[str, int]:
    """How a program's step of heads x lanes x features is cut: by the model's shape alone."""
    dim_block = max(4, triton.next_power_of_2(head_dim))
    group_block = min(MAX_GROUP, triton.next_power_of_2(group))
    lanes = max(1, min(PAGE_TOKENS, TILE // (group_block * dim_block)))
    return {"GROUP": group, "GROUP_BLOCK": group_block, "HEAD_DIM": head_dim, "DIM_BLOCK": dim_block, "LANES": lanes}
