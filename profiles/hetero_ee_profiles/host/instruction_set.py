"""Names the instruction sets for which CPU kernels are compiled, and those of this processor."""

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
    """Return the best instruction set that matmul can use with these features, which are named as in LLVM."""
    return next((name for feature, name in NAMES.items() if feature in features), GENERIC)


def system_instruction_set(features: Collection[str]) -> str:
    """Return the best instruction set for features that are named as in the operating system."""
    return instruction_set({FEATURES.get(feature, feature) for feature in features})


def rank(name: str) -> int:
    """Return a number that orders instruction sets by speed; 0 for generic code."""
    order = [GENERIC, *reversed(NAMES.values())]
    return order.index(name)


def kernel_instruction_set() -> str:
    """Return the instruction set that this process compiles kernels for. Raises: ImportError: without Numba."""
    from numba.core.registry import cpu_target

    from hetero_ee_cpu_ops.simd.bytes import target_has

    context = cpu_target.target_context
    return instruction_set([feature for feature in NAMES if target_has(context, feature)])
