"""CPU operations in Numba on raw arrays: one per file, with the names of the GPU's operations."""
