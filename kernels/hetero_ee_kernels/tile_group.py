"""Steps over the groups of a tile that matmul and the sliced head share: the same steps, hence the same bits.

A 32-bit word of a tile is 4 columns of one row: of an int8 tile 4 signed bytes, of an int4 tile 4 codes in the low
nibbles and 4 codes, 16 columns on, in the high ones (docs/FORMAT.md). Within a group of 32 columns: the integer sum of
entry x int8 activation, exact whatever the order, then one fma with the two scales.

Group g is added to slot g mod 32, groups in order; the slots are then summed pair by pair. That order is written out
here, in additions of two numbers, so no layout that the compiler picks can change a bit. Linear entries come out of
their nibbles 16 times too large, which saves the shift; the scale takes the factor back, exactly.
Integers become fp32 by their bits: magic + i, less magic, is exact for |i| < 2^22, and the conversion instruction slow.
"""

from typing import Any

import triton
import triton.language as tl

SLOTS = tl.constexpr(32)  # 8 groups a warp, 4 warps a program
N_WARPS = 4
MAGIC_BITS = tl.constexpr(0x4B400000)
MAGIC = tl.constexpr(12582912.0)  # 1.5 x 2^23
DOT4_PTX = tl.constexpr("dp4a.s32.s32 $0, $1, $2, $3;")
AND_XOR_PTX = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0x6A;")
LOOKUP_PTX = tl.constexpr("""{
    .reg .b32 place, half, a, b, c, d;
    and.b32 place, $2, 0x77777777;
    shr.b32 half, $2, 1;
    lop3.b32 half, half, 0x44444444, 0x32103210, 0xEA;
    prmt.b32 a, $3, $4, place;
    prmt.b32 b, $5, $6, place;
    prmt.b32 a, a, b, half;
    shr.b32 place, place, 16;
    shr.b32 half, half, 16;
    prmt.b32 c, $3, $4, place;
    prmt.b32 d, $5, $6, place;
    prmt.b32 c, c, d, half;
    prmt.b32 $0, a, c, 0x6420;
    prmt.b32 $1, a, c, 0x7531;
    }""")


@triton.jit
def split4(x: tl.tensor) -> Any:
    """(..., 4) -> four of (...)."""
    even, odd = tl.split(tl.reshape(x, x.shape[:-1] + [2, 2]))  # noqa: RUF005 (Triton knows no starred lists)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def join4(x: tl.tensor) -> Any:
    """Four of (...) -> (..., 4)."""
    joined = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    return tl.reshape(joined, x[0].shape + [4])  # noqa: RUF005


@triton.jit
def dot4(words: tl.tensor, x: tl.tensor, total: tl.tensor, ISA: tl.constexpr) -> Any:
    """total + the sum of 4 products of signed bytes."""
    if ISA == 1:
        return tl.inline_asm_elementwise(DOT4_PTX, "=r,r,r,r", [words, x, total], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for byte in tl.static_range(4):
            total += ((words << (24 - 8 * byte)) >> 24) * ((x << (24 - 8 * byte)) >> 24)
        return total


@triton.jit
def and_xor(words: tl.tensor, MASK: tl.constexpr, FLIP: tl.constexpr, ISA: tl.constexpr) -> Any:
    """(words & MASK) ^ FLIP; left to itself the assembler takes two instructions."""
    if ISA == 1:
        return tl.inline_asm_elementwise(
            AND_XOR_PTX, "=r,r,r,r", [words, MASK, FLIP], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (words & MASK) ^ FLIP


@triton.jit
def linear_entries(words: tl.tensor, ISA: tl.constexpr) -> Any:
    """8 codes -> signed bytes 16 (code - 8): of the low nibbles, of the high ones."""
    NIBBLES: tl.constexpr = -0x0F0F0F10  # 0xF0F0F0F0
    SIGNS: tl.constexpr = -0x7F7F7F80  # 0x80808080
    return and_xor(words << 4, NIBBLES, SIGNS, ISA), and_xor(words, NIBBLES, SIGNS, ISA)


@triton.jit
def codebook_entries(words: tl.tensor, table: tl.tensor, ISA: tl.constexpr) -> Any:
    """8 codes -> table[code] in signed bytes: of the low nibbles, of the high ones. table: 16 entries in 4 words.

    A byte permutation takes 4 of 8 bytes by three bits of four neighbouring nibbles: once from each half of the table,
    and once more to choose between the two by the fourth bit.
    """
    if ISA == 1:
        return tl.inline_asm_elementwise(
            LOOKUP_PTX,
            "=r,=r,r,r,r,r,r",
            [words, table[0], table[1], table[2], table[3]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    elif ISA == 2:
        return gcn_lookup(words, table), gcn_lookup(words >> 4, table)
    else:
        low = words * 0
        high = words * 0
        for nibble in tl.static_range(8):
            code = (words >> (4 * nibble)) & 15
            lower = tl.where(code < 4, table[0], table[1])
            quarter = tl.where(code < 8, lower, tl.where(code < 12, table[2], table[3]))
            entry = ((quarter >> (8 * (code & 3))) & 255) << (8 * (nibble // 2))
            if nibble % 2 == 0:
                low |= entry
            else:
                high |= entry
        return low, high


@triton.jit
def gcn_lookup(words: tl.tensor, table: tl.tensor) -> Any:
    """table[code] for the codes in the low nibbles, in signed bytes."""
    selector = words & 0x07070707
    lower = gcn_permute(table[1], table[0], selector)
    upper = gcn_permute(table[3], table[2], selector)
    half = (words >> 3) & 0x01010101
    is_upper = (half << 8) - half
    return (lower & ~is_upper) | (upper & is_upper)


@triton.jit
def gcn_permute(upper: tl.tensor, lower: tl.tensor, selector: tl.tensor) -> Any:
    """4 of the 8 bytes of two words: those of `lower` are 0 to 3, those of `upper` 4 to 7."""
    return tl.inline_asm_elementwise(
        "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [upper, lower, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def load_table(table_ptr: tl.tensor, zero: tl.tensor, KIND: tl.constexpr) -> Any:
    """The codebook's 4 words, (32, 4) each, for every thread.

    zero: 0, unknown to the compiler: what all threads share it would keep in uniform registers, to copy at every use.
    """
    if KIND == 1:
        at = table_ptr + (tl.arange(0, SLOTS)[:, None] + tl.arange(0, 4)[None, :]) * zero
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return 0, 0, 0, 0


@triton.jit
def entry_words(words: tl.tensor, table: tl.tensor, KIND: tl.constexpr, ISA: tl.constexpr) -> Any:
    """An int4 line's entries as signed bytes: of the low nibbles, of the high ones."""
    if KIND == 0:
        return linear_entries(words, ISA)
    else:
        return codebook_entries(words, table, ISA)


@triton.jit
def to_float(sums: tl.tensor) -> Any:
    """Integers that began at MAGIC_BITS -> fp32, exactly."""
    return sums.to(tl.float32, bitcast=True) - MAGIC


@triton.jit
def sum_slots(x: tl.tensor) -> Any:
    """(M, 32, C) -> (M, C), neighbours first."""
    for _ in tl.static_range(5):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2, x.shape[2])), 2)
    return tl.reshape(x, (x.shape[0], x.shape[2]))
