"""Compares single instructions with exact arithmetic on Python integers and fractions, and tests every PtxError."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hetero_ee_kernels.tile_group import MMA_PTX
from tests.gpu.ptx.machine import Machine
from tests.gpu.ptx.memory import GlobalMemory
from tests.gpu.ptx.parsing import PtxError
from tests.gpu.ptx.translation import translated
from tests.gpu_fragments import run_warp

N = 64  # threads per program
MODULE = """.visible .entry k(.param .u64 p) .reqntid {n} {{
.reg .b32 %r<40>; .reg .b64 %d<40>; .reg .b16 %h<9>; .reg .pred %p<9>;
.shared .align 16 .b8 shared[512];
mov.u32 %r30, %tid.x; mul.wide.u32 %d30, %r30, 8; ld.param.b64 %d31, [p];
mad.lo.s32 %r31, %r30, 4, shared; setp.lt.s32 %p8, %r30, 7;
add.s64 %d32, %d31, %d30;
{body}
ret; }}"""


def execute(body: str, words: Any, n_programs: int = 1) -> Any:
    """Execute programs of N threads on an array of 64-bit words, and return the words afterwards.

    Args:
        body: PTX instructions. In them, %d31 is the array's address, %d32 the address of the thread's first word, %r30
            the thread's number, and %r31 the address of the thread's word in shared memory.
    """
    held = torch.from_numpy(np.asarray(words).astype(np.uint64).view(np.int64))
    memory = GlobalMemory([held])
    values = {"p": np.uint64(memory.address(held.data_ptr())).tobytes()}
    Machine(translated(MODULE.format(n=N, body=body)), (n_programs, 1, 1), values, memory, 0).run()
    return held.numpy().view(np.uint64)


def applied(instruction: str, *operands: Any) -> list[int]:
    """Apply an instruction to operands %r0, %r1, and so on. Return %d9 if it writes that register, else %r9."""
    words, rows = np.array(operands, np.uint64), range(len(operands))
    loads = "".join(f"ld.global.b64 %d{row}, [%d32+{8 * N * row}]; cvt.u32.u64 %r{row}, %d{row};" for row in rows)
    result = "" if "%d9" in instruction else "cvt.u64.u32 %d9, %r9;"
    return [int(word) for word in execute(f"{loads} {instruction}; {result} st.global.b64 [%d32], %d9;", words)[0]]


def bits(values: Any) -> list[int]:
    return [int(word) for word in np.asarray(values, np.float32).view(np.uint32)]


def signed(word: int, n_bits: int = 32) -> int:
    return (word & (1 << n_bits) - 1) - ((word >> n_bits - 1 & 1) << n_bits)


RANDOM = np.random.default_rng(0)
A, B, C = RANDOM.integers(0, 2**32, (3, N)).tolist()
A[:4], B[:4] = [0, 2**31, 2**32 - 1, 1], [2**32 - 1, 2**31, 1, 2**32 - 1]
INTEGERS: dict[str, Callable[[int, int, int], int]] = {
    "add.s32 %r9, %r0, %r1": lambda a, b, c: a + b,
    "sub.s32 %r9, %r0, %r1": lambda a, b, c: a - b,
    "mul.lo.s32 %r9, %r0, %r1": lambda a, b, c: a * b,
    "mad.lo.s32 %r9, %r0, %r1, %r2": lambda a, b, c: a * b + c,
    "mul.hi.u32 %r9, %r0, %r1": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %r9, %r0, %r1": lambda a, b, c: signed(a) * signed(b) >> 32,
    "div.s32 %r9, %r0, 7": lambda a, b, c: math.trunc(Fraction(signed(a), 7)),
    "shl.b32 %r9, %r0, %r1": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 %r9, %r0, 5": lambda a, b, c: a >> 5,
    "shr.s32 %r9, %r0, 5": lambda a, b, c: signed(a) >> 5,
    "min.s32 %r9, %r0, %r1": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %r9, %r0, %r1": lambda a, b, c: max(a, b),
    "bfe.s32 %r9, %r0, 3, 9": lambda a, b, c: signed(a >> 3, 9),
    "bfe.u32 %r9, %r0, 3, 9": lambda a, b, c: a >> 3 & 511,
    "setp.lt.s32 %p0, %r0, %r1; selp.b32 %r9, 1, 2, %p0": lambda a, b, c: 1 if signed(a) < signed(b) else 2,
    "setp.gt.u32 %p0, %r0, %r1; @!%p0 mov.b32 %r0, 5; mov.b32 %r9, %r0": lambda a, b, c: a if a > b else 5,
    "st.shared.b32 [%r31], %r0; ld.shared.s8 %h0, [%r31+1]; cvt.s32.s16 %r9, %h0": lambda a, b, c: signed(a >> 8, 8),
    "cvt.s8.s32 %h0, %r0; cvt.s32.s8 %r9, %h0": lambda a, b, c: signed(a, 8),
}
"""Instructions on words a, b, c, with their exact results modulo 2^32."""
for _table in (0x6A, 0x96, 0xE2, 0x01, 0xFE):
    INTEGERS[f"lop3.b32 %r9, %r0, %r1, %r2, {_table}"] = lambda a, b, c, table=_table: sum(
        (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)
    )


@pytest.mark.sample(99)
@pytest.mark.parametrize("instruction", INTEGERS)
def test_integers(instruction: str) -> None:
    found = applied(instruction, A, B, C)
    assert found == [INTEGERS[instruction](*row) % 2**32 for row in zip(A, B, C, strict=True)]


@pytest.mark.parametrize("selector", [None, 0x3210, 0x7654, 0x1BA9])
def test_prmt(selector: int | None) -> None:
    found = applied(f"prmt.b32 %r9, %r0, %r1, {'%r2' if selector is None else selector}", A, B, C)
    for a, b, chosen, word in zip(A, B, C if selector is None else [selector] * N, found, strict=True):
        pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        nibbles = [chosen >> 4 * i & 15 for i in range(4)]
        expected = [pool[n] if n < 8 else 255 * (pool[n & 7] >> 7) for n in nibbles]
        assert word == int.from_bytes(bytes(expected), "little")


def test_dp4a() -> None:
    found = applied("dp4a.s32.s32 %r9, %r0, %r1, %r2", A, B, C)
    for a, b, c, word in zip(A, B, C, found, strict=True):
        assert word == (c + sum(signed(a >> 8 * i, 8) * signed(b >> 8 * i, 8) for i in range(4))) % 2**32


FLOATS = [np.float32(value) for value in RANDOM.standard_normal(N - 4)] + [np.float32(x) for x in (1, -1, 2**-60, 3e30)]


def nearest(value: Fraction) -> int:
    """Return the bits of the normal fp32 nearest to a fraction, ties to even."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 24
    exponent += abs(value) >= Fraction(2) ** (exponent + 24)
    return bits([math.ldexp(round(value / Fraction(2) ** exponent), exponent)])[0]


