"""What every operation asks of the tensors it is given."""

from typing import Any

import torch

ALIGNMENT_BYTES = 16  # Triton compiles another kernel, with other vectors and so another order of sums, for less

UNFUSED = {"enable_fp_fusion": False}  # of every launch: bits hang on it, and on tl.fma where a kernel asks for fusion


def check(name: str, tensor: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless the tensor has the shape and one of the dtypes (fp32 where none is named), lies in one
    piece and begins at a multiple of 16 bytes, as torch's own allocations do."""
    dtypes = dtypes or (torch.float32,)
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtypes[0]} {shape}.")
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"{name} {shape} must be contiguous and begin at a multiple of {ALIGNMENT_BYTES} bytes.")
