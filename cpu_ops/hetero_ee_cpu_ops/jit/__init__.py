"""Compiling, keeping and starting Numba kernels, and the threads they run on."""
