"""What the operating system says of this process: memory and cores."""

import sys

import psutil


def peak_memory_bytes() -> int:
    """Largest resident memory of this process since it started, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def physical_core_count() -> int:
    """Cores this process may use, counting two hardware threads of one core as one; at least 1."""
    usable = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    return max(1, min(psutil.cpu_count(logical=False) or 1, usable or 1))
