"""A mapped file that is cut short while it is read ends the process with a sentence and exit code 1."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_ee_cpu_ops.bus_error import MESSAGE

PROGRAM = """
import mmap, os, sys
import numpy as np
from pathlib import Path
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee_cpu_ops.bus_error import report_bus_errors
use_kernel_cache(Path(os.environ["HETERO_EE_CACHE_DIR"]))
report_bus_errors()
with open(sys.argv[1], "r+b") as file:
    values = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    print(values.sum(), flush=True)
    file.truncate(0)
    print(values.sum())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="this system has no SIGBUS")
def test_a_file_cut_short(tmp_path: Path, kernels: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * 2**16)
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(file)], capture_output=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, b"65536\n", MESSAGE)
