"""The FFN's activation and the logits' soft cap, fp32.

Gated: out = act(gate) * up with x = [gate | up] of (m, 2F). Not gated: out = act(x) with x of (m, F).

silu(v) = v / (1 + e^-v)                                        relu(v) = max(v, 0)
gelu(v) = v (1 + erf(v / sqrt 2)) / 2                           fatrelu(v) = v if v >= threshold, else 0
gelu_tanh(v) = v / (1 + e^(-2u)), u = sqrt(2 / pi) (v + 0.044715 v^3)    (= v (1 + tanh u) / 2)
softcap(v) = c tanh(v / c) = c - 2c / (1 + e^(2v / c)), c = threshold (arXiv 2408.00118); a series near 0
clamped_silu(v) = w / (1 + e^(-1.702 w)), w = min(v, threshold); its gate multiplies it by clamp(up) + 1, where clamp
    limits up to +-threshold (gpt-oss)                          relu2(v) = max(v, 0)^2
NaN stays NaN, except in fatrelu, which returns 0 as torch does. Each output depends only on its own inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, output

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "fatrelu", "softcap", "clamped_silu", "relu2")
BLOCK, N_WARPS = 512, 4  # 4 outputs per thread are one 16-byte load; 11,008 outputs are 22 programs


@triton.jit
def activated(v: tl.tensor, threshold: tl.tensor, KIND: tl.constexpr) -> Any:
    if KIND == "silu":
        return v / (1.0 + tl.exp(-v))
    elif KIND == "gelu":
        return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return v / (1.0 + tl.exp(-1.5957691216057308 * v * tl.fma(0.044715 * v, v, 1.0)))
    elif KIND == "relu":
        return tl.where(v < 0.0, 0.0, v)
    elif KIND == "relu2":
        return tl.where(v < 0.0, 0.0, v) * tl.where(v < 0.0, 0.0, v)
    elif KIND == "softcap":
        u = v / threshold
        square = u * u
        series = tl.fma(tl.fma(tl.fma(square, -17 / 315, 2 / 15), square, -1 / 3), square, 1.0)
        far = threshold - 2.0 * threshold / (1.0 + tl.exp(2.0 * u))
        return tl.where(tl.abs(u) < 0.2, v * series, far)
    elif KIND == "clamped_silu":
        w = tl.where(v > threshold, threshold, v)
        return w / (1.0 + tl.exp(-1.702 * w))
    else:
        return tl.where(v >= threshold, v, 0.0)


@triton.jit
def activate_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    threshold: tl.tensor,
    F: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < F
    at = x_ptr + row * (2 * F if GATED else F) + lane
    y = activated(tl.load(at, mask=inside, other=0.0), threshold, KIND)
    if GATED:
        up = tl.load(at + F, mask=inside, other=0.0)
        if KIND == "clamped_silu":
            up = tl.where(up > threshold, threshold, tl.where(up < -threshold, -threshold, up)) + 1.0
        y *= up
    tl.store(out_ptr + row * F + lane, y, mask=inside)


def activate(x: Any, kind: str, out: Any = None, *, gated: bool, threshold: float = 0.0) -> Any:
    """Apply an activation and return out.

    Args:
        x: contiguous fp32, (m, 2F) if gated, else (m, F).
        kind: one of KINDS.
        out: fp32 or fp16 (m, F), allocated if None.
        threshold: fatrelu's threshold, softcap's cap or clamped_silu's limit.

    Raises:
        ValueError: if a shape, dtype or layout does not fit, or the kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"Unknown activation {kind}; choose one of {', '.join(KINDS)}.")
    m, n_outputs = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    check("x", x, (m, n_outputs * (1 + gated)))
    out = output(out, x, (m, n_outputs), torch.float32, torch.float16)
    if out.numel():
        grid = (m, triton.cdiv(n_outputs, BLOCK))
        activate_kernel[grid](x, out, threshold, n_outputs, kind, gated, BLOCK, num_warps=N_WARPS, **UNFUSED)
    return out
