"""Attention of m new rows, of any mixture of sequences, against the KV pages.

out[r, h] = sum over p of softmax_p(score[p]) v[p],  p = max(0, position + 1 - window) .. position,
score[p] = scale q[r, h] k[p], or for models that cap it (arXiv 2408.00118) cap tanh(scale q[r, h] k[p] / cap),
with k, v of the row's own sequence and of key head h // (n_heads / n_kv_heads); m rows, d = head_dim. A model may have
a sink per head (gpt-oss): one more score in the softmax, for no value, with which the sums begin.

A program computes 4 queries (a query is one query head of one row): 4 query heads of a key head, or for smaller groups
those of 2 or 4 rows of a sequence. They share the loads. The program goes through 256 absolute positions at a time, a
part. Lane i sees every position p = i modulo the number of lanes, with an online softmax (arXiv 1805.02867, 2205.14135)
of its own, so no lane waits for another. Lanes are combined in a tree at the end of a part, parts in order of position.
For few rows each part has its own program, and a second launch combines the parts; for many, as in a prompt, one
program does both and needs no workspace. The order of all sums follows from absolute positions: a row's bits depend
only on its query, its position, the window and the keys and values it sees, never on other rows, pages, slots, the
longest context or the number of launches. Pages outside the rows' windows are never loaded.
A single token pays for the queries that stay empty: 34 instructions per thread and position (PTX for sm_86, fp16, heads
of 128, counted); 4 of a sequence need those 34 together. Two positions per lane at a time share one correction of the
sums by the new maximum; four would need 143 registers instead of 120. 8 queries would need 226 to 255 registers, which
halves the programs that run at once, and spill up to 120 bytes for prompts (compiled, Triton 3.9).
fp32 multiplies and sums. Tensor cores would need fp16 queries and weights in two halves each, to be accurate, and for a
single row, too, to have the same bits. Turing and fp32 caches could not use them, and registers would spill (compiled,
Triton 3.9: 120 bytes on sm_86 for heads of 128).

Layout: pages.py; queries (m, features) fp32, heads side by side from feature `first`. Any d up to 512; any number of
heads. Slots and positions are read from device memory. Programs of parts beyond a row's position end at once, as do
those of rows that another row's program computes.
"""

from math import sqrt
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.activate import activated
from hetero_ee_kernels.checks import UNFUSED, check
from hetero_ee_kernels.pages import (
    FEW_ROWS,
    PAGE_TOKENS,
    PART_TOKENS,
    Pages,
    attention_workspace,
    check_rows,
    workspace_size,
)
from hetero_ee_kernels.tile_group import nothing, split4

QUERIES = 4  # per program: query heads of a key head, times rows; later programs read the same keys from the L2 cache
TILE = 4096  # queries x lanes x features of a step: 32 sums per thread; twice that needs 255 registers (measured)
TURNS = 2  # positions of a lane per step
MAX_HEAD_DIM = 512
N_WARPS, COMBINE_WARPS, N_STAGES = 4, 1, 1
LATEST = tl.constexpr(2**31 - 1)  # later than any position


