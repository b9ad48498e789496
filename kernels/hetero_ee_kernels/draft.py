"""From logits (m, n) to a draft a row: the likeliest token with the position's noise, and how sure it is.

A row's result is 8 bytes: int32 id, fp32 confidence. id: of the largest logit / temperature + noise, of the largest
logit where the temperature is 0, the lowest of equals; -1 where a logit is NaN or infinite. Confidence: by a network
over features of the four largest logits (SpecEE, arXiv 2504.08850, section 4): these, their softmax, and its change
since the exit layer evaluated last, which here is none, so that it is the softmax again; 12 - h - 1, ReLU, sigmoid.
Without a network: the token's probability, softmax(logits)[id].

A value becomes an integer key of the same order (sign and magnitude to two's complement, -0 to +0), and the winner of
any set of (key, place) is the greatest of key * 2^32 - place: that is the same however the set is cut. What is not
finite counts as greater than everything. Layout: rows contiguous; 1 <= n < 2^31. Two launches: one program for each 512
logits, then one for each row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check
from hetero_ee_kernels.noise import N_WORDS, row_noise

PIECE = 512  # logits a program: 2 of each thread, as noise takes many registers; 32,000 are 63 programs a row
CANDIDATES = tl.constexpr(4)
KEPT = tl.constexpr(5)  # of a piece: its winner with noise, its candidates
LOWEST = tl.constexpr(-(2**63))
UNSOUND_KEY = tl.constexpr(2**31 - 1)  # above every number's; as a value it is NaN
MAX_HIDDEN = 4096
N_WARPS, ROW_WARPS = 8, 8


@triton.jit
def packed(value: tl.tensor, place: tl.tensor, inside: tl.tensor) -> Any:
    """key * 2^32 - place of each value, int64."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(tl.abs(value) < float("inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), UNSOUND_KEY)
    return tl.where(inside, key.to(tl.int64) * 4294967296 - place, LOWEST)


@triton.jit
def place_of(best: tl.tensor) -> Any:
    return -best & 0xFFFFFFFF


@triton.jit
def value_of(best: tl.tensor) -> Any:
    key = ((best + place_of(best)) >> 32).to(tl.int32)
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
) -> None:
    """best[row, piece]: winner and candidates, packed; sums[row, piece]: of exp(logit - the piece's largest)."""
    row, piece = tl.program_id(0), tl.program_id(1)
    place = piece * PIECE + tl.arange(0, PIECE)
    inside = place < n
    value = tl.load(logits_ptr + row.to(tl.int64) * n + place, mask=inside, other=float("-inf"))
    at = row * tl.num_programs(1) + piece
    score, noise_at = value, noise_ptr + row * N_WORDS
    inverse = tl.load(noise_at + N_WORDS - 1).to(tl.float32, bitcast=True)
    if inverse > 0.0:
        token = place
        if ids_ptr is not None:
            token = tl.load(ids_ptr + place, mask=inside, other=0)
        score = tl.fma(value, tl.zeros_like(value) + inverse, row_noise(noise_at, token))
    tl.store(best_ptr + at * KEPT, tl.max(packed(score, place, inside), 0))
    rest = packed(value, place, inside)
    best = tl.max(rest, 0)
    tl.store(sums_ptr + at, tl.sum(tl.exp(value - value_of(best)), 0))
    for candidate in tl.static_range(CANDIDATES):
        tl.store(best_ptr + at * KEPT + 1 + candidate, best)
        rest = tl.where(rest == best, LOWEST, rest)
        best = tl.max(rest, 0)


