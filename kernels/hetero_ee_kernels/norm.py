"""RMSNorm and LayerNorm over the rows of x (m, n), fp32, with the residual addition that precedes them.

rms:    y = x / sqrt(mean(x^2) + eps) * scale              (arXiv 1910.07467)
layer:  y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias   (arXiv 1607.06450; variance of the population)
If a delta is given, x += delta first, in place: one launch and one pass over the row instead of two.

One program per row, with the row in registers. The order of its sums depends only on n and on the GPU's architecture
(sm_120 adds two numbers at once), so on one architecture a row's bits depend only on the row. Valid for 1 <= n <= 65536
and any m. Layout: rows contiguous.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, check_given, output

MAX_FEATURES = 65536


@triton.jit
def norm_row(x: tl.tensor, inside: tl.tensor, eps: tl.tensor, N: tl.constexpr, CENTERED: tl.constexpr) -> Any:
    """Divide x by its root mean square, or standardize it if CENTERED. Lanes outside the row must be 0 in x."""
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
) -> None:
    lane = tl.arange(0, BLOCK)
    inside = lane < N
    at = tl.program_id(0).to(tl.int64) * N + lane
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + at, mask=inside, other=0.0)
        tl.store(x_ptr + at, x, mask=inside)
    y = norm_row(x, inside, eps, N, CENTERED)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + lane, mask=inside, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + lane, mask=inside, other=0.0)
    tl.store(out_ptr + at, y, mask=inside)


@triton.jit
def heads_kernel(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    eps: tl.tensor,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lane = tl.arange(0, BLOCK)
    inside = lane < N
    at = tl.program_id(0).to(tl.int64) * FEATURES + FIRST + tl.program_id(1) * N + lane
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = norm_row(x, inside, eps, N, False) * tl.load(scale_ptr + lane, mask=inside, other=0.0)
    tl.store(x_ptr + at, y, mask=inside)


def rms_norm(x: Any, scale: Any, eps: float, out: Any = None, *, delta: Any = None) -> Any:
    """Apply RMSNorm and return out.

    Args:
        x: fp32 (m, n), changed in place if delta is given.
        scale: fp32 (n,) or None.
        out: fp32 or fp16 (m, n), allocated if None; may be x.
        delta: fp32 (m, n), added to x first.

    Raises:
        ValueError: if a shape, dtype or layout does not fit.
    """
    return _launch(x, scale, None, eps, False, out, delta)


def layer_norm(x: Any, scale: Any, bias: Any, eps: float, out: Any = None, *, delta: Any = None) -> Any:
    """Apply LayerNorm and return out. bias: fp32 (n,) or None; for the rest, see rms_norm."""
    return _launch(x, scale, bias, eps, True, out, delta)


def rms_norm_heads(x: Any, scale: Any, eps: float, first: int, n_heads: int) -> None:
    """Apply RMSNorm in place to n_heads heads of len(scale) features, from feature `first` of x (m, features).

    Raises:
        ValueError: if x has too few features, or a dtype or layout does not fit.
    """
    n = scale.numel()
    check("x", x, (x.shape[0], x.shape[-1]))
    check("scale", scale, (n,))
    if n == 0 or first < 0 or n_heads < 0 or first + n_heads * n > x.shape[1]:
        raise ValueError(f"{n_heads} heads of {n} from feature {first} do not fit into x {tuple(x.shape)}.")
    if x.shape[0] and n_heads:
        block = triton.next_power_of_2(n)
        n_warps = _n_warps(2 * block)
        heads_kernel[(x.shape[0], n_heads)](x, scale, eps, x.shape[1], first, n, block, num_warps=n_warps, **UNFUSED)


def _launch(x: Any, scale: Any, bias: Any, eps: float, centered: bool, out: Any, delta: Any) -> Any:
    m, n = x.shape[0], x.shape[-1]
    check("x", x, (m, n))
    out = output(out, x, (m, n), torch.float32, torch.float16)
    for name, given, shape in (("delta", delta, (m, n)), ("scale", scale, (n,)), ("bias", bias, (n,))):
        check_given(name, given, shape)
    if not 1 <= n <= MAX_FEATURES:
        raise ValueError(f"Rows have {n} features, expected 1 to {MAX_FEATURES}.")
    if m:
        block = triton.next_power_of_2(n)
        norm_kernel[(m,)](x, delta, scale, bias, out, eps, n, block, centered, num_warps=_n_warps(block), **UNFUSED)
    return out


def _n_warps(block: int) -> int:
    """Return the number of warps that gives each thread about 16 features."""
    return min(16, max(1, block // 512))
