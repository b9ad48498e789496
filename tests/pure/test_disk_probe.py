"""Reading a file from the disk, by a clock that counts."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_ee_profiles import disk_probe
from hetero_ee_profiles.disk_probe import probe_disk_bytes_per_s

PIECE = 1000


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(disk_probe, "MAX_BYTES", 10 * PIECE)


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that is ahead by that much at each look."""
    times = itertools.count()
    return lambda: next(times) * step_s


def rates(folder: Path, n_bytes: int, step_s: float = 0.01) -> list[float]:
    (folder / "file").write_bytes(bytes(n_bytes))
    return probe_disk_bytes_per_s(folder / "file", ticking(step_s))


@pytest.mark.parametrize(
    "n_bytes, n_rates",
    [(0, 0), (1, 1), (PIECE - 1, 1), (PIECE, 1), (3 * PIECE, 3), (3 * PIECE + 5, 3), (99 * PIECE, 10)],
)
def test_whole_pieces_count_and_of_a_short_file_what_there_is(
    pieces: None, tmp_path: Path, n_bytes: int, n_rates: int
) -> None:
    assert rates(tmp_path, n_bytes) == pytest.approx([min(n_bytes, PIECE) / 0.01] * n_rates)


def test_a_slow_disk_is_read_for_a_second(pieces: None, tmp_path: Path) -> None:
    """Three looks at the clock a piece: whether to go on (after 0.1, 0.4, 0.7 and 1.0 s), before it and after it."""
    assert len(rates(tmp_path, 99 * PIECE, 0.1)) == 3


def test_a_clock_that_stands_still_gives_finite_rates(pieces: None, tmp_path: Path) -> None:
    assert all(0 < rate < 1e15 for rate in rates(tmp_path, PIECE, 0.0))


def test_what_can_not_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError):
            probe_disk_bytes_per_s(path, ticking(0.1))
