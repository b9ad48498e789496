"""Attention of m new rows, of any mixture of sequences, against the KV pages.

out[r, h] = sum over p of softmax_p(score[p]) v[p],  p = max(0, position + 1 - window) .. position,
score[p] = scale q[r, h] k[p], or for models that cap it (arXiv 2408.00118) cap tanh(scale q[r, h] k[p] / cap),
with k, v of the row's own sequence and of key head h // (n_heads / n_kv_heads); m rows, d = head_dim. A model may have
a sink per head (gpt-oss): one more score in the softmax, for no value, with which the sums begin. The last features of
a key may be its value (latent attention), which is then read once for both.

A program takes some queries (a query is one query head of one row) that share a key head and the row's sequence, and
reads keys and values once for all of them. It goes through 256 absolute positions at a time, a part, with an online
softmax (arXiv 1805.02867, 2205.14135). For few rows each part has its own program, and a second launch combines the
parts; for many, as in a prompt, one program does both and needs no workspace. The order of all sums follows from
absolute positions: on one card a row's bits depend only on its query, its position, the window and the keys and values
it sees, never on other rows, pages, slots, the longest context or the number of launches. Pages outside the rows'
windows are never loaded.

Tensor cores multiply fp16 and int8 caches from sm_80 on: 16 queries, the rows of a matrix product, which costs the same
for one. Queries and weights are sums of two fp16 halves, which keeps 22 bits; cached numbers are exact in fp16.
fp32 caches, Turing and AMD's cards have fp32 products and 4 queries. There, lane i sees every position p = i modulo the
number of lanes, with an online softmax of its own, so no lane waits for another; lanes are combined in a tree at the
end of a part. Two positions per lane at a time share one correction of the sums by the new maximum; four would need 143
registers instead of 120, and 8 queries 226 to 255, which halves the programs that run at once (compiled, Triton 3.9).

Layout: pages.py; queries (m, features) fp32, heads side by side from feature `first`. Values have up to 512 features,
keys may have more if they contain the values; any number of heads. Slots and positions are read from device memory.
Programs of parts beyond a row's position end at once, as do those of rows that another row's program computes.
"""

from math import sqrt
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.attention_part import add_part, part_of_lanes, part_of_products
from hetero_ee_kernels.checks import UNFUSED, check, check_given
from hetero_ee_kernels.pages import (
    FEW_ROWS,
    PAGE_TOKENS,
    PART_TOKENS,
    Pages,
    attention_workspace,
    check_rows,
    workspace_size,
)
from hetero_ee_kernels.tile_matrix import PLAIN, PTX, instructions

N_QUERIES = {True: 16, False: 4}  # per program: query heads of a key head, times rows; with and without tensor cores
STEP_NUMBERS = 4096  # keys of a step, times features, with tensor cores
TILE = (
    4096  # queries x lanes x features of a step without: 32 sums per thread; twice that needs 255 registers (measured)
)
TURNS = 2  # positions of a lane per step
MAX_HEAD_DIM = 512
N_WARPS, WIDE_WARPS, COMBINE_WARPS, N_STAGES = 4, 8, 1, 1
WIDE, WIDE_STEP = 512, 32  # from WIDE features of a value on, 4 warps or steps of 16 spill (compiled, Triton 3.9)
LATEST = tl.constexpr(2**31 - 1)  # later than any position


