"""The operations compiled for other instruction sets, run in child processes: their tests, or the core of them.

The JIT target is chosen when Numba is imported, hence the children. NUMBA_CPU_FEATURES must name what the target has:
an empty list hides even what the CPU's name implies.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = [
    f"test_{name}.py"
    for name in ("simd_float", "norm", "rope", "attention", "activate", "embed", "sparse_ffn", "quantize_weights")
]
PRODUCTS = [f"test_{name}.py" for name in ("exact_products", "matmul")]
CORE = (
    "accurate_in_random or writes_what or fp16 or catches or bits_are or equals_numpy or whole_range or matches "
    "or same_bits"
)
AVX512 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx512vnni"
TARGETS = {
    "avx512 without vbmi": ("cascadelake", AVX512),
    "avx2": ("haswell", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt"),
    "haswell without features": ("haswell", ""),
    "avxvnni": ("alderlake", "+avx,+avx2,+avxvnni,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt"),
    "generic": ("generic", ""),
}


def run_child(target, files, *options):
    name, features = TARGETS[target]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *options,
        *(str(FOLDER / file) for file in files),
    ]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=FOLDER.parents[1])
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout


def cpu_flags():
    return Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []


def skip_where_it_cannot_run(target):
    if target.startswith("avx512") and "avx512_vnni" not in cpu_flags():
        pytest.skip("this CPU has no AVX-512 VNNI; test_instruction_sets.py compiles it and reads the assembly")
    if target == "avxvnni" and "avx_vnni" not in cpu_flags():
        pytest.skip("this CPU has no AVX-VNNI; test_instruction_sets.py compiles it and reads the assembly")


def skip_where_it_is_native(target):
    flags = cpu_flags()
    if target == "avx2" and "avx2" in flags and not {"avx512f", "avx_vnni"} & set(flags):
        pytest.skip("all other tests run this CPU's own code, which is that of AVX2")


@pytest.mark.long
@pytest.mark.parametrize("target", ["avx2", "generic"])  # AVX-VNNI multiplies integers alone
@pytest.mark.sample(0)
def test_core(target):
    """Of generic code without the sparse FFN and attention over int8, which take LLVM longer than all others together:
    they are slow, below."""
    skip_where_it_is_native(target)
    if target == "generic":
        run_child(target, [file for file in FILES if "sparse" not in file], "-k", f"({CORE}) and not in_random")
    else:
        run_child(target, FILES, "-k", CORE)


@pytest.mark.long
@pytest.mark.sample(0)
def test_products_on_avx2():
    """Of the other kinds of byte products, one is native here; test_instruction_sets.py reads the code of all."""
    skip_where_it_is_native("avx2")
    run_child("avx2", PRODUCTS, "-m", "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_everything(target):
    skip_where_it_cannot_run(target)
    run_child(target, [*FILES, "test_masked_linear.py"])
