"""Detects that other programs ran while a profile was measured.

Signs are memory read rates that vary widely, rates far below the best known ones (if a program ran all the time), and
processor time that other programs used.
"""

from collections.abc import Mapping

from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile

BUSY_SHARE = 0.25  # share of all cores that other programs keep busy; a quiet desktop uses a tenth of one core
SLOW_SHARE = 0.7  # share of the highest memory read rate in any saved profile of this machine
BUSY_SPREAD = 0.25  # a wider p20 to p80 of the read bandwidth means that something else is running


def disturbance(profile: HardwareProfile) -> float:
    """Return the largest relative spread of memory read rates over all devices and thread counts."""
    return max(times.read_bytes_per_s.spread for times in _devices(profile))


def doubts(profile: HardwareProfile, busy_cores: float, best_bytes_per_s: Mapping[int, float]) -> tuple[str, ...]:
    """Return a phrase for each sign that other programs disturbed the measurement of a profile.

    Args:
        busy_cores: number of cores that other programs kept busy during the measurement.
        best_bytes_per_s: highest memory read rate known for this machine, by number of threads.
    """
    found, n_cores = disturbances(profile), profile.machine.n_cores
    if busy_cores > BUSY_SHARE * n_cores:
        found.append(f"other programs kept {busy_cores:.1f} of {n_cores} cores busy")
    for times in profile.cpu:
        now, best = times.read_bytes_per_s.value, best_bytes_per_s.get(times.threads, 0.0)
        if now < SLOW_SHARE * best:
            found.append(f"{_what(times)} at {now / 1e9:.1f} GB/s, earlier at {best / 1e9:.1f}")
    return tuple(found)


def disturbances(profile: HardwareProfile) -> list[str]:
    """Return a phrase for each device and thread count whose memory read rates vary too widely."""
    return [
        f"{_what(times)} at {times.read_bytes_per_s.p20 / 1e9:.1f} to {times.read_bytes_per_s.p80 / 1e9:.1f} GB/s"
        for times in _devices(profile)
        if times.read_bytes_per_s.spread > BUSY_SPREAD
    ]


def _devices(profile: HardwareProfile) -> list[DeviceTimes]:
    return [*profile.cpu, *([profile.gpu] if profile.gpu is not None else [])]


def _what(times: DeviceTimes) -> str:
    if not times.threads:
        return "the GPU's memory was copied"
    return f"with {times.threads} {'thread' if times.threads == 1 else 'threads'} memory was read"