@triton.jit(do_not_specialize=["layer", "m"])
def attention_kernel(
    queries_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    paths_ptr: tl.tensor,
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
    VALUE_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    N_STORED: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    PAGES_PER_SLOT: tl.constexpr,
    PATH_NUMBERS: tl.constexpr,
    N_PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Attention of up to GROUP_BLOCK query heads of a key head for up to ROWS rows of one sequence.

    The grid is (m, n_kv_heads * ceil(GROUP / GROUP_BLOCK), parts). The first row of a group of ROWS computes the group.
    In a draft tree each row computes only itself.

    Args:
        queries_ptr: fp32 (m, FEATURES), the query heads from feature FIRST.
        codes_ptr, scales_ptr, table_ptr: the fields of Pages. slots_ptr, positions_ptr: int32 (m,).
        paths_ptr: int32 (m, PATH_NUMBERS), see pages.py, or None.
        out_ptr: attention (m, N_HEADS, VALUE_DIM), or with states_ptr the parts' sums (m, N_HEADS, N_PARTS, VALUE_DIM).
        states_ptr: None, or fp32 (m, N_HEADS, N_PARTS, 2) for each part's greatest score and sum of weights.
        sinks_ptr: fp32 (N_HEADS,), or None.
        factor, cap, WINDOW: scale of the scores; their limit if IS_CAPPED; positions that a row sees, 0 for all.
        GROUP, GROUP_BLOCK, ROWS: query heads per key head; query heads and rows per program.
        N_STORED: 1 if the last VALUE_DIM features of a key are its value, else 2.
        DIM_BLOCK, REST_BLOCK: VALUE_DIM and the number of other features of a key, rounded up to powers of two.
        STEP, PART: positions per step and per part.
        LANES: lanes, or 0 for tensor cores.
    """
    first_row = tl.program_id(0)
    slot = tl.load(slots_ptr + first_row)
    query_number = tl.arange(0, GROUP_BLOCK * ROWS)
    row = first_row // ROWS * ROWS + query_number // GROUP_BLOCK
    inside = row < m
    inside = inside & (tl.load(slots_ptr + row, mask=inside, other=-1) == slot)
    path_ptr = paths_ptr
    if paths_ptr is not None:
        inside = row == first_row
        path_ptr = paths_ptr + first_row * PATH_NUMBERS
    if tl.min(tl.where(inside, row, LATEST), 0) == first_row:
        n_head_blocks: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
        N_HEADS: tl.constexpr = N_KV_HEADS * GROUP
        REST: tl.constexpr = HEAD_DIM - VALUE_DIM
        kv_head, head_block = tl.program_id(1) // n_head_blocks, tl.program_id(1) % n_head_blocks
        head = head_block * GROUP_BLOCK + query_number % GROUP_BLOCK
        position = tl.load(positions_ptr + row, mask=inside, other=0)
        first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else position * 0
        lowest, highest = tl.min(tl.where(inside, first, LATEST), 0), tl.max(position, 0) + 1
        is_query = inside & (head < GROUP)
        query_head = kv_head * GROUP + head
        feature = tl.arange(0, DIM_BLOCK)
        mask = is_query[:, None] & (feature[None, :] < VALUE_DIM)
        query_at = queries_ptr + row.to(tl.int64) * FEATURES + FIRST + query_head * HEAD_DIM
        query = tl.load(query_at[:, None] + REST + feature[None, :], mask=mask, other=0.0) * factor
        rest = None
        if REST > 0:
            other = tl.arange(0, REST_BLOCK)[None, :]
            rest = tl.load(query_at[:, None] + other, mask=is_query[:, None] & (other < REST), other=0.0) * factor
        whole = tl.full((GROUP_BLOCK * ROWS,), float("-inf"), tl.float32)
        whole_total = tl.zeros((GROUP_BLOCK * ROWS,), tl.float32)
        if sinks_ptr is not None:
            whole, whole_total = tl.load(sinks_ptr + query_head, mask=is_query, other=0.0), whole_total + 1.0
        whole_sums = tl.zeros((GROUP_BLOCK * ROWS, DIM_BLOCK), tl.float32)
        first_part, end_part = lowest // PART, (highest + PART - 1) // PART
        if states_ptr is not None:
            first_part = tl.maximum(first_part, tl.program_id(2))
            end_part = tl.minimum(end_part, tl.program_id(2) + 1)
        VALUES: tl.constexpr = (N_STORED - 1) * N_KV_HEADS * PAGE
        PAGE_VECTORS: tl.constexpr = N_STORED * N_LAYERS * N_KV_HEADS * PAGE
        pages, first_head = table_ptr + slot * PAGES_PER_SLOT, layer * N_STORED * N_KV_HEADS + kv_head
        first_vector = first_head.to(tl.int64) * PAGE
        codes_ptr += first_vector * HEAD_DIM
        if scales_ptr is not None:
            scales_ptr += first_vector
        all_from, all_until = tl.max(first, 0), tl.min(tl.where(inside, position, LATEST), 0)
        for part in range(first_part, end_part):
            low, high = tl.maximum(lowest, part * PART), tl.minimum(highest, (part + 1) * PART)
            if LANES == 0:
                found = part_of_products(
                    query, rest, first, position, low, high, all_from, all_until, codes_ptr, scales_ptr, pages,
                    path_ptr, cap, PAGE_VECTORS, VALUES, HEAD_DIM, VALUE_DIM, STEP, IS_CAPPED, PAGE,
                )  # fmt: skip
            else:
                found = part_of_lanes(
                    query, rest, first, position, low, high, codes_ptr, scales_ptr, pages, path_ptr, cap,
                    PAGE_VECTORS, VALUES, HEAD_DIM, VALUE_DIM, STEP, IS_CAPPED, PAGE, LANES, ROWS,
                )  # fmt: skip
            if states_ptr is not None:
                entry = (row.to(tl.int64) * N_HEADS + query_head) * N_PARTS + part
                tl.store(states_ptr + 2 * entry, found[0], mask=is_query)
                tl.store(states_ptr + 2 * entry + 1, found[1], mask=is_query)
                at_out = out_ptr + entry[:, None] * VALUE_DIM + feature[None, :]
                tl.store(at_out, found[2], mask=mask)
            else:
                whole, whole_total, whole_sums = add_part(whole, whole_total, whole_sums, found)
        if states_ptr is None:
            entry = row.to(tl.int64) * N_HEADS + query_head
            at_out = out_ptr + entry[:, None] * VALUE_DIM + feature[None, :]
            tl.store(at_out, whole_sums / whole_total[:, None], mask=mask)


@triton.jit
def combine_kernel(
    sums_ptr: tl.tensor,
    states_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
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
    inside = feature < VALUE_DIM
    entry = row.to(tl.int64) * N_HEADS + head + zero
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if sinks_ptr is not None:
        best, total = tl.load(sinks_ptr + head + zero), total + 1.0
    sums = tl.zeros((1, DIM_BLOCK), tl.float32)
    for part in range(first // PART, position // PART + 1):
        at = entry * N_PARTS + part
        more = tl.load(sums_ptr + at[:, None] * VALUE_DIM + feature, mask=inside, other=0.0)
        found = tl.load(states_ptr + 2 * at), tl.load(states_ptr + 2 * at + 1), more
        best, total, sums = add_part(best, total, sums, found)
    tl.store(out_ptr + entry[:, None] * VALUE_DIM + feature, sums / total[:, None], mask=inside)


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
    paths: Any = None,
    shared_dim: int | None = None,
) -> Any:
    """Compute attention of m rows whose keys and values are in the cache already; return out.

    Args:
        queries: fp32 (m, features), the heads side by side from feature `first`.
        slots, positions: int32 (m,).
        window: number of positions that a row sees, including its own; None for all.
        out: fp32 or fp16 (m, n_heads * value size), the size being head_dim or shared_dim.
        workspace: attention_workspace(...) for at least m rows, allocated if None. More than FEW_ROWS rows need none.
        scale: factor of the scores, 1 / sqrt(head_dim) if None.
        cap: limit of the scores, 0 for none.
        sinks: fp32 (n_heads,), None for none.
        paths: int32 (m, 1 + n) of rows in a draft tree, see pages.py; None if all rows are in chains.
        shared_dim: number of features at the end of a key that are its value; None if the pages hold values.

    Raises:
        ValueError: if a shape, dtype or layout does not fit, or the layer does not exist.
    """
    check_rows(queries, pages, slots, positions, layer, paths)
    m, head_dim, value_dim = queries.shape[0], pages.head_dim, pages.head_dim if shared_dim is None else shared_dim
    group = _query_group(queries, pages, window, out, first, value_dim)
    n_heads = group * pages.n_kv_heads
    check_given("sinks", sinks, (n_heads,))
    if m == 0:
        return out
    sizes = _sizes(group, head_dim, _has_products(pages.codes), value_dim) | {
        "N_LAYERS": pages.n_layers,
        "N_STORED": pages.n_stored,
        "PAGE": PAGE_TOKENS,
        "N_KV_HEADS": pages.n_kv_heads,
    }
    sizes |= {"FEATURES": queries.shape[1], "FIRST": first, "PAGES_PER_SLOT": pages.pages_per_slot}
    sizes |= {"PATH_NUMBERS": 0 if paths is None else paths.shape[1]}
    common = {"WINDOW": window or 0, "N_PARTS": pages.n_parts, "PART": PART_TOKENS}
    grid = (m, pages.n_kv_heads * triton.cdiv(group, sizes["GROUP_BLOCK"]))

    def attend(sums: Any, states: Any, n_parts: int) -> None:
        attention_kernel[(*grid, n_parts)](
            queries, pages.codes, pages.scales, pages.table, slots, positions, paths, sums, states,
            sinks if states is None else None,
            1 / sqrt(head_dim) if scale is None else scale, cap, layer, m, **sizes, **common, IS_CAPPED=cap > 0,
            num_warps=_n_warps(sizes), num_stages=N_STAGES, **UNFUSED,
        )  # fmt: skip

    if m > FEW_ROWS:
        attend(out, None, 1)
        return out
    n_entries = m * n_heads * pages.n_parts
    workspace = attention_workspace(pages, m, n_heads) if workspace is None else workspace
    check("workspace", workspace, (workspace.numel(),))
    needed = workspace_size(n_entries, value_dim)
    if workspace.numel() < needed:
        raise ValueError(f"The attention workspace has {workspace.numel()} numbers, {needed} are needed.")
    states, sums = workspace, workspace[workspace_size(n_entries, 0) :]
    attend(sums, states, pages.n_parts)
    shape = {"N_HEADS": n_heads, "VALUE_DIM": value_dim, "DIM_BLOCK": sizes["DIM_BLOCK"]}
    combine_kernel[(m, n_heads)](
        sums, states, sinks, positions, out, **shape, **common, num_warps=COMBINE_WARPS, num_stages=N_STAGES, **UNFUSED
    )
    return out


def _has_products(codes: Any) -> bool:
    """Return whether the tensor cores of the card can multiply these codes. They can't be switched off."""
    return codes.dtype != torch.float32 and instructions(codes) in (PLAIN, PTX)


def _query_group(queries: Any, pages: Pages, window: int | None, out: Any, first: int, value_dim: int) -> int:
    """Return the number of query heads per key head. Raises: ValueError: if out, first or window does not fit."""
    group: int = out.shape[1] // value_dim // pages.n_kv_heads
    n_heads = group * pages.n_kv_heads
    check("out", out, (queries.shape[0], n_heads * value_dim), torch.float32, torch.float16)
    is_stored = value_dim == pages.head_dim if pages.n_stored == 2 else value_dim <= pages.head_dim
    if not 1 <= value_dim <= MAX_HEAD_DIM or group < 1 or not is_stored:
        raise ValueError(f"Output {tuple(out.shape)} is not a multiple of {pages.n_kv_heads} heads of {value_dim}.")
    if first < 0 or first + n_heads * pages.head_dim > queries.shape[1] or (window is not None and window < 1):
        raise ValueError(
            f"Queries {tuple(queries.shape)} do not hold {out.shape[1]} features from {first}, or window {window} is "
            "not positive."
        )
    return group


def _n_warps(sizes: dict[str, int]) -> int:
    return WIDE_WARPS if sizes["DIM_BLOCK"] >= WIDE and sizes["LANES"] == 0 else N_WARPS


def _sizes(group: int, head_dim: int, has_products: bool, value_dim: int | None = None) -> dict[str, int]:
    """Return the kernel's block sizes. They depend only on model, cache and card, so bits don't depend on the batch."""
    least, value_dim = 32 if has_products else 4, head_dim if value_dim is None else value_dim
    dim_block, rest_block = (max(least, triton.next_power_of_2(n)) for n in (value_dim, max(1, head_dim - value_dim)))
    n_queries = N_QUERIES[has_products]
    group_block = min(n_queries, triton.next_power_of_2(group))
    lanes = 0 if has_products else max(1, min(PAGE_TOKENS, TILE // (n_queries * dim_block)))
    least_step = WIDE_STEP if dim_block >= WIDE else 16
    step = max(least_step, min(PAGE_TOKENS, STEP_NUMBERS // dim_block)) if has_products else TURNS * lanes
    step = min(PAGE_TOKENS, step)
    sizes = {"GROUP": group, "GROUP_BLOCK": group_block, "ROWS": n_queries // group_block}
    sizes |= {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "DIM_BLOCK": dim_block, "REST_BLOCK": rest_block}
    return sizes | {"LANES": lanes, "STEP": step}
