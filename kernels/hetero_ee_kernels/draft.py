"""Turn logits (m, n) into one draft per row: the likeliest token, with the position's noise, and its confidence.

A row's result is 8 bytes: int32 id, fp32 confidence. The id is that of the largest logit / temperature + noise, or of
the largest logit if the temperature is 0; the lowest of equals; -1 if a logit is NaN or infinite. The confidence comes
from a network over features of the four largest logits (SpecEE, arXiv 2504.08850, section 4): these, their softmax, and
its change since the previous exit layer, which does not exist here, so that it is the softmax again; 12 - h - 1, ReLU,
sigmoid. Without a network it is the token's probability, softmax(logits)[id].

A value becomes an integer key of the same order (sign and magnitude to two's complement, -0 to +0), and the winner of
any set of (key, index) is the greatest of key * 2^32 + 2^32 - 1 - index, however the set is cut. A value that is not
finite counts as greater than all numbers. Layout: rows contiguous; 1 <= n < 2^31. Two launches: one program per 512
logits, then one per row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check, check_given, output
from hetero_ee_kernels.noise import LOG2_E, N_WORDS, power_of_two, row_bits, scaled_gumbel
from hetero_ee_kernels.tile_matrix import instructions

PIECE = 512  # logits per program, 8 per thread, since noise needs many registers; 32,000 are 63 programs per row
CANDIDATES = tl.constexpr(4)
LOWEST = tl.constexpr(-(2**63))
UNSOUND_KEY = tl.constexpr(2**31 - 1)  # above the key of every number; as a value it is NaN
MAX_HIDDEN = 4096
N_WARPS, ROW_WARPS = 2, 8


@triton.jit
def key_of(value: tl.tensor) -> Any:
    """Return an int32 of the same order for each value, UNSOUND_KEY for those that are not finite."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    return tl.where(tl.abs(value) < float("inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), UNSOUND_KEY)


@triton.jit
def packed(key: tl.tensor, index: tl.tensor, inside: tl.tensor) -> Any:
    """Return key * 2^32 + 2^32 - 1 - index (int64), by which logits are compared."""
    return tl.where(inside, (key.to(tl.int64) << 32) | (~index).to(tl.uint32).to(tl.int64), LOWEST)


@triton.jit
def index_of(best: tl.tensor) -> Any:
    return ~best & 0xFFFFFFFF


@triton.jit
def key_in(best: tl.tensor) -> Any:
    return (best >> 32).to(tl.int32)


@triton.jit
def value_of(key: tl.tensor) -> Any:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pieces_kernel(
    logits_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    n: tl.tensor,
    N_WORDS: tl.constexpr,
    PIECE: tl.constexpr,
    ISA: tl.constexpr,
) -> None:
    """Write a piece's winner, packed, to best[row, piece]; its largest logit and sum of exponentials to sums."""
    row, piece = tl.program_id(0), tl.program_id(1)
    index = piece * PIECE + tl.arange(0, PIECE)
    inside = index < n
    value = tl.load(logits_ptr + row.to(tl.int64) * n + index, mask=inside, other=float("-inf"))
    at = row * tl.num_programs(1) + piece
    key = key_of(value)
    largest = value_of(tl.max(tl.where(inside, key, -UNSOUND_KEY), 0))
    tl.store(sums_ptr + 2 * at, largest)
    tl.store(sums_ptr + 2 * at + 1, tl.sum(power_of_two((value - largest) * LOG2_E, ISA), 0))
    noise_at = noise_ptr + row * N_WORDS
    inverse = tl.load(noise_at + N_WORDS - 1).to(tl.float32, bitcast=True)
    if inverse > 0.0:
        noise = scaled_gumbel(row_bits(noise_at, ids_ptr, piece * PIECE, n, PIECE), ISA)
        key = key_of(tl.fma(value, tl.zeros_like(value) + inverse * LOG2_E, noise))
    tl.store(best_ptr + at, tl.max(packed(key, index, inside), 0))


@triton.jit
def weighted(features: tl.tensor, first: tl.tensor, hidden: tl.tensor, known: tl.tensor, FIRST: tl.constexpr) -> Any:
    """Return the contribution of the four features from FIRST on to the sums of the network's first layer."""
    at = first + hidden[:, None] * (3 * CANDIDATES) + FIRST + tl.arange(0, CANDIDATES)[None, :]
    return tl.sum(tl.load(at, mask=known[:, None], other=0.0) * features[None, :], 1)


@triton.jit
def judged(
    logits: tl.tensor,
    first_ptr: tl.tensor,
    first_bias_ptr: tl.tensor,
    second_ptr: tl.tensor,
    second_bias_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
) -> Any:
    """Evaluate the network for the four largest logits and return the confidence."""
    powers = tl.exp(logits - tl.max(logits, 0))
    softmax = powers / tl.sum(powers, 0)
    hidden = tl.arange(0, HIDDEN_BLOCK)
    known = hidden < HIDDEN
    inner = tl.load(first_bias_ptr + hidden, mask=known, other=0.0)
    inner += weighted(logits, first_ptr, hidden, known, 0)
    inner += weighted(softmax, first_ptr, hidden, known, CANDIDATES)
    inner += weighted(softmax, first_ptr, hidden, known, 2 * CANDIDATES)
    inner = tl.where(inner < 0.0, 0.0, inner)
    total = tl.sum(inner * tl.load(second_ptr + hidden, mask=known, other=0.0), 0) + tl.load(second_bias_ptr)
    return 1.0 / (1.0 + tl.exp(-total))


