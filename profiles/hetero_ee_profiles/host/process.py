"""Asks the operating system for this process's memory and cores."""

import sys

import psutil

from hetero_ee_profiles.host.cpu import cpu_info
from hetero_ee_profiles.host.host import this_host


def peak_memory_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def physical_core_count() -> int:
    """Return the number of physical cores that this process may use, within a container's quota."""
    return cpu_info(this_host()).n_usable


def processor_count() -> int:
    """Return the number of hardware threads that this process may use."""
    counts = this_host().core_counts()
    return max(counts.allowed or counts.logical or 1, physical_core_count())


def usable_threads(n_asked: int) -> int:
    """Limit a thread count to the hardware threads that this process may use; 0 means one per physical core."""
    return min(n_asked, processor_count()) if n_asked else physical_core_count()


def capped_threads(n_asked: int) -> str:
    """Return a warning if fewer threads than n_asked will run, else ""."""
    n_run = usable_threads(n_asked)
    if n_asked <= n_run:
        return ""
    return f"{n_asked} threads were requested, but this process has only {n_run} processors; {n_run} threads run"


def surplus_threads(n_threads: int, n_cores: int) -> str:
    """Return a warning if there are more threads than physical cores, else ""."""
    if n_threads <= n_cores:
        return ""
    return f"{n_threads} threads share {n_cores} physical cores; {n_cores} threads are usually faster"
