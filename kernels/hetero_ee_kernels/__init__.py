"""GPU operations in Triton, one operation a file. They see raw tensors and sizes only; none is written yet."""