@pytest.mark.sample(99)
@pytest.mark.parametrize(
    ("instruction", "exact"),
    [
        ("add.rn.f32 %r9, %r0, %r1", lambda a, b, c: a + b),
        ("mul.rn.f32 %r9, %r0, %r1", lambda a, b, c: a * b),
        ("fma.rn.f32 %r9, %r0, %r1, %r2", lambda a, b, c: a * b + c),
        ("div.rn.f32 %r9, %r0, %r1", lambda a, b, c: a / b),
        ("max.f32 %r9, %r0, %r1, %r2", lambda a, b, c: max(a, b, c)),
    ],
)
def test_floats_are_rounded_once(instruction: str, exact: Any) -> None:
    a, b, c = FLOATS, FLOATS[::-1], [np.float32(-x * y) for x, y in zip(FLOATS, FLOATS[::-1], strict=True)]
    found = applied(instruction, bits(a), bits(b), bits(c))
    for row, word in zip(zip(a, b, c, strict=True), found, strict=True):
        assert word == nearest(exact(*(Fraction(float(value)) for value in row))), row


def test_conversions_to_integers() -> None:
    given = [0.5, 1.5, -2.5, 1e20, -1e20, math.nan] + [float(value) * 128 for value in FLOATS[6:]]
    for value, word in zip(given, applied("cvt.rzi.s32.f32 %r9, %r0", bits(given)), strict=True):
        assert signed(word) == (0 if math.isnan(value) else max(-(2**31), min(2**31 - 1, math.trunc(value))))


@np.errstate(over="ignore")
def test_halves_and_pairs() -> None:
    floats = np.array(FLOATS)
    found = applied("cvt.rn.f16.f32 %h0, %r0; cvt.f32.f16 %r9, %h0", bits(floats))
    assert found == bits(floats.astype(np.float16))
    pairs = applied("mov.b64 %d0, {%r0, %r1}; mul.rn.f32x2 %d9, %d0, %d0", bits(floats), bits(floats[::-1]))
    squares = bits(np.square(floats))
    assert pairs == [low | high << 32 for low, high in zip(squares, squares[::-1], strict=True)]


