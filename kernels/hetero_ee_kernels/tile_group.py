"""Steps over a tile's groups that matmul and the sliced head share: the same integers, added in the same order.

A 32-bit word of a tile is 4 columns of one row: 4 signed bytes of an int8 tile; of other tiles the low 4 bits of 4
codes in the low nibbles and of 4 codes, 16 columns further on, in the high nibbles (docs/FORMAT.md). In tiles of 5 or 6
bits, one or two more words of the row have the high bits of all its codes. For a group of 32 columns: the integer sum
of entry x int8 activation, exact in any order, then one fma with the two scales; for 6 bits, this is done for each half
of the columns.

Four groups are a quad. Quad q is added to slot q mod 8, groups in order; then the slots are added pair by pair. That
order is written out here, in additions of two numbers, so no layout that the compiler picks can change a bit. Linear
entries are unpacked 16 times too large, those of 5 bits 8 times and of 6 bits 4 times, which saves an offset; the scale
divides by that, exactly. With zero points z, z times the sum of the group's activations, computed by a product with
ones, is subtracted from the integer first, by an fma that rounds nothing if z is whole.
Integers become fp32 by their bits: magic + i, minus magic, is exact for |i| < 2^22, and the conversion instruction is
slow.
"""

from typing import Any

import triton
import triton.language as tl

SLOTS = tl.constexpr(8)
MAGIC_BITS = tl.constexpr(0x4B400000)
MAGIC = tl.constexpr(12582912.0)  # 1.5 x 2^23
DOT4_PTX = tl.constexpr("dp4a.s32.s32 $0, $1, $2, $3;")
AND_XOR_PTX = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0x6A;")
WARP_BARRIER_PTX = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")
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
MMA_PTX = tl.constexpr("""{
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $10, $10, $10};
    }""")
TURING_MMA_PTX = tl.constexpr("""{
    mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$0, $1}, {$4}, {$8}, {$10, $10};
    mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$2, $3}, {$5}, {$8}, {$10, $10};
    mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$0, $1}, {$6}, {$9}, {$0, $1};
    mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$2, $3}, {$7}, {$9}, {$2, $3};
    }""")


@triton.jit
def nothing() -> Any:
    """Return an empty tuple to collect parts of any type in."""
    return ()


@triton.jit
def split4(x: tl.tensor) -> Any:
    """Split a tensor (..., 4) along its last axis into four tensors (...)."""
    even, odd = tl.split(tl.reshape(x, x.shape[:-1] + [2, 2]))  # noqa: RUF005 (Triton knows no starred lists)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def join4(x: tl.tensor) -> Any:
    """Join four tensors (...) along a new last axis to one of (..., 4)."""
    joined = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    return tl.reshape(joined, x[0].shape + [4])  # noqa: RUF005


