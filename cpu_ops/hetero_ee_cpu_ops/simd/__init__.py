"""SIMD values and instructions inside Numba code."""
