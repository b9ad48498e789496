"""Rotary positions as kv_write turns queries, against float64: 1e-6 of the largest value, at any position."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.kv_write import kv_write
from hetero_ee_kernels.pages import PAGE_TOKENS, new_pages
from hetero_ee_kernels.rope_table import rope_table
from tests.gpu_support import DEVICE, assert_same_bits, error, guarded_copy, int32, random

TOLERANCE = 1e-6
N_POSITIONS = 5000  # more than the table makes at a time
SHAPES = [(8, 4), (12, 3), (20, 5), (64, 32), (80, 10), (10, 5)]  # head_dim, pairs
MAGNITUDE = 1.2


def frequencies(n_pairs: int) -> list[float]:
    return [10000.0 ** (-pair / n_pairs) for pair in range(n_pairs)]


def expected(x: Any, positions: Any, n_pairs: int, head_dim: int, n_heads: int, bug: str = "") -> Any:
    """The turn as complex numbers, in float64 from the fp32 angle."""
    wanted = x.double().clone()
    heads = wanted[:, : n_heads * head_dim].view(len(x), n_heads, head_dim)
    angles = (positions.float()[:, None] * torch.tensor(frequencies(n_pairs), device=DEVICE)).double()
    if bug == "position":
        angles = angles.roll(1, 0)
    turn = torch.polar(torch.full_like(angles, MAGNITUDE), -angles if bug == "sign" else angles)[:, None]
    low, high = heads[..., :n_pairs].clone(), heads[..., n_pairs : 2 * n_pairs].clone()
    if bug == "pairs":
        low, high = heads[..., : 2 * n_pairs : 2].clone(), heads[..., 1 : 2 * n_pairs : 2].clone()
    turned = torch.complex(low, high) * turn
    heads[..., :n_pairs], heads[..., n_pairs : 2 * n_pairs] = turned.real, turned.imag
    return wanted


def table(n_pairs: int) -> Any:
    return rope_table(frequencies(n_pairs), MAGNITUDE, N_POSITIONS, DEVICE)


def turn(x: Any, positions: Any, turns: Any, n_heads: int, head_dim: int) -> None:
    """Turns n_heads queries in place; a key head and a value head follow them."""
    n_pages = -(-N_POSITIONS // PAGE_TOKENS)
    pages = new_pages((1, 1, head_dim), "fp32", n_pages, (1, n_pages), DEVICE)
    pages.table.copy_(torch.arange(n_pages)[None])  # programs of two positions must not write one slot
    first_key = n_heads * head_dim
    kv_write(x, pages, torch.zeros_like(positions), positions, 0, first_key, first_key + head_dim, rotary_table=turns)


@pytest.mark.parametrize(("head_dim", "n_pairs"), SHAPES)
def test_turns_and_touches_nothing_else(head_dim: int, n_pairs: int) -> None:
    x, positions = random(head_dim, 6, 5 * head_dim), int32(0, 1, 77, 4095, 4096, N_POSITIONS - 1)
    held = guarded_copy(x)
    turn(held.tensor, positions, table(n_pairs), 3, head_dim)
    after = held.check()
    wanted = expected(x, positions, n_pairs, head_dim, 3)
    assert error(after, wanted) <= TOLERANCE
    untouched = wanted.float() == x
    assert torch.equal(after[untouched], x[untouched]) and untouched[:, 3 * head_dim :].all()
    other = reference.rotated(x[:, : 3 * head_dim].view(6, 3, head_dim), positions, table(n_pairs)).flatten(1)
    assert error(other, wanted[:, : 3 * head_dim]) <= TOLERANCE


def test_bits_depend_on_the_row_alone() -> None:
    x, positions, turns = random(1, 16, 80), int32(*range(5, 21)), table(10)
    whole = x.clone()
    turn(whole, positions, turns, 2, 20)
    for m in range(1, 17):
        some = x[-m:].clone()
        turn(some, positions[-m:].clone(), turns, 2, 20)
        assert_same_bits(some, whole[-m:])


@pytest.mark.parametrize("bug", ["position", "sign", "pairs"])
def test_the_tolerance_catches(bug: str) -> None:
    x, positions = random(2, 3, 40), int32(3, 4, 9)
    found = x.clone()
    turn(found, positions, table(4), 3, 8)
    assert error(found, expected(x, positions, 4, 8, 3)) <= TOLERANCE
    assert error(found, expected(x, positions, 4, 8, 3, bug)) > 100 * TOLERANCE
