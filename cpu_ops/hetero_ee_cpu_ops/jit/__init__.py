"""Compiling, caching and running Numba kernels, and the threads that they run on."""