@triton.jit
def rows_kernel(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    first_ptr: tl.tensor,
    first_bias_ptr: tl.tensor,
    second_ptr: tl.tensor,
    second_bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    n: tl.tensor,
    n_pieces: tl.tensor,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
) -> None:
    row, part, candidate = tl.program_id(0), tl.arange(0, PIECES), tl.arange(0, CANDIDATES)
    inside, at = part < n_pieces, row * n_pieces + part
    winner = index_of(tl.max(tl.load(best_ptr + at, mask=inside, other=LOWEST), 0))
    tops, logits_at = tl.load(sums_ptr + 2 * at, mask=inside, other=0.0), logits_ptr + row.to(tl.int64) * n
    rest = packed(key_of(tops), part, inside)
    largest = value_of(key_in(tl.max(rest, 0)))
    if first_ptr is not None:
        first = tl.zeros((CANDIDATES,), tl.int64)  # logits of the pieces with the largest, which have all candidates
        for i in tl.static_range(CANDIDATES):
            best = tl.max(rest, 0)
            first = tl.where(candidate == i, index_of(best) * PIECE, first)
            rest = tl.where(rest == best, LOWEST, rest)
        index = first[:, None] + tl.arange(0, PIECE)[None, :]
        rest = packed(key_of(tl.load(logits_at + index, mask=index < n, other=0.0)), index, index < n)
        logits = tl.zeros((CANDIDATES,), tl.float32)
        for i in tl.static_range(CANDIDATES):
            best = tl.max(tl.max(rest, 1), 0)
            logits = tl.where(candidate == i, value_of(key_in(best)), logits)
            rest = tl.where(rest == best, LOWEST, rest)
        confidence = judged(logits, first_ptr, first_bias_ptr, second_ptr, second_bias_ptr, HIDDEN, HIDDEN_BLOCK)
    else:
        sums = tl.load(sums_ptr + 2 * at + 1, mask=inside, other=0.0)
        total = tl.sum(tl.where(inside, sums * tl.exp(tops - largest), 0.0), 0)
        confidence = tl.exp(tl.load(logits_at + winner) - largest) / total
    if ids_ptr is not None:
        winner = tl.load(ids_ptr + winner).to(tl.int64)
    tl.store(out_ptr + 2 * row, tl.where(tl.abs(largest) < float("inf"), winner, -1).to(tl.int32))
    tl.store(out_ptr + 2 * row + 1, confidence.to(tl.int32, bitcast=True))


def draft(logits: Any, noise: Any, network: Any = None, ids: Any = None, out: Any = None) -> Any:
    """Draft one token per row and return out.

    Args:
        logits: fp32 (m, n).
        noise: int32 (m, N_WORDS), see noise.py.
        network: fp32 (h, 12), (h,), (h,), (1,), or None.
        ids: int32 (n,), the tokens that the logits belong to; None for all tokens in order.
        out: int32 (m, 2), allocated if None: id and the bits of the fp32 confidence.

    Raises:
        ValueError: if a shape, dtype or layout does not fit.
    """
    m, n = logits.shape
    out = output(out, logits, (m, 2), torch.int32)
    check("logits", logits, (m, n))
    check("noise", noise, (m, N_WORDS), torch.int32)
    check_given("ids", ids, (n,), torch.int32)
    least = 1 if network is None else CANDIDATES.value
    if n < least:
        raise ValueError(f"Each row needs at least {least} logits, not {n}.")
    h = _checked(network)
    if m:
        n_pieces = -(-n // PIECE)
        best = torch.empty((m, n_pieces), dtype=torch.int64, device=logits.device)
        sums = torch.empty((m, n_pieces, 2), device=logits.device)
        pieces_kernel[(m, n_pieces)](
            logits, noise, ids, best, sums, n, N_WORDS, PIECE, ISA=instructions(logits), num_warps=N_WARPS, **UNFUSED
        )
        parts = network or (None,) * 4
        sizes = _sizes(n_pieces, h)
        rows_kernel[(m,)](logits, ids, best, sums, *parts, out, n, n_pieces, **sizes, num_warps=ROW_WARPS, **UNFUSED)
    return out


def _checked(network: Any) -> int:
    """Check the network's tensors and return its number of hidden units; 1 if there is no network."""
    if network is None:
        return 1
    first, first_bias, second, second_bias = network
    h = second.numel()
    if not 1 <= h <= MAX_HIDDEN:
        raise ValueError(f"The exit network has {h} hidden units, expected 1 to {MAX_HIDDEN}.")
    check("first", first, (h, 3 * CANDIDATES.value))
    for name, part, size in (("first_bias", first_bias, h), ("second", second, h), ("second_bias", second_bias, 1)):
        check(name, part, (size,))
    return h


def _sizes(n_pieces: int, h: int) -> dict[str, int]:
    sizes = {"PIECE": PIECE, "PIECES": triton.next_power_of_2(n_pieces)}
    return sizes | {"HIDDEN": h, "HIDDEN_BLOCK": triton.next_power_of_2(h)}
