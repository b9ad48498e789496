"""Memory of the machine, and how much of it this process may have."""

from dataclasses import dataclass

from hetero_ee_profiles.host.cgroup import cgroup_limits
from hetero_ee_profiles.host.host import Host


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of the machine and of this process's container."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    limit_bytes: int | None  # a container's limit, None without one
    huge_pages: str | None  # "always", "madvise" or "never"; None: unknown

    @property
    def usable_bytes(self) -> int:
        """What this process can hold at most."""
        return min(self.total_bytes, self.limit_bytes or self.total_bytes)


def memory_info(host: Host) -> MemoryInfo:
    """From /proc/meminfo, elsewhere from psutil."""
    fields = _meminfo(host.text("/proc/meminfo") or "")
    limit = cgroup_limits(host).memory_bytes
    pages = _chosen(host.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    if {"MemTotal", "MemAvailable"} <= fields.keys():
        return MemoryInfo(fields["MemTotal"], fields["MemAvailable"], fields.get("SwapTotal", 0), limit, pages)
    counts = host.memory_counts()
    return MemoryInfo(counts.total, counts.available, counts.swap, limit, pages)


def _meminfo(text: str) -> dict[str, int]:
    """Name to bytes."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _chosen(text: str) -> str | None:
    """The word in brackets."""
    _, _, rest = text.partition("[")
    word, bracket, _ = rest.partition("]")
    return word if bracket and word else None