def test_mma_has_the_manuals_fragments() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, (7, 32))
    expected = run_warp(MMA_PTX.value, 4, [*words.astype(np.uint32).view(np.int32).astype(np.int64)])
    text = re.sub(r"\$(\d+)", lambda number: f"%r{(int(number[1]) + 10) % 14}", MMA_PTX.value)  # $4 becomes %r0
    for place in range(4):
        found = applied(f"{text} mov.b32 %r9, %r{10 + place}", *np.tile(words, 2))
        assert found[:32] == np.asarray(expected[place]).astype(np.uint32).tolist()


def test_mma_of_halves_has_the_manuals_fragments() -> None:
    """Small integers, whose sums are exact: lane 4 r + j has words j and j + 4 of rows r and r + 8."""
    a, b = RANDOM.integers(-9, 9, (16, 16)).astype(np.float16), RANDOM.integers(-9, 9, (16, 8)).astype(np.float16)
    pairs, columns = a.view(np.uint32), np.ascontiguousarray(b.T).view(np.uint32)  # (16, 8), (8, 8)
    lanes = [(lane // 4, lane % 4) for lane in range(32)]
    words = [[pairs[r + 8 * (p % 2), j + 4 * (p // 2)] for r, j in lanes] for p in range(4)]
    words += [[columns[r, j + 4 * p] for r, j in lanes] for p in range(2)]
    product = "mov.b32 %r8, 0; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    product += " {%r10, %r11, %r12, %r13}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r8, %r8, %r8, %r8};"
    for place in range(4):
        found = applied(f"{product} mov.b32 %r9, %r{10 + place}", *np.tile(words, 2))[:32]
        assert found == bits([(a @ b)[r + 8 * (place // 2), 2 * j + place % 2] for r, j in lanes])


@pytest.mark.parametrize("lane", [0, 5, 31])
def test_shuffles(lane: int) -> None:
    body = f"shfl.sync.bfly.b32 %r9, %r0, {lane}, 31, -1"
    assert applied(body, A) == [A[thread ^ lane] for thread in range(N)]
    body = f"shfl.sync.up.b32 %r9, %r0, {lane}, 0, -1"
    assert applied(body, A) == [A[thread - lane if thread % 32 >= lane else thread] for thread in range(N)]


SHARE = "st.shared.b32 [%r31], %r30; {} xor.b32 %r31, %r31, 252; ld.shared.b32 %r9, [%r31];"
ERRORS = {
    "outside of global": f"ld.global.b64 %d9, [%d32+{8 * N * 4}];",
    "outside of shared": "ld.shared.b32 %r9, [%r31+512];",
    "misaligned": "ld.global.b64 %d9, [%d32+4];",
    "has written": "ld.shared.b32 %r9, [%r31];",
    "have not written": "@%p8 bra $L__BB0_1; mov.b32 %r9, 1; $L__BB0_1: cvt.u64.u32 %d9, %r9;",
    "without a barrier": SHARE.format(""),
    "different values": "st.global.b32 [%d31], %r30;",
    "diverged": "@%p8 bra $L__BB0_1; shfl.sync.bfly.b32 %r9, %r30, 1, 31, -1; $L__BB0_1: mov.b32 %r9, 1;",
    "barrier that not all": "@%p8 bra $L__BB0_1; bar.sync 0; $L__BB0_1: mov.b32 %r9, 1;",
    "division by 0": "div.u32 %r9, %r30, %r30;",
    "not translated": "wgmma.fence.sync.aligned;",
}


@pytest.mark.sample(99)
@pytest.mark.parametrize("message", ERRORS)
def test_errors_are_reported(message: str) -> None:
    with pytest.raises(PtxError, match=message):
        execute(ERRORS[message], np.zeros((4, N), np.uint64))


def test_a_barrier_orders_accesses() -> None:
    stored = execute(SHARE.format("bar.sync 0;") + "cvt.u64.u32 %d9, %r9; st.global.b64 [%d32], %d9;", np.zeros((4, N)))
    assert (stored[0] == np.arange(N)[::-1]).all()


def test_programs_of_a_launch_race() -> None:
    with pytest.raises(PtxError, match="without a barrier"):
        execute("st.global.b32 [%d32], %r30; ld.global.b32 %r9, [%d32];", np.zeros((4, N)), n_programs=2)
