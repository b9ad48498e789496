"""Reads resource limits of a container or service from Linux control groups, versions 1 and 2."""

from collections.abc import Iterator
from dataclasses import dataclass

from hetero_ee_profiles.host.host import Host

ROOT = "/sys/fs/cgroup"
RECLAIMABLE = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")  # in versions 2 and 1
UNLIMITED_BYTES = 2**60  # version 1 reports "no limit" as an enormous number


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of a control group. A field is None if there is no limit."""

    cores: float | None  # CPU time per wall time
    memory_bytes: int | None
    free_bytes: int | None = None  # unused part of memory_bytes; cached files count as unused


def cgroup_limits(host: Host) -> CgroupLimits:
    """Return the lowest limits of this process's control group and its parents."""
    cores = [limit for folder in _folders(host, "cpu") if (limit := _cores(host, folder)) is not None]
    memory = {
        folder: limit for folder in _folders(host, "memory") if (limit := _memory_bytes(host, folder)) is not None
    }
    free = [max(0, limit - _used_bytes(host, folder)) for folder, limit in memory.items()]
    return CgroupLimits(min(cores, default=None), min(memory.values(), default=None), min(free, default=None))


def _folders(host: Host, controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and its parents, in every hierarchy with the controller.

    In a container, the path may be the host's although only its root is mounted; missing folders are harmless.
    """
    for line in (host.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [ROOT, f"{ROOT}/unified"]
        elif controller in controllers.split(","):
            bases = [f"{ROOT}/{controller}", f"{ROOT}/{controllers}"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            yield from ("/".join([base, *parts[:depth]]) for depth in range(len(parts), -1, -1))


def _cores(host: Host, folder: str) -> float | None:
    quota, _, period = (host.text(f"{folder}/cpu.max") or "").strip().partition(" ")
    if not quota:
        quota = (host.text(f"{folder}/cpu.cfs_quota_us") or "").strip()
        period = (host.text(f"{folder}/cpu.cfs_period_us") or "").strip()
    if not (quota.isdecimal() and period.isdecimal()) or int(quota) == 0 or int(period) == 0:
        return None  # "max", or -1
    return int(quota) / int(period)


def _memory_bytes(host: Host, folder: str) -> int | None:
    text = (host.text(f"{folder}/memory.max") or host.text(f"{folder}/memory.limit_in_bytes") or "").strip()
    return int(text) if text.isdecimal() and 0 < int(text) < UNLIMITED_BYTES else None


def _used_bytes(host: Host, folder: str) -> int:
    """Return the group's memory in use, without cached files; 0 if unknown."""
    text = (host.text(f"{folder}/memory.current") or host.text(f"{folder}/memory.usage_in_bytes") or "").strip()
    lines = (line.split() for line in (host.text(f"{folder}/memory.stat") or "").splitlines())
    parts = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
    totals = [name for name in RECLAIMABLE if f"total_{name}" not in parts]  # version 1 has both, totals with subgroups
    return max(0, int(text) - sum(parts.get(name, 0) for name in totals)) if text.isdecimal() else 0
