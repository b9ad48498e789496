"""Write the keys and values of m new rows into the KV pages, after rotating queries and keys if there is a table.

fp32 is copied. fp16 rounds to nearest, ties to even, and clamps to +-65504. int8 uses, for each position and head,
scale = max |x| / 127 and code = round(x / scale), ties to even; a head with all values below 1e-30 is stored as zero,
and values must be finite. Rotary position embedding (arXiv 2104.09864, section 3.2; pairing as in Llama) rotates pairs
(i, i + n/2) of the first n features of each head: queries in place, keys on their way into the page (x keeps them
unrotated). Cosines and sines come from rope_table.py: computing the sine of a large angle in a kernel costs registers
and a slow path. Both steps are fused, because they touch the same few kilobytes: one launch of about 2 us less per
layer and token.

Layout: pages.py. x is fp32 (m, features): query heads from feature 0, key heads from first_key, value heads from
first_value. One program per row and head.
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.attention_part import line_on_path
from hetero_ee_kernels.checks import UNFUSED, check
from hetero_ee_kernels.pages import PAGE_TOKENS, Pages, check_rows

N_WARPS = 1  # a head is 64 to 256 features
SMALLEST = 1e-30  # 127 / 1e-30 is still a finite fp32


@triton.jit
def rotated(low: tl.tensor, high: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> Any:
    """Return the two halves of a head's rotated features."""
    return tl.fma(low, cosine, -(high * sine)), tl.fma(high, cosine, low * sine)