@triton.jit
def dot_fours(x: tl.tensor, y: tl.tensor) -> Any:
    """Return sums of 4 products each, three of them fused: (A, 1, 4 n) x (1, B, 4 n) -> (A, B, n)."""
    x0, x1, x2, x3 = split4(tl.reshape(x, (x.shape[0], 1, x.shape[2] // 4, 4)))
    y0, y1, y2, y3 = split4(tl.reshape(y, (1, y.shape[1], y.shape[2] // 4, 4)))
    return tl.fma(x3, y3, tl.fma(x2, y2, tl.fma(x1, y1, x0 * y0)))


@triton.jit
def add_part(best: tl.tensor, total: tl.tensor, sums: tl.tensor, part: tl.tensor) -> Any:
    """Combine one part with the running maximum (queries,), sum of weights (queries,) and sums (queries, features)."""
    higher = tl.maximum(best, part[0])
    base = tl.where(higher == float("-inf"), 0.0, higher)
    correction, share = tl.exp(best - base), tl.exp(part[0] - base)
    total = tl.fma(part[1], share, total * correction)
    return higher, total, tl.fma(part[2], share[:, None], sums * correction[:, None])


@triton.jit(do_not_specialize=["layer", "m"])
def attention_kernel(
    queries_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    states_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    layer: tl.tensor,
    m: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    PAGES_PER_SLOT: tl.constexpr,
    N_PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Attention of up to GROUP_BLOCK query heads of a key head for up to ROWS rows of one sequence.

    The grid is (m, n_kv_heads * ceil(GROUP / GROUP_BLOCK), parts). The first row of a group of ROWS computes the group.

    Args:
        queries_ptr: fp32 (m, FEATURES), the query heads from feature FIRST.
        codes_ptr, scales_ptr, table_ptr: the fields of Pages. slots_ptr, positions_ptr: int32 (m,).
        out_ptr: attention (m, N_HEADS, HEAD_DIM), or with states_ptr each part's sums (m, N_HEADS, N_PARTS, HEAD_DIM).
        states_ptr: None, or fp32 (m, N_HEADS, N_PARTS, 2) for each part's greatest score and sum of weights.
        sinks_ptr: fp32 (N_HEADS,), or None.
        factor, cap, WINDOW: scale of the scores; their limit if IS_CAPPED; positions that a row sees, 0 for all.
        GROUP, GROUP_BLOCK, ROWS: query heads per key head; query heads and rows per program.
        DIM_BLOCK, LANES, STEP, PART: HEAD_DIM rounded up to a power of two; lanes; positions per step and per part.
    """
    first_row = tl.program_id(0)
    slot = tl.load(slots_ptr + first_row)
    query_number = tl.arange(0, GROUP_BLOCK * ROWS)
    row = first_row // ROWS * ROWS + query_number // GROUP_BLOCK
    inside = row < m
    inside = inside & (tl.load(slots_ptr + row, mask=inside, other=-1) == slot)
    if tl.min(tl.where(inside, row, LATEST), 0) == first_row:
        n_head_blocks: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
        N_HEADS: tl.constexpr = N_KV_HEADS * GROUP
        kv_head, head_block = tl.program_id(1) // n_head_blocks, tl.program_id(1) % n_head_blocks
        head = head_block * GROUP_BLOCK + query_number % GROUP_BLOCK
        position = tl.load(positions_ptr + row, mask=inside, other=0)
        first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else position * 0
        lowest, highest = tl.min(tl.where(inside, first, LATEST), 0), tl.max(position, 0) + 1
        is_query = inside & (head < GROUP)
        query_head = kv_head * GROUP + head
        lane, feature = tl.arange(0, LANES), tl.arange(0, DIM_BLOCK)
        features, is_feature = feature[None, None, :], feature < HEAD_DIM
        query_at = queries_ptr + row.to(tl.int64) * FEATURES + FIRST + query_head * HEAD_DIM
        mask = is_query[:, None, None] & (features < HEAD_DIM)
        query = tl.load(query_at[:, None, None] + features, mask=mask, other=0.0) * factor
        whole = tl.full((GROUP_BLOCK * ROWS,), float("-inf"), tl.float32)
        whole_total = tl.zeros((GROUP_BLOCK * ROWS,), tl.float32)
        if sinks_ptr is not None:
            whole, whole_total = tl.load(sinks_ptr + query_head, mask=is_query, other=0.0), whole_total + 1.0
        whole_sums = tl.zeros((GROUP_BLOCK * ROWS, DIM_BLOCK), tl.float32)
        first_part, end_part = lowest // PART, (highest + PART - 1) // PART
        if states_ptr is not None:
            first_part = tl.maximum(first_part, tl.program_id(2))
            end_part = tl.minimum(end_part, tl.program_id(2) + 1)
        VALUES: tl.constexpr = N_KV_HEADS * PAGE  # vectors from a page's keys to its values
        pages = table_ptr + slot * PAGES_PER_SLOT
        for part in range(first_part, end_part):
            low, high = tl.maximum(lowest, part * PART), tl.minimum(highest, (part + 1) * PART)
            best = tl.full((GROUP_BLOCK * ROWS, LANES), float("-inf"), tl.float32)
            total = tl.zeros((GROUP_BLOCK * ROWS, LANES), tl.float32)
            sums = tl.zeros((GROUP_BLOCK * ROWS, LANES, DIM_BLOCK), tl.float32)
            for step in range(low // STEP, (high + STEP - 1) // STEP):
                page = tl.load(pages + step * STEP // PAGE).to(tl.int64)
                first_vector = (((page * N_LAYERS + layer) * 2) * N_KV_HEADS + kv_head) * PAGE
                higher, turns = best, nothing()
                for turn in tl.static_range(STEP // LANES):
                    at = step * STEP + turn * LANES + lane
                    vectors = first_vector + at % PAGE
                    code = vectors[None, :, None] * HEAD_DIM + features
                    is_seen = (at >= low) & (at < high)
                    loaded = is_seen[None, :, None] & (features < HEAD_DIM)
                    key = tl.load(codes_ptr + code, mask=loaded, other=0.0).to(tl.float32)
                    value = tl.load(codes_ptr + VALUES * HEAD_DIM + code, mask=loaded, other=0.0)
                    seen, value_scale = is_seen[None, :], 0.0
                    if ROWS > 1:
                        seen = (at[None, :] >= first[:, None]) & (at[None, :] <= position[:, None])
                    score = tl.sum(dot_fours(query, key), 2)
                    if scales_ptr is not None:
                        score *= tl.load(scales_ptr + vectors, mask=is_seen, other=0.0)[None, :]
                        value_scale = tl.load(scales_ptr + VALUES + vectors, mask=is_seen, other=0.0)[None, :]
                    if IS_CAPPED:
                        score = activated(score, cap, "softcap")
                    score = tl.where(seen, score, float("-inf"))
                    higher = tl.maximum(higher, score)
                    turns += ((score, seen, value, value_scale),)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                correction, best = tl.exp(best - base), higher
                total, sums = total * correction, sums * correction[:, :, None]
                for turn in tl.static_range(STEP // LANES):
                    score, seen, value, value_scale = turns[turn]
                    weight, value = tl.exp(score - base), value.to(tl.float32)
                    total += weight
                    if scales_ptr is not None:
                        weight = tl.where(seen, weight * value_scale, 0.0)
                    elif ROWS > 1:  # a value that only other rows see may be infinite, and 0 x inf is NaN
                        value = tl.where(seen[:, :, None], value, 0.0)
                    sums = tl.fma(weight[:, :, None], value, sums)
            greatest = tl.max(best, 1)
            base = tl.where(greatest == float("-inf"), 0.0, greatest)
            share = tl.exp(best - base[:, None])
            found = greatest, tl.sum(total * share, 1), tl.sum(sums * share[:, :, None], 1)
            if states_ptr is not None:
                entry = (row.to(tl.int64) * N_HEADS + query_head) * N_PARTS + part
                tl.store(states_ptr + 2 * entry, found[0], mask=is_query)
                tl.store(states_ptr + 2 * entry + 1, found[1], mask=is_query)
                at_out = out_ptr + entry[:, None] * HEAD_DIM + feature[None, :]
                tl.store(at_out, found[2], mask=is_query[:, None] & is_feature[None, :])
            else:
                whole, whole_total, whole_sums = add_part(whole, whole_total, whole_sums, found)
        if states_ptr is None:
            entry = row.to(tl.int64) * N_HEADS + query_head
            at_out = out_ptr + entry[:, None] * HEAD_DIM + feature[None, :]
            tl.store(at_out, whole_sums / whole_total[:, None], mask=is_query[:, None] & is_feature[None, :])


@triton.jit
def combine_kernel(
    sums_ptr: tl.tensor,
    states_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    N_PARTS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Combine the parts of one row and head in order of position. Arguments: see attention_kernel."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else 0
    zero, feature = tl.arange(0, 1), tl.arange(0, DIM_BLOCK)[None, :]
    inside = feature < HEAD_DIM
    entry = row.to(tl.int64) * N_HEADS + head + zero
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if sinks_ptr is not None:
        best, total = tl.load(sinks_ptr + head + zero), total + 1.0
    sums = tl.zeros((1, DIM_BLOCK), tl.float32)
    for part in range(first // PART, position // PART + 1):
        at = entry * N_PARTS + part
        more = tl.load(sums_ptr + at[:, None] * HEAD_DIM + feature, mask=inside, other=0.0)
        found = tl.load(states_ptr + 2 * at), tl.load(states_ptr + 2 * at + 1), more
        best, total, sums = add_part(best, total, sums, found)
    tl.store(out_ptr + entry[:, None] * HEAD_DIM + feature, sums / total[:, None], mask=inside)


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
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Any = None,
) -> Any:
    """Compute attention of m rows whose keys and values are in the cache already; return out.

    Args:
        queries: fp32 (m, features), the heads side by side from feature `first`.
        slots, positions: int32 (m,).
        window: number of positions that a row sees, including its own; None for all.
        out: fp32 or fp16 (m, n_heads * head_dim).
        workspace: attention_workspace(...) for at least m rows, allocated if None. More than FEW_ROWS rows need none.
        scale: factor of the scores, 1 / sqrt(head_dim) if None.
        cap: limit of the scores, 0 for none.
        sinks: fp32 (n_heads,), None for none.

    Raises:
        ValueError: if a shape, dtype or layout does not fit, or the layer does not exist.
    """
    check_rows(queries, pages, slots, positions, layer)
    m, head_dim, group = queries.shape[0], pages.head_dim, _query_group(queries, pages, window, out, first)
    n_heads = group * pages.n_kv_heads
    if sinks is not None:
        check("sinks", sinks, (n_heads,))
    if m == 0:
        return out
    sizes = _sizes(group, head_dim) | {"N_LAYERS": pages.n_layers, "PAGE": PAGE_TOKENS, "N_KV_HEADS": pages.n_kv_heads}
    sizes |= {"FEATURES": queries.shape[1], "FIRST": first, "PAGES_PER_SLOT": pages.pages_per_slot}
    common = {"WINDOW": window or 0, "N_PARTS": pages.n_parts, "PART": PART_TOKENS}
    grid = (m, pages.n_kv_heads * triton.cdiv(group, sizes["GROUP_BLOCK"]))

    def attend(sums: Any, states: Any, n_parts: int) -> None:
        attention_kernel[(*grid, n_parts)](
            queries, pages.codes, pages.scales, pages.table, slots, positions, sums, states,
            sinks if states is None else None,
            1 / sqrt(head_dim) if scale is None else scale, cap, layer, m, **sizes, **common, IS_CAPPED=cap > 0,
            num_warps=N_WARPS, num_stages=N_STAGES, **UNFUSED,
        )  # fmt: skip

    if m > FEW_ROWS:
        attend(out, None, 1)
        return out
    n_entries = m * n_heads * pages.n_parts
    workspace = attention_workspace(pages, m, n_heads) if workspace is None else workspace
    check("workspace", workspace, (workspace.numel(),))
    needed = workspace_size(n_entries, head_dim)
    if workspace.numel() < needed:
        raise ValueError(f"The attention workspace has {workspace.numel()} numbers, {needed} are needed.")
    states, sums = workspace, workspace[workspace_size(n_entries, 0) :]
    attend(sums, states, pages.n_parts)
    shape = {"N_HEADS": n_heads, "HEAD_DIM": head_dim, "DIM_BLOCK": sizes["DIM_BLOCK"]}
    combine_kernel[(m, n_heads)](
        sums, states, sinks, positions, out, **shape, **common, num_warps=COMBINE_WARPS, num_stages=N_STAGES, **UNFUSED
    )
    return out


def _query_group(queries: Any, pages: Pages, window: int | None, out: Any, first: int) -> int:
    """Return the number of query heads per key head. Raises: ValueError: if out, first or window does not fit."""
    head_dim = pages.head_dim
    group: int = out.shape[1] // head_dim // pages.n_kv_heads
    check("out", out, (queries.shape[0], group * pages.n_kv_heads * head_dim), torch.float32, torch.float16)
    if not 1 <= head_dim <= MAX_HEAD_DIM or group < 1:
        raise ValueError(f"Output {tuple(out.shape)} is not a multiple of {pages.n_kv_heads} heads of {head_dim}.")
    if first < 0 or first + out.shape[1] > queries.shape[1] or (window is not None and window < 1):
        raise ValueError(
            f"Queries {tuple(queries.shape)} do not hold {out.shape[1]} features from {first}, or window {window} is "
            "not positive."
        )
    return group


def _sizes(group: int, head_dim: int) -> dict[str, int]:
    """Return the kernel's block sizes. They depend only on the model's shape, so bits don't depend on the batch."""
    dim_block = max(4, triton.next_power_of_2(head_dim))
    group_block = min(QUERIES, triton.next_power_of_2(group))
    lanes = max(1, min(PAGE_TOKENS, TILE // (QUERIES * dim_block)))
    sizes = {"GROUP": group, "GROUP_BLOCK": group_block, "ROWS": QUERIES // group_block}
    return sizes | {
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "LANES": lanes,
        "STEP": min(PAGE_TOKENS, TURNS * lanes),
    }
