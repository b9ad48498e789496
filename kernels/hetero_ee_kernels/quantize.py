"""Quantize activations to int8: for each row and group of 32 columns, a = max|x| / 127, q = round(x / a), ties to even.

Codes and scales equal the CPU's quantize.py, bit for bit: x is multiplied by the rounded 127 / max|x|; a group below
1e-30 counts as zeros; a NaN or Inf makes its group's scale NaN or Inf, and so every output of the row NaN. A row's
codes depend only on that row. With two terms, each row of x has two rows of codes, as on the CPU. Source: derived.

Layout, so that the lanes of a matrix product read adjacent 16 bytes: codes int8 (m, Q, 2, 4, 2, 8), that is, for each
quad of 128 columns, each half of it, each j of 4 and each of the half's two groups of 32, the group's columns
4 j .. 4 j + 3 and those 16 further on. Scales are fp32, two rows at a time, (m / 2, Q, 2, 4). K is padded to steps of
1,024 columns, with codes and scales of zero; the row that an odd m lacks is never written.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED
from hetero_ee_kernels.tile_group import MAGIC
from hetero_ee_kernels.tile_matrix import GROUP

SMALLEST = tl.constexpr(1e-30)  # below it 127 / max|x| overflows
TERM_RATIO = tl.constexpr(254.0)
GROUPS = 8  # per program: two quads, a group per quarter of a warp
N_WARPS = 2
QUAD, STEP = 4, 1024  # in groups; in columns


@triton.jit
def magnitude(x: tl.tensor) -> Any:
    """Return the bits of |x|, which have the order of the numbers, with Inf and NaN greatest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def steps_of(largest: tl.tensor) -> Any:
    """Return 127 / M and M / 127 for each group's largest magnitude M, whose bits are given."""
    largest = largest.to(tl.float32, bitcast=True)
    tiny = largest < SMALLEST
    top = tl.full(largest.shape, 127.0, tl.float32)
    inverse = tl.where(tiny, 0.0, tl.div_rn(top, tl.where(tiny, 1.0, largest)))
    return inverse, tl.where(tiny, 0.0, tl.div_rn(largest, top))


@triton.jit
def quantize_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    n_columns: tl.tensor,
    n_groups: tl.tensor,
    n_shared: tl.tensor,
    GROUPS: tl.constexpr,
    TERMS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = row if sources_ptr is None else tl.load(sources_ptr + row).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None]
    inside = column < tl.where(source >= 0, n_columns, 0)
    x = tl.load(x_ptr + source // n_shared * n_columns + column, mask=inside, other=0.0).to(tl.float32)
    inverse, scale = steps_of(tl.max(magnitude(x), 1))
    scaled = x * inverse[:, None]
    within = column % 32
    at = group[:, None] // 2 * 64 + within % 16 // 4 * 16 + group[:, None] % 2 * 8 + within // 16 * 4 + within % 4
    for term in tl.static_range(TERMS):
        rounded = scaled + MAGIC  # the addition rounds, ties to even
        code = tl.where(scaled == scaled, rounded.to(tl.int32, bitcast=True).to(tl.int8), 0).to(tl.int8)
        place = row * TERMS + term
        tl.store(codes_ptr + place * n_groups * 32 + at, code)
        tl.store(scales_ptr + (place // 2 * (n_groups // 4) + group // 4) * 8 + place % 2 * 4 + group % 4, scale)
        scaled = (scaled - (rounded - MAGIC)) * TERM_RATIO
        scale = tl.div_rn(scale, tl.full(scale.shape, TERM_RATIO, tl.float32))


def quantize(x: Any, n_terms: int = 1, sources: Any = None, n_shared: int = 1) -> tuple[Any, Any]:
    """Quantize contiguous fp32 or fp16 x (m, K); return codes and scales, with n_terms rows for each row of x.

    Args:
        sources: int32 (n,), numbers of rows to quantize instead of all in order; those below 0 count as zeros.
        n_shared: row i of x has the numbers i n_shared .. (i + 1) n_shared - 1.

    Raises:
        ValueError: for any other x.
    """
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float16) or not x.is_contiguous() or not x.shape[1]:
        raise ValueError(f"Activations are {x.dtype} {tuple(x.shape)}, expected contiguous torch.float32 (m, K).")
    n_columns, m = x.shape[1], n_shared * len(x) if sources is None else len(sources)
    n_quads = -(-n_columns // STEP) * STEP // (QUAD * GROUP)
    codes = torch.empty((m * n_terms, n_quads, 2, 4, 2, 8), dtype=torch.int8, device=x.device)
    scales = torch.empty((-(-len(codes) // 2), n_quads, 2, QUAD), dtype=torch.float32, device=x.device)
    if m:
        grid = (m, n_quads * QUAD // GROUPS)
        sizes = n_columns, n_quads * QUAD, n_shared, GROUPS, n_terms
        quantize_kernel[grid](x, codes, scales, sources, *sizes, num_warps=N_WARPS, **UNFUSED)
    return codes, scales
