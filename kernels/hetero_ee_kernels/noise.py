"""Gumbel noise as a function of (seed, sequence, position, token).

Philox4x64-10 (Salmon et al., SC'11) as in NumPy: its i-th raw integer is word i % 4 of the block with the counter
(1 + i / 4, 0, sequence, position) and the key (seed, 0). The integers equal NumPy's; the logarithms are fp32, since
they only choose drafts: the tokens of the output are chosen in float64.
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.tile_group import join4

N_WORDS = 5  # int32 per row: seed (low, high), sequence, position, bits of the inverse temperature (0 for greedy)
LOG2_E = tl.constexpr(1.4426950408889634)
SERIES_END = tl.constexpr(1 / 16)  # below it, five terms of the logarithm's series have an error of 2^-22


@triton.jit
def philox_block(block: tl.tensor, seed: tl.tensor, sequence: tl.tensor, position: tl.tensor) -> Any:
    """Return Philox's four raw integers (uint64) for each block, those of tokens 4 block .. 4 block + 3."""
    a, b, c, d = block + 1, block * 0, block * 0 + sequence, block * 0 + position
    key, key_high = seed, seed * 0
    for _ in tl.static_range(10):
        low, high = a * 0xD2E7470EE14C6C93, tl.umulhi(a, a * 0 + 0xD2E7470EE14C6C93)
        low_2, high_2 = c * 0xCA5A826395121157, tl.umulhi(c, c * 0 + 0xCA5A826395121157)
        a, b, c, d = high_2 ^ b ^ key, low_2, high ^ d ^ key_high, low
        key, key_high = key + 0x9E3779B97F4A7C15, key_high + 0xBB67AE8584CAA73B
    return a, b, c, d


@triton.jit
def ptx(x: tl.tensor, TEXT: tl.constexpr) -> Any:
    """Apply an instruction of NVIDIA's cards to fp32 numbers."""
    return tl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def power_of_two(x: tl.tensor, ISA: tl.constexpr) -> Any:
    """Return 2^x, 0 instead of subnormal numbers, in one instruction on NVIDIA's cards, where tl.exp2 has four."""
    return ptx(x, "ex2.approx.ftz.f32 $0, $1;") if ISA >= 2 else tl.exp2(x)


@triton.jit
def logarithm(x: tl.tensor, ISA: tl.constexpr) -> Any:
    """Return log2(x) of normal numbers, with an absolute error of 2^-22 from 1/2 to 2, a relative one elsewhere.

    In one instruction on NVIDIA's cards, where tl.log2 is a polynomial and a branch.
    """
    return ptx(x, "lg2.approx.ftz.f32 $0, $1;") if ISA >= 2 else tl.log2(x)


@triton.jit
def scaled_gumbel(bits: tl.tensor, ISA: tl.constexpr) -> Any:
    """Return -log2(-log2(u)), fp32, u = (floor(bits / 2^12) + 1/2) / 2^52; from 1 - u above 1/2, for precision.

    Gumbel noise, -log(-log(u)), is ln 2 times that, plus a constant.
    """
    signed = bits.to(tl.int64)
    is_high = signed < 0
    distance = tl.where(is_high, ~signed, signed)  # from 0 or 1; cards convert 64 bits far slower than twice 32
    high, low = (distance >> 32).to(tl.int32).to(tl.float32), (distance & 0xFFFFF000).to(tl.uint32).to(tl.float32)
    end = tl.fma(high, 2.0**-32, (low + 2048.0) * 2.0**-64)
    series = tl.fma(tl.fma(tl.fma(tl.fma(end, LOG2_E / 5, LOG2_E / 4), end, LOG2_E / 3), end, LOG2_E / 2), end, LOG2_E)
    exponential = -logarithm(tl.where(is_high, 1.0 - end, end), ISA)
    return -logarithm(tl.where(is_high & (end < SERIES_END), series * end, exponential), ISA)


@triton.jit
def row_bits(noise_ptr: tl.tensor, ids_ptr: tl.tensor, first: tl.tensor, n: tl.tensor, N: tl.constexpr) -> Any:
    """Return Philox's integers for logits first .. first + N - 1 of n, with the row's noise words as parameters.

    ids_ptr: int32 (n,), the tokens that the logits belong to, or None for all tokens in order, whose blocks are shared.
    """
    low = tl.load(noise_ptr).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = low | (tl.load(noise_ptr + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    sequence, position = tl.load(noise_ptr + 2).to(tl.uint64), tl.load(noise_ptr + 3).to(tl.uint64)
    if ids_ptr is None:
        block = (first // 4 + tl.arange(0, N // 4)).to(tl.uint32).to(tl.uint64)
        return tl.reshape(join4(philox_block(block, seed, sequence, position)), (N,))
    else:
        index = first + tl.arange(0, N)
        token = tl.load(ids_ptr + index, mask=index < n, other=0).to(tl.uint64)
        a, b, c, d = philox_block(token >> 2, seed, sequence, position)
        word = token & 3
        return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
