"""SIMD values inside Numba code."""
