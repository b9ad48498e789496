"""Memory of freed arrays serves the next ones."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from hetero_ee_cpu_ops.heap import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.empty(3 * 2**20, np.uint8) for _ in range(2)]
    for array in arrays:
        array.fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(pages(), pages())
keep_freed_memory()
print(pages(), pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.parametrize("settings", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}])
def test_freed_memory_is_kept_unless_users_set_the_thresholds(settings: dict[str, str]) -> None:
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=others | settings).stdout
    _, returned, _, kept = map(int, found.split())
    assert returned > 1000 and (kept > 1000 if settings else kept < 100)
