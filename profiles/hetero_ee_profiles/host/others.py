"""Measures how much of the processor other programs use while this one works."""

import time

import psutil


class OtherPrograms:
    """Counts the processor time of all other programs since its creation."""

    def __init__(self) -> None:
        self._start_s = _times_s()

    def busy_cores(self) -> float:
        """Return how many cores the other programs have kept busy on average."""
        wall_s, all_s, own_s = (now - then for now, then in zip(_times_s(), self._start_s, strict=True))
        return max(0.0, all_s - own_s) / max(wall_s, 1e-9)


def _times_s() -> tuple[float, float, float]:
    """Return wall-clock seconds, processor seconds of all programs, and processor seconds of this program.

    Times of virtual machines (guest) are skipped, because user time already contains them.
    """
    counted = psutil.cpu_times()._asdict()
    left_out = ("idle", "iowait", "guest", "guest_nice")
    own = psutil.Process().cpu_times()
    all_s = sum(seconds for name, seconds in counted.items() if name not in left_out)
    return time.monotonic(), all_s, own.user + own.system
