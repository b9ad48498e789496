"""How likely it is that a row may exit: features and a small network in one launch for m rows.

Features of a row (SpecEE, arXiv 2504.08850, section 4): the logits of its c candidate tokens, their softmax, and the
change of that softmax since the layer that was evaluated last. Network: 3c - h - 1, ReLU, sigmoid.
The softmax is left in `previous` for the next evaluated layer; zeros there mean that there was none before.

One program a row, all in registers, in fp32; sums in a tree fixed by h and c. Weights may be fp32 or fp16.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check

N_WARPS = 4  # h = 512: 4 hidden units a thread
MAX_HIDDEN = 4096


@triton.jit
def weighted(
    features: tl.tensor,
    first: tl.tensor,
    hidden: tl.tensor,
    candidate: tl.tensor,
    known: tl.tensor,
    FIRST: tl.constexpr,
    C: tl.constexpr,
) -> Any:
    """The part of the first layer's sums that comes from C features, FIRST and on."""
    at = first + hidden[:, None] * (3 * C) + FIRST + candidate[None, :]
    return tl.sum(tl.load(at, mask=known, other=0.0).to(tl.float32) * features[None, :], 1)


@triton.jit
def exit_predictor_kernel(
    logits_ptr: tl.tensor,
    previous_ptr: tl.tensor,
    first_ptr: tl.tensor,
    first_bias_ptr: tl.tensor,
    second_ptr: tl.tensor,
    second_bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    C: tl.constexpr,
    C_BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    candidate, hidden = tl.arange(0, C_BLOCK), tl.arange(0, HIDDEN_BLOCK)
    is_candidate, is_hidden = candidate < C, hidden < HIDDEN
    at = row.to(tl.int64) * C + candidate
    logits = tl.load(logits_ptr + at, mask=is_candidate, other=float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 0))
    softmax = powers / tl.sum(powers, 0)
    change = softmax - tl.load(previous_ptr + at, mask=is_candidate, other=0.0)
    tl.store(previous_ptr + at, softmax, mask=is_candidate)
    logits = tl.where(is_candidate, logits, 0.0)
    known = is_hidden[:, None] & is_candidate[None, :]
    inner = tl.load(first_bias_ptr + hidden, mask=is_hidden, other=0.0).to(tl.float32)
    inner += weighted(logits, first_ptr, hidden, candidate, known, 0, C)
    inner += weighted(softmax, first_ptr, hidden, candidate, known, C, C)
    inner += weighted(change, first_ptr, hidden, candidate, known, 2 * C, C)
    inner = tl.where(inner < 0.0, 0.0, inner)
    total = tl.sum(inner * tl.load(second_ptr + hidden, mask=is_hidden, other=0.0).to(tl.float32), 0)
    total += tl.load(second_bias_ptr).to(tl.float32)
    tl.store(out_ptr + row, 1.0 / (1.0 + tl.exp(-total)))


def exit_predictor(
    logits: Any, previous: Any, first: Any, first_bias: Any, second: Any, second_bias: Any, out: Any = None
) -> Any:
    """logits, previous: fp32 (m, c), previous changed in place; first (h, 3c), first_bias (h,), second (h,),
    second_bias (1,): the network; out: fp32 (m,), allocated where None. Returns out.

    Raises ValueError for other shapes, dtypes or layouts.
    """
    m, c = logits.shape
    h = second.numel()
    out = logits.new_empty(m) if out is None else out
    for name, part, shape in (("logits", logits, (m, c)), ("previous", previous, (m, c)), ("out", out, (m,))):
        check(name, part, shape)
    check("first", first, (h, 3 * c), torch.float32, torch.float16)
    for name, part, shape in (
        ("first_bias", first_bias, (h,)),
        ("second", second, (h,)),
        ("second_bias", second_bias, (1,)),
    ):
        check(name, part, shape, first.dtype)
    if not 1 <= h <= MAX_HIDDEN or c < 1:
        raise ValueError(f"{h} hidden units and {c} candidates, expected 1 to {MAX_HIDDEN} and at least 1.")
    if m:
        parts = (logits, previous, first, first_bias, second, second_bias, out)
        exit_predictor_kernel[(m,)](*parts, **_sizes(c, h), num_warps=N_WARPS, **UNFUSED)
    return out


def _sizes(c: int, h: int) -> dict[str, int]:
    blocks = {"C_BLOCK": triton.next_power_of_2(c), "HIDDEN_BLOCK": triton.next_power_of_2(h)}
    return {"C": c, "HIDDEN": h} | blocks
