"""Memory of freed arrays serves the next ones."""

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
def test_freed_memory_is_kept() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    _, returned, _, kept = map(int, found.split())
    assert returned > 1000 and kept < 100
