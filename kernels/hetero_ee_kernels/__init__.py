"""GPU operations in Triton, one operation a file, on raw tensors and sizes only."""
