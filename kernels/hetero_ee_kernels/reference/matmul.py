"""Products with tiles as in ../matmul.py, ../float_matmul.py and ../prefill_matmul.py, in float64."""

from typing import Any

import torch

from hetero_ee_kernels.reference.quantize import quantize
from hetero_ee_kernels.reference.tile_matrix import dequantize
from hetero_ee_kernels.tile_matrix import TileMatrix


def matmul(x: Any, weight: TileMatrix, out: Any = None) -> Any:
    """x: fp32 or fp16 (m, K), quantized to int8; out: fp32 (m, n_rows), allocated where None. Returns out."""
    return multiply_codes(*quantize(x), weight, out)


def multiply_codes(codes: Any, code_scales: Any, weight: TileMatrix, out: Any = None) -> Any:
    """The same for activations that `quantize` has quantized."""
    return _product((codes.double() * code_scales.double()[..., None]).flatten(1), weight, out)


def float_matmul(x: Any, weight: TileMatrix, out: Any = None) -> Any:
    """x as it is."""
    return _product(torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)), weight, out)


prefill_matmul = float_matmul


def _product(x: Any, weight: TileMatrix, out: Any) -> Any:
    product = (x @ dequantize(weight).double().T)[:, : weight.n_rows].float()
    return product if out is None else out.copy_(product)
