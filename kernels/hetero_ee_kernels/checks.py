"""Checks of operands, and a launch option that all operations share."""

from typing import Any

import torch

ALIGNMENT_BYTES = 16  # for less, Triton compiles another kernel, with other vectors and so another order of sums

UNFUSED = {"enable_fp_fusion": False}  # for every launch, since fusion changes bits; kernels fuse by tl.fma


def check(name: str, tensor: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Check that a tensor is contiguous and aligned to 16 bytes, as torch's own allocations are.

    Raises:
        ValueError: if it isn't, or its shape differs, or its dtype is not among `dtypes` (fp32 by default).
    """
    dtypes = dtypes or (torch.float32,)
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtypes[0]} {shape}.")
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"{name} {shape} must be contiguous and aligned to {ALIGNMENT_BYTES} bytes.")
