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


def check_given(name: str, tensor: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Check an operand that may be None, see check()."""
    if tensor is not None:
        check(name, tensor, shape, *dtypes)


def output(out: Any, like: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> Any:
    """Check `out`, see check(), or allocate it on the device of `like` if it is None; return it."""
    if out is None:
        return torch.empty(shape, dtype=(*dtypes, torch.float32)[0], device=like.device)
    check("out", out, shape, *dtypes)
    return out
