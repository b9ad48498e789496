"""Activations to int8: for each row and group of 32 columns, a = max|x| / 127, q = round(x / a), ties to even.

The codes and scales of the CPU's quantize.py, bit for bit: x times the rounded 127 / max|x|; a group below 1e-30 counts
as zeros; a NaN or Inf makes its group's scale NaN or Inf, and so every output of the row NaN. A row's codes depend on
that row alone. Source: derived.

Layout: codes (m, G, 32) int8, columns beyond K as zeros; scales (m, G) fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.tile_group import MAGIC
from hetero_ee_kernels.tile_matrix import GROUP

SMALLEST = tl.constexpr(1e-30)  # below it 127 / max|x| is no number
GROUPS = 8  # a program, one a quarter of a warp
N_WARPS = 2


@triton.jit
def quantize_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    n_columns: tl.tensor,
    n_groups: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None]
    x = tl.load(x_ptr + row * n_columns + column, mask=column < n_columns, other=0.0).to(tl.float32)
    # Without their signs, floats are ordered as their bits are, Inf and NaN at the top.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    tiny = largest < SMALLEST
    top = tl.full(largest.shape, 127.0, tl.float32)
    inverse = tl.where(tiny, 0.0, tl.div_rn(top, tl.where(tiny, 1.0, largest)))
    scaled = x * inverse[:, None]
    code = (scaled + MAGIC).to(tl.int32, bitcast=True).to(tl.int8)  # the addition rounds, to even
    code = tl.where(scaled == scaled, code, 0).to(tl.int8)
    scale = tl.where(tiny, 0.0, tl.div_rn(largest, top))
    inside = group < n_groups
    at = row * n_groups * 32 + column
    tl.store(codes_ptr + at, code, mask=inside[:, None])
    tl.store(scales_ptr + row * n_groups + group, scale, mask=inside)


def quantize(x: Any) -> tuple[Any, Any]:
    """x: fp32 or fp16 (m, K), contiguous -> codes int8 (m, G, 32), scales fp32 (m, G). Raises ValueError otherwise."""
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float16) or not x.is_contiguous() or not x.shape[1]:
        raise ValueError(f"activations are {x.dtype} {tuple(x.shape)}, expected contiguous torch.float32 (m, K).")
    m, n_columns = x.shape
    n_groups = -(-n_columns // GROUP)
    codes = torch.empty((m, n_groups, GROUP), dtype=torch.int8, device=x.device)
    scales = torch.empty((m, n_groups), dtype=torch.float32, device=x.device)
    if m:
        grid = (m, -(-n_groups // GROUPS))
        quantize_kernel[grid](x, codes, scales, n_columns, n_groups, GROUPS, num_warps=N_WARPS)
    return codes, scales
