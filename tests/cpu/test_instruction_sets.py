"""Which instructions the matmul and the sparse FFN have on each target, read from their assembly in a child process.

So a target that this machine can't run is still compiled, and none silently falls back to slow code.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+lzcnt,+cx16"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx512vnni,+evex512"
TARGETS = {
    "AVX-512 VNNI": ("icelake-server", AVX512),
    "AVX-VNNI": ("alderlake", AVX2 + ",+avxvnni"),
    "AVX2": ("haswell", AVX2),
    "generic": ("generic", ""),
}
CODE = """
from hetero_ee_cpu_ops.matmul import _chunk_function
from hetero_ee_cpu_ops.tile_kind import BYTES, CODEBOOK, LINEAR, NARROW, ZEROS
from hetero_ee_cpu_ops.neurons.sparse_section import SECTIONS
SPARSE = None
def code(kind):
    if kind is not SPARSE:
        return _chunk_function(kind)
    return SECTIONS.address and SECTIONS._compiled
for kind in ({kinds},):
    assembly = code(kind)._library.get_asm_str()
    words = "mov vpdpbusd vpmaddubsw vpmaddwd vpshufb vpsignb %zmm %ymm vcvtph2ps __extendhfsf2"
    print(*(assembly.count(word) for word in words.split()))
"""

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86 targets are compiled on x86 only")


def counts(target: str, cache: Path, kinds: str) -> list[dict[str, int]]:
    """How often each word stands in the assembly of the kernels for each kind of tile.

    cache: an empty folder; kernels loaded from a filled one come without their assembly.
    """
    name, features = TARGETS[target]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(kinds=kinds)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    words = ("lines", "dot", "pair", "widening", "shuffle", "sign", "wide", "half_wide", "convert", "missing")
    return [dict(zip(words, map(int, line.split()), strict=True)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "generic"])
@pytest.mark.sample(0)
def test_the_instructions_are_those_of_the_target(target: str, tmp_path: Path) -> None:
    kernels = counts(target, tmp_path, "LINEAR, CODEBOOK, BYTES, ZEROS" + (", NARROW" if target == "AVX2" else ""))
    linear, codebook, int8, zeros, *narrow = kernels
    assert linear["lines"] > 100
    assert not any(kernel["missing"] for kernel in kernels)  # a call that generic targets lack
    assert zeros["convert"] > linear["convert"]
    assert all(zeros[word] == linear[word] for word in ("dot", "pair", "widening", "shuffle"))
    if target == "AVX-512 VNNI":
        assert all(kernel["dot"] >= 8 * 15 and kernel["wide"] for kernel in kernels)
        assert codebook["shuffle"] and not linear["pair"]
    elif target == "AVX-VNNI":
        assert all(kernel["dot"] >= 2 * 8 * 7 and not kernel["wide"] for kernel in kernels)
    else:
        assert all(kernel["pair"] >= 2 * 8 * 7 and not kernel["dot"] for kernel in kernels)
        assert codebook["sign"] and int8["sign"] and linear["convert"]
        assert not any(kernel["sign"] for kernel in (linear, *narrow)) and narrow[0]["shuffle"]
        assert narrow[0]["widening"] == 2 * linear["widening"] == codebook["widening"] / 4


@pytest.mark.few(1)  # half a minute together
@pytest.mark.parametrize("kind", ["CODEBOOK", "LINEAR", "BYTES", "ZEROS"])
@pytest.mark.sample(0)
def test_generic_code_has_none_of_them(kind: str, tmp_path: Path) -> None:
    (kernel,) = counts("generic", tmp_path, kind)
    assert kernel["lines"] > 100
    assert not any(kernel[word] for word in ("missing", "dot", "pair", "wide", "half_wide"))


# Generic code of it takes LLVM a minute and a half.
@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[pytest.mark.slow] if t == "generic" else []) for t in TARGETS]
)
@pytest.mark.sample(0)
def test_the_sparse_ffn_has_its_targets_instructions(target: str, tmp_path: Path) -> None:
    (kernel,) = counts(target, tmp_path, "SPARSE")
    assert kernel["lines"] > 500 and not kernel["missing"]
    if target == "generic":
        assert not any(kernel[word] for word in ("dot", "pair", "wide", "half_wide"))
        return
    products, others = ("pair", "dot") if target == "AVX2" else ("dot", "pair")
    assert kernel["shuffle"] and kernel["convert"] and kernel[products] >= 8 and not kernel[others]
    assert bool(kernel["wide"]) == (target == "AVX-512 VNNI")
