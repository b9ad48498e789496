"""GPUs: which there are, how they are timed, and what the kernels compile to for them."""
