"""CPU operations in Numba, one operation a file, named like the GPU's, on raw arrays and sizes only."""
