"""Describes the machine's memory, and how much of it this process may use."""

from dataclasses import dataclass

from hetero_ee_profiles.host.cgroup import cgroup_limits
from hetero_ee_profiles.host.host import Host


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of the machine, and the limit of this process's container."""

    total_bytes: int
    available_bytes: int  # to this process: the machine's, within a container's limit
    swap_total_bytes: int
    limit_bytes: int | None  # a container's limit, None without one
    huge_pages: str | None  # "always", "madvise" or "never"; None if unknown

    @property
    def usable_bytes(self) -> int:
        """Bytes of memory that this process may use at most."""
        return min(self.total_bytes, self.limit_bytes or self.total_bytes)


def memory_info(host: Host) -> MemoryInfo:
    """Describe the memory from /proc/meminfo, or from psutil on other systems."""
    fields = _meminfo(host.text("/proc/meminfo") or "")
    limits = cgroup_limits(host)
    pages = _chosen(host.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    if {"MemTotal", "MemAvailable"} <= fields.keys():
        total, available, swap = fields["MemTotal"], fields["MemAvailable"], fields.get("SwapTotal", 0)
    else:
        counts = host.memory_counts()
        total, available, swap = counts.total, counts.available, counts.swap
    if limits.free_bytes is not None:
        available = min(available, limits.free_bytes)
    return MemoryInfo(total, available, swap, limits.memory_bytes, pages)


def _meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo into bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _chosen(text: str) -> str | None:
    """Return the word in brackets, which is how Linux marks the chosen one of several settings."""
    _, _, rest = text.partition("[")
    word, bracket, _ = rest.partition("]")
    return word if bracket and word else None
