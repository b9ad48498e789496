"""Which instructions the matmul's machine code has on each target, read from its assembly in a child process.

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
from hetero_ee_cpu_ops.tile_group import BYTES, CODEBOOK, LINEAR
for kind in (LINEAR, CODEBOOK, BYTES):
    assembly = _chunk_function(kind)._library.get_asm_str()
    words = ("mov", "vpdpbusd", "vpmaddubsw", "vpshufb", "vpsignb", "%zmm", "%ymm", "vcvtph2ps", "__extendhfsf2")
    print(*(assembly.count(word) for word in words))
"""


def counts(target: str, cache: Path) -> list[dict[str, int]]:
    """How often each word stands in the assembly of the linear, codebook and int8 kernels.

    cache: an empty folder; kernels loaded from a filled one come without their assembly.
    """
    name, features = TARGETS[target]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    words = ("lines", "dot", "pair", "shuffle", "sign", "wide", "half_wide", "convert", "missing")
    return [dict(zip(words, map(int, line.split()), strict=True)) for line in done.stdout.splitlines()]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86 targets are compiled on x86 only")
@pytest.mark.parametrize("target", TARGETS)
def test_the_instructions_are_those_of_the_target(target: str, tmp_path: Path) -> None:
    linear, codebook, int8 = counts(target, tmp_path)
    assert linear["lines"] > 100
    assert not any(kernel["missing"] for kernel in (linear, codebook, int8))  # a call that generic targets lack
    if target == "AVX-512 VNNI":
        assert all(kernel["dot"] >= 8 * 15 and kernel["wide"] for kernel in (linear, codebook, int8))
        assert codebook["shuffle"] and not linear["pair"]
    elif target == "AVX-VNNI":
        assert all(kernel["dot"] >= 2 * 8 * 15 and not kernel["wide"] for kernel in (linear, codebook, int8))
    elif target == "AVX2":
        assert all(kernel["pair"] >= 2 * 8 * 15 and not kernel["dot"] for kernel in (linear, codebook, int8))
        assert codebook["sign"] and int8["sign"] and not linear["sign"] and linear["convert"]
    else:
        assert not any(
            kernel[word] for kernel in (linear, codebook, int8) for word in ("dot", "pair", "wide", "half_wide")
        )
