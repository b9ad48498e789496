"""The router of a mixture of experts, fp32, with the bits of the CPU's router (route.py there).

Each logit is summed in 16 lanes (feature i in lane i mod 16, one fused multiply-add each), then over lanes i and i + 8,
i + 4, i + 2, i + 1. The experts with the largest scores are chosen, the lower one of two with equal scores, and those
whose score is NaN last. Sums of weights are added in the order of experts, 16 lanes at a time. So a token's choice and
weights depend on its row alone, and on neither the batch nor the device. exp: Cody and Waite's reduction and Taylor's
series, as on the CPU.
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, output
from hetero_ee_kernels.tile_group import MAGIC, MAGIC_BITS

KINDS = ("softmax", "sigmoid", "softmax_of_chosen")
LANES = tl.constexpr(16)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of an fp32 number: a key above those of groups that are not chosen
FEW = (1, 8, 1)  # tokens and experts per program, and warps: a decode pass reads all weights at once
MANY = (16, 16, 4)  # a prompt's programs share what they read
MANY_TOKENS = 17  # as many or more are many


@triton.jit
def lane_sum(x: tl.tensor) -> Any:
    """Sum x (A, 16) over its lanes, to (A,)."""
    for _ in tl.static_range(4):
        first, second = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
        x = first + second
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def exponential(x: tl.tensor) -> Any:
    """Return e^x with the bits of the CPU's simd/floats.py."""
    x = tl.where(x < -105.0, -105.0, x)
    x = tl.where(x > 89.0, 89.0, x)
    shifted = tl.fma(x, 1.4426950408889634, MAGIC)
    n = shifted - MAGIC
    r = tl.fma(n, 2.12194440054690583e-4, tl.fma(n, -0.693359375, x))
    series = tl.fma(r * 0.0 + 1 / 5040, r, 1 / 720)
    for number in tl.static_range(4):
        series = tl.fma(series, r, 1 / (120 if number == 0 else 24 if number == 1 else 6 if number == 2 else 2))
    result = tl.fma(r * r, series, r) + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - MAGIC_BITS
    first = exponent >> 1  # 2^n as two factors: n can exceed fp32's exponents
    second = exponent - first
    power = ((first + 127) << 23).to(tl.float32, bitcast=True)
    return result * power * ((second + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def divided(x: tl.tensor, by: tl.tensor) -> Any:
    return tl.div_rn(x, tl.broadcast_to(by, x.shape))


@triton.jit(do_not_specialize=["m", "n_experts"])
def logits_kernel(
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    n_experts: tl.tensor,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Compute the logits of TOKENS tokens x EXPERTS experts: fp32 (m, WIDTH) and (n_experts, WIDTH)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    x_at = x_ptr + tl.minimum(token, m - 1) * WIDTH + lane
    weights_at = weights_ptr + tl.minimum(expert, n_experts - 1) * WIDTH + lane
    totals = tl.zeros((TOKENS, EXPERTS, LANES), tl.float32)
    for first in tl.range(0, WIDTH, LANES, loop_unroll_factor=16 if TOKENS == 1 else 2):
        weights = tl.broadcast_to(tl.load(weights_at + first), (TOKENS, EXPERTS, LANES))
        totals = tl.fma(weights, tl.broadcast_to(tl.load(x_at + first), (TOKENS, EXPERTS, LANES)), totals)
    logits = tl.reshape(lane_sum(tl.reshape(totals, (TOKENS * EXPERTS, LANES))), (TOKENS, EXPERTS))
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    tl.store(out_ptr + token * n_experts + expert, logits, mask=(token < m) & (expert < n_experts))


@triton.jit
def loaded(logits_ptr: tl.tensor, bias_ptr: tl.tensor, expert: tl.tensor, inside: tl.tensor) -> Any:
    """Load some experts' logits of one token, with the bias, if there is one."""
    logits = tl.load(logits_ptr + expert, mask=inside, other=0.0)
    return logits if bias_ptr is None else logits + tl.load(bias_ptr + expert, mask=inside, other=0.0)


@triton.jit
def weight_sum(weights: tl.tensor) -> Any:
    """Sum K weights, 16 lanes at a time."""
    K: tl.constexpr = weights.shape[0]
    rows = tl.reshape(weights, (K // LANES, LANES))
    row = tl.arange(0, K // LANES)[:, None]
    total = tl.zeros((1, LANES), tl.float32)
    for number in tl.static_range(K // LANES):
        total += tl.sum(tl.where(row == number, rows, 0.0), 0)[None]
    return lane_sum(total)


@triton.jit
def in_best_groups(
    keys: tl.tensor, expert: tl.tensor, inside: tl.tensor, size: tl.tensor, N_GROUPS: tl.constexpr,
    N_CHOSEN: tl.constexpr, N_BEST: tl.constexpr,
) -> Any:  # fmt: skip
    """Return which experts are in the N_CHOSEN groups with the largest sums of their N_BEST largest keys."""
    group, sums = expert // size, keys
    for number in range(N_GROUPS):
        is_in = inside & (group == number)
        best = tl.max(tl.where(is_in, keys, float("-inf")), 0)
        if N_BEST == 2:
            first = tl.min(tl.where(is_in & (keys == best), expert, expert.shape[0]), 0)
            best += tl.max(tl.where(is_in & (expert != first), keys, float("-inf")), 0)
        sums = tl.where(is_in, best, sums)
    is_in_one = expert < 0
    for _ in range(N_CHOSEN):
        is_left = inside & (is_in_one == 0)
        best = tl.max(tl.where(is_left, sums, float("-inf")), 0)
        is_in_one = is_in_one | (group == tl.min(tl.where(is_left & (sums == best), group, expert.shape[0]), 0))
    return is_in_one


@triton.jit(do_not_specialize=["n_experts"])
def choose_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    choice_bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    added: tl.tensor,
    n_experts: tl.tensor,
    N_ACTIVE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    N_GROUPS: tl.constexpr,
    N_CHOSEN: tl.constexpr,
    N_BEST: tl.constexpr,
) -> None:
    """Choose a token's experts and compute their weights. E, K: n_experts and N_ACTIVE as powers of two from 16 on."""
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * n_experts
    expert = tl.arange(0, E)
    inside = expert < n_experts
    scores = loaded(logits_ptr, bias_ptr, expert, inside)
    if KIND == "sigmoid":
        one = tl.full(scores.shape, 1.0, tl.float32)
        scores = tl.div_rn(one, exponential(-scores) + 1.0)
    keys = scores
    if choice_bias_ptr is not None:
        keys += tl.load(choice_bias_ptr + expert, mask=inside, other=0.0)
    keys = tl.maximum(keys, LOWEST)  # of NaN, too, which equals nothing, so that it could not be chosen
    is_open = inside
    if N_CHOSEN < N_GROUPS:
        is_open = inside & in_best_groups(keys, expert, inside, n_experts // N_GROUPS, N_GROUPS, N_CHOSEN, N_BEST)
    is_chosen = expert < 0
    for _ in range(N_ACTIVE):
        is_left = is_open & (is_chosen == 0)
        best = tl.max(tl.where(is_left, keys, float("-inf")), 0)
        is_chosen = is_chosen | (expert == tl.min(tl.where(is_left & (keys == best), expert, E), 0))
    total = tl.full((1,), 1.0, tl.float32)
    if KIND == "softmax":
        largest = tl.max(tl.where(inside, scores, float("-inf")), 0)
        scores = exponential(scores - largest)
        lane = tl.arange(0, LANES)
        sums = tl.zeros((1, LANES), tl.float32)
        for first in range(0, n_experts, LANES):
            is_lane = first + lane < n_experts
            value = exponential(loaded(logits_ptr, bias_ptr, first + lane, is_lane) - largest)
            sums += tl.where(is_lane, value, 0.0)[None]
        total = lane_sum(sums)
    place = tl.arange(0, K)
    ids = tl.zeros((K,), tl.int32)
    weights = tl.zeros((K,), tl.float32)
    for number in range(N_ACTIVE):
        highest = tl.max(tl.where(is_chosen, expert, -1), 0)
        weight = tl.sum(tl.where(expert == highest, scores, 0.0), 0)
        ids = tl.where(place == number, highest, ids)
        weights = tl.where(place == number, weight, weights)
        is_chosen = is_chosen & (expert != highest)
    is_place = place < N_ACTIVE
    if KIND == "softmax_of_chosen":
        weights = exponential(weights - tl.max(tl.where(is_place, weights, float("-inf")), 0))
        weights = tl.where(is_place, weights, 0.0)
        total = weight_sum(weights)
    weights = divided(weights, total)
    if RENORMALIZES:
        weights = divided(weights, weight_sum(weights) + added)
    weights *= scale
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + ids, mask=is_place, other=0.0)
    out_at = out_ptr + token * (2 * N_ACTIVE) + place
    tl.store(out_at, ids.to(tl.float32), mask=is_place)
    tl.store(out_at + N_ACTIVE, weights, mask=is_place)


def fp32_product(x: Any, weights: Any, out: Any = None) -> Any:
    """Return x W^T in fp32, (m, n), with the bits of the CPU's router for each row of x.

    Args:
        x: fp32 (m, width), width a multiple of 16.
        weights: fp32 (n, width).

    Raises:
        ValueError: if an operand does not fit.
    """
    m, width = x.shape
    check("x", x, (m, width))
    check("weights", weights, (len(weights), width))
    if width % LANES.value:
        raise ValueError(f"{width} features are not a multiple of {LANES.value}.")
    out = output(out, x, (m, len(weights)))
    n_tokens, n_experts, n_warps = MANY if m >= MANY_TOKENS else FEW
    if m:
        grid = triton.cdiv(m, n_tokens), triton.cdiv(len(weights), n_experts)
        sizes: dict[str, Any] = {"WIDTH": width, "TOKENS": n_tokens, "EXPERTS": n_experts}
        logits_kernel[grid](x, weights, out, m, len(weights), **sizes, num_warps=n_warps, **UNFUSED)
    return out


def route(
    x: Any,
    weights: Any,
    vectors: tuple[Any, Any, Any],
    n_active: int,
    kind: str,
    out: Any = None,
    *,
    renormalizes: bool,
    scale: float,
    added: float,
    groups: tuple[int, int, int] = (1, 1, 1),
) -> Any:
    """Choose experts for each row of x.

    Args:
        x: fp32 (m, width), width a multiple of 16.
        weights: fp32 (n_experts, width).
        vectors: fp32 (n_experts,) added to the logits; added to the scores for the choice only; factors of the weights.
            None for those that the router lacks.
        n_active: experts per token.
        kind: one of KINDS.
        out: fp32 (m, 2 n_active), allocated if None: the indices of the chosen experts, from the highest to the lowest,
            then their weights.
        renormalizes: whether a token's weights are divided by their sum plus `added`.
        scale: of the weights.
        groups: number of groups, of those with a token's experts, and of the best keys whose sum chooses these, 1 or 2.

    Raises:
        ValueError: if an operand does not fit.
    """
    n_experts = len(weights)
    if kind not in KINDS or not 0 < n_active <= n_experts:
        raise ValueError(f"{n_active} of {n_experts} experts by {kind} is not one of {', '.join(KINDS)}.")
    out = output(out, x, (len(x), 2 * n_active))
    sizes = {"E": max(16, triton.next_power_of_2(n_experts)), "K": max(16, triton.next_power_of_2(n_active))}
    logits = fp32_product(x, weights)
    if len(x):
        parameters = *vectors, out, scale, added, n_experts, n_active
        how: dict[str, Any] = {"KIND": kind, "RENORMALIZES": renormalizes, "num_warps": 1}
        how |= dict(zip(("N_GROUPS", "N_CHOSEN", "N_BEST"), groups, strict=True))
        choose_kernel[(len(x),)](logits, *parameters, **sizes, **how, **UNFUSED)
    return out
