"""A mapped file that is cut short while it is read ends the process with a sentence and exit code 1."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_ee_cpu_ops.jit.bus_error import MESSAGE

PROGRAM = """
import mmap, os, sys
import numpy as np
from pathlib import Path
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee_cpu_ops.jit.bus_error import report_bus_errors
use_kernel_cache(Path(os.environ["HETERO_EE_CACHE_DIR"]))
report_bus_errors()
with open(sys.argv[1], "r+b") as file:
    values = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    print(values.sum(), flush=True)
    file.truncate(0)
    print(values.sum())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="this system has no SIGBUS")
@pytest.mark.sample(0)
def test_a_file_cut_short(tmp_path: Path, kernels: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * 2**16)
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(file)], capture_output=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, b"65536\n", MESSAGE)


STREAM = """
import os, sys
from pathlib import Path
from hetero_ee import Engine
with Engine.from_pretrained(sys.argv[1], quantizer=sys.argv[2], profile="off", threads=1) as engine:
    tokens = engine.stream("Once upon a time", max_new_tokens=50)
    next(tokens)
    for file in map(Path, sys.argv[3:]):
        for weights in [file] if file.is_file() else file.rglob("weights.bin"):
            os.truncate(weights, 0)
    list(tokens)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="this system has no SIGBUS")
@pytest.mark.parametrize("quantizer", ["rtn", "none"])
@pytest.mark.sample(0)
def test_weights_cut_short_during_a_stream_of_the_library(own_tiny: Path, cache: Path, quantizer: str) -> None:
    files = [str(own_tiny / "model.safetensors"), str(cache / "stores")]
    command = [sys.executable, "-c", STREAM, str(own_tiny), quantizer, *files]
    ran = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert ran.returncode == 1 and ran.stderr.endswith(MESSAGE), ran.stderr
