"""Occupancy by hand, for a few kernels and cards."""

import pytest

from tests.gpu_compilation import CARD_CLASSES

CARDS = {card.name: card for card in CARD_CLASSES}


@pytest.mark.parametrize(
    ("card", "registers", "shared_bytes", "n_warps", "n_resident"),
    [
        ("sm_86", 32, 0, 4, 48),  # nothing limits: all warps
        ("sm_86", 128, 0, 4, 16),  # 65536 registers / (128 x 32)
        ("sm_86", 255, 0, 4, 8),
        ("sm_86", 40, 0, 4, 48),  # 16384 / 1280 = 12 a quarter
        ("sm_86", 41, 0, 4, 40),  # rounded up to 48: 10 a quarter
        ("sm_86", 16, 0, 1, 16),  # 16 programs at most
        ("sm_89", 16, 0, 1, 24),
        ("sm_86", 16, 49 * 1024, 4, 8),  # 100 KiB hold two programs of 50
        ("sm_86", 16, 50 * 1024, 4, 4),  # the system takes 1 KiB of each
        ("sm_75", 64, 0, 8, 32),
        ("sm_80", 64, 0, 8, 32),
        ("sm_90", 32, 0, 4, 64),
        ("gfx1100", 96, 0, 4, 16),  # 1536 / 96
        ("gfx1100", 97, 0, 4, 12),  # rounded up to 120
        ("sm_86", 255, 0, 16, 0),  # fits nowhere
    ],
)
def test_resident_warps(card: str, registers: int, shared_bytes: int, n_warps: int, n_resident: int) -> None:
    assert CARDS[card].n_resident_warps(registers, shared_bytes, n_warps) == n_resident
    assert CARDS[card].occupancy(registers, shared_bytes, n_warps) == n_resident / CARDS[card].max_warps
