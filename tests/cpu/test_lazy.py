"""Nothing compiles at import; an entry's signature refuses what it doesn't fit; first calls from many threads agree."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import types

import hetero_ee_cpu_ops
from hetero_ee.runtime import kernel_cache
from hetero_ee_cpu_ops.jit.lazy import Chunk, array_in, array_out, entry


@pytest.mark.sample(0)
def test_import_compiles_nothing():
    program = """
import importlib, pkgutil, numba.core.compiler as compiler, hetero_ee_cpu_ops as ops
def refuse(*_): raise AssertionError("compiled at import")
compiler.compile_extra = refuse
names = [module.name for module in pkgutil.walk_packages(ops.__path__, "hetero_ee_cpu_ops.")]
for name in names: importlib.import_module(name)
assert "hetero_ee_cpu_ops.simd.floats" in names
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
        with pytest.raises(ValueError, match="do not"):
            _double(*bad)


def test_an_edit_in_any_room_leaves_the_kernel_cache_unused(tmp_path, monkeypatch):
    """Numba overlooks edits to imported modules, such as those of simd/."""
    package = tmp_path / "hetero_ee_cpu_ops"
    shutil.copytree(Path(hetero_ee_cpu_ops.__file__).parent, package)
    monkeypatch.setattr(kernel_cache, "find_spec", lambda name: SimpleNamespace(origin=str(package / "__init__.py")))
    before = kernel_cache.kernel_cache_folder(tmp_path)
    with (package / "simd" / "floats.py").open("a") as file:
        file.write("# an edit\n")
    assert kernel_cache.kernel_cache_folder(tmp_path) != before


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
