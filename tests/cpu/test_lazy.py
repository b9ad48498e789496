"""Nothing compiles at import; an entry's signature refuses what it doesn't fit; first calls from many threads agree."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from numba import types

from hetero_ee_cpu_ops.lazy import Chunk, array_in, array_out, entry

MODULES = "activate argmax attention embed exit_confidence kv_write norm places rope simd_float simd_tuples"


def test_import_compiles_nothing():
    program = f"""
import importlib, numba.core.compiler as compiler
def refuse(*_): raise AssertionError("compiled at import")
compiler.compile_extra = refuse
for name in {MODULES.split()}: importlib.import_module("hetero_ee_cpu_ops." + name)
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr


@entry(types.int64(array_in(types.float32, 1), array_out(types.float32, 1)))
def _double(x, out):
    for i in range(x.size):
        out[i] = 2 * x[i]
    return x.size


def test_signature_is_held():
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    assert _double(x, out) == 4 and (out == 2 * x).all()
    x.flags.writeable = False
    assert _double(x, out) == 4
    for bad in ((x, x), (x.astype(np.float64), out), (x[::2], out), (x[None], out), (x,), (None, out)):
        with pytest.raises(ValueError, match="don't fit"):
            _double(*bad)


def _nothing(arguments, index):
    pass


def test_first_use_from_many_threads():
    chunk, found = Chunk(_nothing), []
    threads = [threading.Thread(target=lambda: found.append(chunk.address)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 8 and found[0] != 0
