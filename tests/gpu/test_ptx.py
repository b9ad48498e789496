"""The inline PTX, which no interpreter runs: its text executed here by the definitions of the PTX manual (sections on
dp4a, lop3, prmt, and, shr; of matrix products in gpu_fragments.py), against what it stands for."""

import random
import re

import numpy as np
import pytest

from tests.gpu_fragments import run_warp

pytest.importorskip("triton")

from hetero_ee_kernels.tile_group import AND_XOR_PTX, DOT4_PTX, LOOKUP_PTX, MAGIC_BITS, MMA_PTX, TURING_MMA_PTX

WORD = 2**32 - 1


def signed_bytes(word: int) -> list[int]:
    return [(byte ^ 128) - 128 for byte in word.to_bytes(4, "little")]


def dp4a(a: int, b: int, c: int) -> int:
    return (c + sum(x * y for x, y in zip(signed_bytes(a), signed_bytes(b), strict=True))) & WORD


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Bit i of the result is bit 4a + 2b + c of the table."""
    bits = [(table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)]
    return sum(bits)


def prmt(a: int, b: int, selector: int) -> int:
    """Nibble i of the selector takes one of 8 bytes for byte i; its highest bit would repeat that byte's sign."""
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    chosen = []
    for nibble in (selector >> 4 * i & 15 for i in range(4)):
        byte = pool[nibble & 7]
        chosen.append(byte if nibble < 8 else 255 * (byte >> 7))
    return int.from_bytes(bytes(chosen), "little")


OPERATIONS = {
    "dp4a.s32.s32": dp4a,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, n: a >> n,
}


def run(text: str, n_outputs: int, *inputs: int) -> list[int]:
    """The outputs $0.. of the instructions; inputs are the operands after them. `shr.b32` shifts in zeros."""
    registers = {f"${n_outputs + place}": value for place, value in enumerate(inputs)}
    for name, operands in re.findall(r"^\s*\{?\s*([a-z][\w.]*) ([^;{}]+);", text, re.MULTILINE):
        if name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        registers[target] = OPERATIONS[name](*values)
    return [registers[f"${place}"] for place in range(n_outputs)]


def words(seed: int, n: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.getrandbits(32) for _ in range(n)] for _ in range(200)]


def test_dot4() -> None:
    for a, b, c in words(0, 3):
        assert run(DOT4_PTX.value, 1, a, b, c) == [dp4a(a, b, c)]
    assert dp4a(0x80_01_FF_7F, 0x7F_02_03_04, 5) == (5 + 4 * 127 - 3 + 2 - 128 * 127) & WORD


def test_and_xor() -> None:
    for a, b, c in words(1, 3):
        assert run(AND_XOR_PTX.value, 1, a, b, c) == [(a & b) ^ c]


def test_lookup() -> None:
    for codes, *table in words(2, 5):
        entries = b"".join(word.to_bytes(4, "little") for word in table)
        nibbles = [codes >> 4 * i & 15 for i in range(8)]
        expected = [bytes(entries[code] for code in nibbles[half::2]) for half in (0, 1)]
        assert run(LOOKUP_PTX.value, 2, codes, *table) == [int.from_bytes(word, "little") for word in expected]


@pytest.mark.parametrize("change", [("0x32103210", "0x32103211"), ("prmt.b32 a, $3, $4", "prmt.b32 a, $4, $3")])
def test_a_changed_lookup_is_seen(change: tuple[str, str]) -> None:
    text = LOOKUP_PTX.value
    assert change[0] in text
    differs = [run(text, 2, *row) != run(text.replace(*change), 2, *row) for row in words(3, 5)]
    assert sum(differs) > 100


def fragments(seed: int) -> list[np.ndarray]:
    """mma's inputs: 4 words of a, 2 of b and the constant, of each lane."""
    source = np.random.default_rng(seed)
    return [*source.integers(-(2**31), 2**31, (6, 32)), np.full(32, MAGIC_BITS.value)]


def sum_of_lane(inputs: list[np.ndarray], row: int, is_lower: bool, token: int) -> int:
    """What the kernel takes mma to give: the four lanes of a row and the four of a token, word by word."""
    *a, low, high, start = inputs
    total = int(start[0])
    for j in range(4):
        total = dp4a(int(a[is_lower][4 * row + j]) & WORD, int(low[4 * token + j]) & WORD, total)
        total = dp4a(int(a[2 + is_lower][4 * row + j]) & WORD, int(high[4 * token + j]) & WORD, total)
    return total


@pytest.mark.parametrize("text", [MMA_PTX.value, TURING_MMA_PTX.value], ids=["sm_80", "sm_75"])
def test_mma(text: str) -> None:
    """A lane's words of a tile's line are its fragment, and its sums those of row r and tokens 2 j, 2 j + 1."""
    for seed in range(3):
        inputs = fragments(seed)
        found = run_warp(text, 4, inputs)
        for lane in range(32):
            row, j = divmod(lane, 4)
            for place in range(4):
                expected = sum_of_lane(inputs, row, place >= 2, 2 * j + place % 2)
                assert int(found[place][lane]) & WORD == expected


@pytest.mark.parametrize("change", [("{$4}, {$8}", "{$4}, {$9}"), ("{$6}, {$9}, {$0, $1}", "{$6}, {$9}, {$10, $10}")])
def test_a_changed_mma_is_seen(change: tuple[str, str]) -> None:
    text, inputs = TURING_MMA_PTX.value, fragments(4)
    assert change[0] in text
    assert (np.array(run_warp(text, 4, inputs)) != np.array(run_warp(text.replace(*change), 4, inputs))).sum() > 30
