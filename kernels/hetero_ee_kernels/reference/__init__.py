"""The same operations in plain torch, on the same raw tensors: the kernels' yardstick, and the last resort."""
