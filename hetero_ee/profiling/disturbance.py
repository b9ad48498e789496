"""Detects that another program ran while a profile was measured: the memory read rates then vary widely."""

from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile

BUSY_SPREAD = 0.25  # a wider p20 to p80 of the read bandwidth means that something else is running


def disturbance(profile: HardwareProfile) -> float:
    """Return the largest relative spread of memory read rates over all devices and thread counts."""
    return max(times.read_bytes_per_s.spread for times in _devices(profile))


def is_disturbed(profile: HardwareProfile) -> bool:
    return disturbance(profile) > BUSY_SPREAD


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