@triton.jit
def mma(a: tl.tensor, b: tl.tensor, ISA: tl.constexpr) -> Any:
    """Return magic + (16 rows x 32 columns of signed bytes) x 8 tokens, by a warp's tensor cores or plain arithmetic.

    a and b are the operands of lane 4 r + j, as fragments of the PTX ISA. a has 4 words: columns 4 j .. 4 j + 3 of rows
    r and r + 8, then columns 16 further on of both rows. b has 2 words: the same columns of token r. The results are
    row r with tokens 2 j and 2 j + 1, then row r + 8. Threads are the last axis. On AMD cards all lanes of a row hold
    one token and get its sum.
    """
    if ISA >= 2:
        return tl.inline_asm_elementwise(
            MMA_PTX if ISA == 3 else TURING_MMA_PTX,
            "=r,=r,=r,=r,r,r,r,r,r,r,r" if ISA == 3 else "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            [a[0], a[1], a[2], a[3], b[0], b[1], MAGIC_BITS],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        upper = lane_sums(a[0], a[2], b[0], b[1], ISA)
        lower = lane_sums(a[1], a[3], b[0], b[1], ISA)
        return upper[0], upper[1], lower[0], lower[1]


@triton.jit
def lane_sums(low: tl.tensor, high: tl.tensor, x_low: tl.tensor, x_high: tl.tensor, ISA: tl.constexpr) -> Any:
    """Compute two of mma's results by plain arithmetic. low, high: (R, 1, T); x_low, x_high: (1, M, T)."""
    R: tl.constexpr = low.shape[0]
    M: tl.constexpr = x_low.shape[1]
    T: tl.constexpr = low.shape[2]
    if ISA == 1:
        sums = tl.reshape(dot4(low, x_low, dot4(high, x_high, 0, ISA), ISA), (R, M, T // 4, 4))
        total = tl.broadcast_to(tl.sum(sums, 3)[:, :, :, None], (R, M, T // 4, 4))
        total = tl.reshape(total, (R, M, T)) + MAGIC_BITS
        return total, total
    else:
        row: tl.constexpr = (R, 1, T // 32, 8, 1, 4)
        token: tl.constexpr = (1, M, T // 32, 1, 8, 4)
        sums = dot4(tl.reshape(high, row), tl.reshape(x_high, token), 0, ISA)
        sums = dot4(tl.reshape(low, row), tl.reshape(x_low, token), sums, ISA)
        return tl.split(tl.reshape(tl.sum(sums, 5), (R, M, T, 2)) + MAGIC_BITS)


@triton.jit
def dot4(words: tl.tensor, x: tl.tensor, total: tl.tensor, ISA: tl.constexpr) -> Any:
    """Multiply 4 signed bytes by 4 others, and return total + the sum of the products."""
    if ISA >= 2:
        return tl.inline_asm_elementwise(DOT4_PTX, "=r,r,r,r", [words, x, total], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for byte in tl.static_range(4):
            total += ((words << (24 - 8 * byte)) >> 24) * ((x << (24 - 8 * byte)) >> 24)
        return total


@triton.jit
def and_xor(words: tl.tensor, MASK: tl.constexpr, FLIP: tl.constexpr, ISA: tl.constexpr) -> Any:
    """Return (words & MASK) ^ FLIP in one instruction, where the assembler by itself would use two."""
    if ISA >= 2:
        return tl.inline_asm_elementwise(
            AND_XOR_PTX, "=r,r,r,r", [words, MASK, FLIP], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (words & MASK) ^ FLIP


@triton.jit
def linear_entries(words: tl.tensor, ISA: tl.constexpr) -> Any:
    """Unpack 8 codes to signed bytes 16 (code - 8): first those of the low nibbles, then those of the high ones."""
    NIBBLES: tl.constexpr = -0x0F0F0F10  # 0xF0F0F0F0
    SIGNS: tl.constexpr = -0x7F7F7F80  # 0x80808080
    return and_xor(words << 4, NIBBLES, SIGNS, ISA), and_xor(words, NIBBLES, SIGNS, ISA)


@triton.jit
def codebook_entries(words: tl.tensor, table: tl.tensor, ISA: tl.constexpr) -> Any:
    """Unpack 8 codes to table[code] in signed bytes: low nibbles, then high nibbles.

    `table` holds 16 entries in 4 words. A byte permutation selects 4 of 8 bytes by three bits of four adjacent nibbles:
    once from each half of the table, and once more to choose between the two by the fourth bit.
    """
    if ISA >= 2:
        return tl.inline_asm_elementwise(
            LOOKUP_PTX,
            "=r,=r,r,r,r,r,r",
            [words, table[0], table[1], table[2], table[3]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    elif ISA == 1:
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
    """Return table[code] for the codes in the low nibbles, as signed bytes."""
    selector = words & 0x07070707
    lower = gcn_permute(table[1], table[0], selector)
    upper = gcn_permute(table[3], table[2], selector)
    half = (words >> 3) & 0x01010101
    is_upper = (half << 8) - half
    return (lower & ~is_upper) | (upper & is_upper)


@triton.jit
def gcn_permute(upper: tl.tensor, lower: tl.tensor, selector: tl.tensor) -> Any:
    """Select 4 of the 8 bytes of two words: those of `lower` are 0 to 3, those of `upper` 4 to 7."""
    return tl.inline_asm_elementwise(
        "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [upper, lower, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def load_table(table_ptr: tl.tensor, zeros: tl.tensor, KIND: tl.constexpr) -> Any:
    """Load the codebook's 4 words into every thread, in the shape of `zeros`.

    `zeros` is 0, which the compiler must not know. It would keep values that all threads share in uniform registers,
    and copy them at every use.
    """
    if KIND == 1:
        at = table_ptr + zeros
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return 0, 0, 0, 0


@triton.jit
def load_words(at: tl.tensor, j: tl.tensor, mask: tl.tensor, KIND: tl.constexpr) -> Any:
    """Load the word of line j and what belongs to it, two words or the first one again.

    These are an int8 tile's second word, 16 columns further on, or the words with the row's high bits.
    """
    words = tl.load(at, mask=mask)
    if KIND == 2:
        return words, tl.load(at + 64, mask=mask), words
    elif KIND >= 4:
        high = tl.load(at + (64 - 16 * j), mask=mask)
        return words, high, tl.load(at + (80 - 16 * j), mask=mask) if KIND == 6 else high
    else:
        return words, words, words


@triton.jit
def wide_entries(words: tl.tensor, j: tl.tensor, KIND: tl.constexpr, ISA: tl.constexpr) -> Any:
    """Unpack 8 codes of 5 or 6 bits to signed bytes 8 (code - 16) or 4 (code - 32). words: see load_words."""
    SHIFT: tl.constexpr = 2 if KIND == 6 else 3
    LOW: tl.constexpr = 0x3C3C3C3C if KIND == 6 else 0x78787878
    HIGH: tl.constexpr = -0x3F3F3F40 if KIND == 6 else -0x7F7F7F80  # 0xC0C0C0C0 or 0x80808080
    SIGNS: tl.constexpr = -0x7F7F7F80
    first = words[1] << ((6 - 2 * j) if KIND == 6 else (7 - j))
    second = words[2] << ((6 - 2 * j) if KIND == 6 else (3 - j))
    low = (words[0] << SHIFT) & LOW
    high = (words[0] >> (4 - SHIFT)) & LOW
    return low | and_xor(first, HIGH, SIGNS, ISA), high | and_xor(second, HIGH, SIGNS, ISA)


@triton.jit
def loads_end(thread: tl.tensor, ISA: tl.constexpr) -> None:
    """Keep the assembler from moving loads that come before to where they are used, which saves registers, but waits.

    thread: (T,) int32 with one number per thread.
    """
    if ISA >= 2:
        tl.inline_asm_elementwise(WARP_BARRIER_PTX, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def entries(words: tl.tensor, j: tl.tensor, table: tl.tensor, KIND: tl.constexpr, ISA: tl.constexpr) -> Any:
    """Unpack what load_words returned: 4 columns from 4 j and 4 that are 16 further on, as bytes."""
    if KIND == 0 or KIND == 3:
        return linear_entries(words[0], ISA)
    elif KIND == 1:
        return codebook_entries(words[0], table, ISA)
    elif KIND == 2:
        return words[0], words[1]
    else:
        return wide_entries(words, j, KIND, ISA)


@triton.jit
def to_float(sums: tl.tensor) -> Any:
    """Convert integers whose sums started at MAGIC_BITS to fp32, exactly."""
    return sums.to(tl.float32, bitcast=True) - MAGIC


@triton.jit
def sum_slots(x: tl.tensor) -> Any:
    """Sum a tensor (A, B, 8) over its last axis, adjacent pairs first, to (A, B)."""
    for _ in tl.static_range(3):
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
        x = first + second
    return tl.reshape(x, (x.shape[0], x.shape[1]))