@triton.jit
def rounded(x: tl.tensor) -> Any:
    """Round to the nearest integer, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def stored(x: tl.tensor, inverse: tl.tensor, element: tl.constexpr) -> Any:
    """Return x in the form to store: int8 codes, fp32 clamped to the range of fp16, or unchanged. NaN stays NaN."""
    if element == tl.int8:
        return rounded(x * inverse).to(tl.int8)
    elif element == tl.float16:
        return tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    else:
        return x


@triton.jit(do_not_specialize=["layer"])
def kv_write_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    paths_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    layer: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    FIRST_VALUE: tl.constexpr,
    N_STORED: tl.constexpr,
    PAGES_PER_SLOT: tl.constexpr,
    PATH_NUMBERS: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    TINY: tl.constexpr,
) -> None:
    """Rotate and store one head of one row: a query head (only rotated, in place), a key head or a value head.

    Args:
        x_ptr: fp32 (m, FEATURES): query heads from feature 0, key heads from FIRST_KEY, value heads from FIRST_VALUE.
        codes_ptr, scales_ptr, table_ptr: the fields of Pages, of N_LAYERS, N_STORED, PAGES_PER_SLOT and PAGE positions.
        slots_ptr, positions_ptr: int32 (m,), each row's slot in the table and its position.
        paths_ptr: int32 (m, PATH_NUMBERS), see pages.py, or None.
        rotary_ptr: rope_table(...), or None for no rotation.
        N_HEADS, N_KV_HEADS: query heads to rotate, 0 without a rotary table; key heads.
        HEAD_DIM, HALF: features of a head; pairs that rotate, the first 2 * HALF features.
        HALF_BLOCK, REST_BLOCK: HALF and HEAD_DIM - 2 * HALF, rounded up to powers of two.
        TINY: magnitude below which an int8 head is stored as zero.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    is_query = head < N_HEADS
    part = tl.where(head < N_HEADS + N_KV_HEADS, 0, 1)  # 0: queries and keys, 1: values
    kv_head = tl.where(is_query, 0, head - N_HEADS - part * N_KV_HEADS)
    first = tl.where(is_query, head * HEAD_DIM, tl.where(part == 0, FIRST_KEY, FIRST_VALUE) + kv_head * HEAD_DIM)
    source = x_ptr + row.to(tl.int64) * FEATURES + first
    pair = tl.arange(0, HALF_BLOCK)
    paired = pair < HALF
    lane = 2 * HALF + tl.arange(0, REST_BLOCK)
    inside = lane < HEAD_DIM
    low, high = tl.load(source + pair, mask=paired, other=0.0), tl.load(source + HALF + pair, mask=paired, other=0.0)
    rest = tl.load(source + lane, mask=inside, other=0.0)
    if rotary_ptr is not None:
        angle = rotary_ptr + position.to(tl.int64) * (2 * HALF) + pair
        rotates = pair < tl.where(part == 0, HALF, 0)  # bounds: Triton 3.9 makes integers of `lanes & bool`
        cosine = tl.load(angle, mask=rotates, other=1.0)
        sine = tl.load(angle + HALF, mask=rotates, other=0.0)
        low, high = rotated(low, high, cosine, sine)
        tl.store(source + pair, low, mask=pair < tl.where(is_query, HALF, 0))
        tl.store(source + HALF + pair, high, mask=pair < tl.where(is_query, HALF, 0))
    line = position
    if paths_ptr is not None:
        line = line_on_path(paths_ptr + row * PATH_NUMBERS, position, position >= 0)
    page = tl.load(table_ptr + tl.load(slots_ptr + row) * PAGES_PER_SLOT + line // PAGE).to(tl.int64)
    vector = (((page * N_LAYERS + layer) * N_STORED + part) * N_KV_HEADS + kv_head) * PAGE + line % PAGE
    inverse = 1.0
    if scales_ptr is not None:
        peak = tl.maximum(tl.max(tl.abs(low), 0), tl.maximum(tl.max(tl.abs(high), 0), tl.max(tl.abs(rest), 0)))
        is_zero = peak < TINY
        inverse = tl.where(is_zero, 0.0, tl.div_rn(127.0, peak))
        tl.store(scales_ptr + vector, tl.where(is_zero, 0.0, tl.div_rn(peak, 127.0)), mask=head >= N_HEADS)
    target = codes_ptr + vector * HEAD_DIM
    element: tl.constexpr = codes_ptr.dtype.element_ty
    kept_pairs, kept_lanes = tl.where(is_query, 0, HALF), tl.where(is_query, 0, HEAD_DIM)
    tl.store(target + pair, stored(low, inverse, element), mask=pair < kept_pairs)
    tl.store(target + HALF + pair, stored(high, inverse, element), mask=pair < kept_pairs)
    tl.store(target + lane, stored(rest, inverse, element), mask=lane < kept_lanes)


def kv_write(
    x: Any,
    pages: Pages,
    slots: Any,
    positions: Any,
    layer: int,
    first_key: int,
    first_value: int | None,
    *,
    rotary_table: Any = None,
    paths: Any = None,
) -> None:
    """Write the keys and values of m rows into the pages. With a rotary table, queries and keys are rotated first.

    Args:
        x: fp32 (m, features). With a rotary table, the heads before first_key are queries, which are rotated in place.
        slots, positions: int32 (m,). The page table must have pages for these positions.
        first_value: first feature of the values, any feature if they are features of the keys; None if x has only
            queries, which are rotated, and nothing is written.
        rotary_table: rope_table(...), fp32 (positions, 2, pairs), or None.
        paths: int32 (m, 1 + n) of rows in a draft tree, see pages.py; None if all rows are in chains.

    Raises:
        ValueError: if a shape, dtype or layout does not fit, or the layer does not exist.
    """
    check_rows(x, pages, slots, positions, layer, paths)
    head_dim, n_kv_heads = pages.head_dim, pages.n_kv_heads
    n_written = 0 if first_value is None else n_kv_heads
    last = x.shape[1] - n_written * head_dim
    first_value = first_key if first_value is None else first_value
    n_pairs = head_dim // 2 if rotary_table is None else rotary_table.shape[2]
    if not 0 <= first_key <= last or not 0 <= first_value <= last:
        raise ValueError(
            f"x {tuple(x.shape)} does not hold {n_written} heads of {head_dim} from {first_key} and {first_value}."
        )
    if rotary_table is not None:
        check("rotary_table", rotary_table, (rotary_table.shape[0], 2, n_pairs))
        if first_key % head_dim or n_pairs * 2 > head_dim:
            raise ValueError(f"Heads of {head_dim} before feature {first_key} cannot rotate {2 * n_pairs} features.")
    n_heads = 0 if rotary_table is None else first_key // head_dim
    if not x.shape[0] or not n_heads + n_written:
        return
    sizes = _sizes(pages.n_layers, n_heads, n_kv_heads, head_dim, n_pairs) | {
        "FEATURES": x.shape[1],
        "FIRST_KEY": first_key,
        "FIRST_VALUE": first_value,
        "N_STORED": pages.n_stored,
        "PAGES_PER_SLOT": pages.pages_per_slot,
        "PATH_NUMBERS": 0 if paths is None else paths.shape[1],
    }
    grid = (x.shape[0], n_heads + pages.n_stored * n_written)
    place = (pages.codes, pages.scales, pages.table, slots, positions, paths)
    kv_write_kernel[grid](x, *place, rotary_table, layer, **sizes, num_warps=N_WARPS, **UNFUSED)


def _sizes(n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, n_pairs: int) -> dict[str, Any]:
    return {
        "N_LAYERS": n_layers,
        "N_HEADS": n_heads,
        "N_KV_HEADS": n_kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": PAGE_TOKENS,
        "HALF": n_pairs,
        "HALF_BLOCK": triton.next_power_of_2(max(1, n_pairs)),
        "REST_BLOCK": triton.next_power_of_2(max(1, head_dim - 2 * n_pairs)),
        "TINY": SMALLEST,
    }
