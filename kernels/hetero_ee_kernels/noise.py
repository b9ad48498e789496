"""Gumbel noise as a function of (seed, sequence, position, token).

Philox4x64-10 (Salmon et al., SC'11) as in NumPy: its i-th raw integer is word i % 4 of the block with the counter
(1 + i / 4, 0, sequence, position) and the key (seed, 0). The integers equal NumPy's; the logarithms are fp32, since
they only choose drafts: the tokens of the output are chosen in float64.
"""

from typing import Any

import triton
import triton.language as tl

N_WORDS = 5  # int32 per row: seed (low, high), sequence, position, bits of the inverse temperature (0 for greedy)
TO_UNIT = tl.constexpr(2.0**-52)


@triton.jit
def philox(token: tl.tensor, seed: tl.tensor, sequence: tl.tensor, position: tl.tensor) -> Any:
    """Return Philox's raw integer (uint64) for each token."""
    a, b, c, d = (token >> 2) + 1, token * 0, token * 0 + sequence, token * 0 + position
    key, key_high = seed, seed * 0
    for _ in tl.static_range(10):
        low, high = a * 0xD2E7470EE14C6C93, tl.umulhi(a, a * 0 + 0xD2E7470EE14C6C93)
        low_2, high_2 = c * 0xCA5A826395121157, tl.umulhi(c, c * 0 + 0xCA5A826395121157)
        a, b, c, d = high_2 ^ b ^ key, low_2, high ^ d ^ key_high, low
        key, key_high = key + 0x9E3779B97F4A7C15, key_high + 0xBB67AE8584CAA73B
    word = token & 3
    return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@triton.jit
def gumbel(bits: tl.tensor) -> Any:
    """Return -log(-log(u)), fp32, u = (bits / 2^12 + 1/2) / 2^52; computed from 1 - u above 1/2, for precision."""
    high = bits >> 12
    u = (high.to(tl.float32) + 0.5) * TO_UNIT
    rest = (((high ^ 0xFFFFFFFFFFFFF).to(tl.float32)) + 0.5) * TO_UNIT
    kept = 1.0 - rest
    # log1p(-rest) by Kahan: the logarithm of the rounded 1 - rest, corrected by the rounding.
    near_one = tl.where(kept == 1.0, rest, tl.log(kept) * (rest / (kept - 1.0)))
    return -tl.log(tl.where(u < 0.5, -tl.log(u), near_one))


@triton.jit
def row_noise(noise_ptr: tl.tensor, token: tl.tensor) -> Any:
    """Return the Gumbel noise of these tokens (int32), with the row's noise words as parameters."""
    low = tl.load(noise_ptr).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(noise_ptr + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    sequence, position = tl.load(noise_ptr + 2).to(tl.uint64), tl.load(noise_ptr + 3).to(tl.uint64)
    return gumbel(philox(token.to(tl.uint64), low | (high << 32), sequence, position))