@triton.jit
def weighted(features: tl.tensor, first: tl.tensor, hidden: tl.tensor, known: tl.tensor, FIRST: tl.constexpr) -> Any:
    """The part of the first layer's sums that comes from the four features FIRST and on."""
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
    """The network's answer to the largest logits."""
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
    PIECES: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
) -> None:
    row, piece, candidate = tl.program_id(0), tl.arange(0, PIECES), tl.arange(0, CANDIDATES)
    there, at = piece < n_pieces, row * n_pieces + piece
    winner = place_of(tl.max(tl.load(best_ptr + at * KEPT, mask=there, other=LOWEST), 0))
    rest = tl.load(best_ptr + (at * KEPT + 1)[:, None] + candidate[None, :], mask=there[:, None], other=LOWEST)
    best = tl.max(tl.max(rest, 1), 0)
    largest = value_of(best)
    if first_ptr is not None:
        logits = tl.zeros((CANDIDATES,), tl.float32)
        for i in tl.static_range(CANDIDATES):
            logits = tl.where(candidate == i, value_of(best), logits)
            rest = tl.where(rest == best, LOWEST, rest)
            best = tl.max(tl.max(rest, 1), 0)
        sure = judged(logits, first_ptr, first_bias_ptr, second_ptr, second_bias_ptr, HIDDEN, HIDDEN_BLOCK)
    else:
        tops = value_of(tl.load(best_ptr + at * KEPT + 1, mask=there, other=0))
        sums = tl.load(sums_ptr + at, mask=there, other=0.0)
        total = tl.sum(tl.where(there, sums * tl.exp(tops - largest), 0.0), 0)
        sure = tl.exp(tl.load(logits_ptr + row.to(tl.int64) * n + winner) - largest) / total
    if ids_ptr is not None:
        winner = tl.load(ids_ptr + winner).to(tl.int64)
    tl.store(out_ptr + 2 * row, tl.where(tl.abs(largest) < float("inf"), winner, -1).to(tl.int32))
    tl.store(out_ptr + 2 * row + 1, sure.to(tl.int32, bitcast=True))


def draft(logits: Any, noise: Any, network: Any = None, ids: Any = None, out: Any = None) -> Any:
    """logits: fp32 (m, n); noise: int32 (m, N_WORDS), see noise.py; network: fp32 (h, 12), (h,), (h,), (1,), or None;
    ids: int32 (n,), the tokens that the logits are of, or None; out: int32 (m, 2), allocated where None. Returns out.

    Raises ValueError for other shapes, dtypes or layouts.
    """
    m, n = logits.shape
    out = torch.empty((m, 2), dtype=torch.int32, device=logits.device) if out is None else out
    check("logits", logits, (m, n))
    check("noise", noise, (m, N_WORDS), torch.int32)
    check("out", out, (m, 2), torch.int32)
    if ids is not None:
        check("ids", ids, (n,), torch.int32)
    if n < (1 if network is None else CANDIDATES.value):
        raise ValueError(f"rows have {n} logits, expected 1, or {CANDIDATES.value} for a network, or more.")
    h = _checked(network)
    if m:
        n_pieces = -(-n // PIECE)
        best = torch.empty((m, n_pieces, KEPT.value), dtype=torch.int64, device=logits.device)
        sums = torch.empty((m, n_pieces), device=logits.device)
        pieces_kernel[(m, n_pieces)](logits, noise, ids, best, sums, n, N_WORDS, PIECE, num_warps=N_WARPS, **UNFUSED)
        parts = network or (None,) * 4
        sizes = _sizes(n_pieces, h)
        rows_kernel[(m,)](logits, ids, best, sums, *parts, out, n, n_pieces, **sizes, num_warps=ROW_WARPS, **UNFUSED)
    return out


def _checked(network: Any) -> int:
    """Its hidden units, 1 for none."""
    if network is None:
        return 1
    first, first_bias, second, second_bias = network
    h = second.numel()
    if not 1 <= h <= MAX_HIDDEN:
        raise ValueError(f"the network has {h} hidden units, expected 1 to {MAX_HIDDEN}.")
    check("first", first, (h, 3 * CANDIDATES.value))
    for name, part, size in (("first_bias", first_bias, h), ("second", second, h), ("second_bias", second_bias, 1)):
        check(name, part, (size,))
    return h


def _sizes(n_pieces: int, h: int) -> dict[str, int]:
    return {"PIECES": triton.next_power_of_2(n_pieces), "HIDDEN": h, "HIDDEN_BLOCK": triton.next_power_of_2(h)}
