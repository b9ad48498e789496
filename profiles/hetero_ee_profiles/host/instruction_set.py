"""Which instructions the CPU kernels are compiled for, and which they could be on this processor."""

from collections.abc import Collection

GENERIC = "generic"
NAMES = {  # best first
    "avx512vnni": "AVX-512 VNNI",
    "avxvnni": "AVX-VNNI",
    "avx2": "AVX2",
    "dotprod": "NEON dot product",
}
FEATURES = {"avx512_vnni": "avx512vnni", "avx512vnni": "avx512vnni", "avx_vnni": "avxvnni", "asimddp": "dotprod"}


def instruction_set(features: Collection[str]) -> str:
    """The set the matmul uses where it is compiled for these features, as LLVM names them."""
    return next((name for feature, name in NAMES.items() if feature in features), GENERIC)


def system_instruction_set(features: Collection[str]) -> str:
    """The same for features as the operating system names them."""
    return instruction_set({FEATURES.get(feature, feature) for feature in features})


def rank(name: str) -> int:
    """0 for generic code, more for what is faster."""
    order = [GENERIC, *reversed(NAMES.values())]
    return order.index(name)


def kernel_instruction_set() -> str:
    """The set the kernels are compiled for in this process, which imports Numba. Raises ImportError."""
    from numba.core.registry import cpu_target

    from hetero_ee_cpu_ops.simd.bytes import target_has

    context = cpu_target.target_context
    return instruction_set([feature for feature in NAMES if target_has(context, feature)])
