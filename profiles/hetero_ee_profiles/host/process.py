"""What the operating system says of this process: memory and cores."""

import sys

import psutil

from hetero_ee_profiles.host.cpu import cpu_info
from hetero_ee_profiles.host.host import this_host


def peak_memory_bytes() -> int:
    """Largest resident memory of this process since it started, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def physical_core_count() -> int:
    """Cores this process may use and a container's quota lets it keep busy; hardware threads of one core count once."""
    return cpu_info(this_host()).n_usable


def processor_count() -> int:
    """Hardware threads this process may use."""
    counts = this_host().core_counts()
    return max(counts.allowed or counts.logical or 1, physical_core_count())


def usable_threads(n_asked: int) -> int:
    """How many run: 0 asks for one on each physical core; more than there are processors would wait for each other."""
    return min(n_asked, processor_count()) if n_asked else physical_core_count()


def capped_threads(n_asked: int) -> str:
    """A sentence where fewer threads run than that, else nothing."""
    n_run = usable_threads(n_asked)
    if n_asked <= n_run:
        return ""
    return f"{n_asked} threads were asked for; {n_run} run, as many as this process has processors"


def surplus_threads(n_threads: int, n_cores: int) -> str:
    """A sentence where those are more threads than physical cores, else nothing."""
    if n_threads <= n_cores:
        return ""
    return f"{n_threads} threads on {n_cores} physical cores take turns; {n_cores} are usually faster"
