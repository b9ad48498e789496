"""GPU operations in Triton on raw tensors, one per file."""
