"""Multiply by int4 matrices with bitsandbytes, for NVIDIA GPUs on systems without Triton (Windows).

bitsandbytes' layout has codes row after row, two in a byte, the first in the high nibble; an fp32 factor for every 32
neighbours; and a table of 16 fp32 values in which its matrix-vector kernel looks up codes. Other devices have fixed
tables, and the CPU another layout, so this is for CUDA only. It needs 5 bits per weight, our tiles 4.5.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.weight import TileWeight

BLOCK = layout.TILE_COLUMNS  # one factor for 32 neighbours, as in the tiles; bitsandbytes knows 32, 64, ...
UNIT = 128.0  # a power of two: dividing the codebook by it loses nothing


@dataclass(frozen=True, slots=True, eq=False)
class BitsandbytesMatrix:
    """An int4 matrix. packed: uint8 (N x K / 2, 1), K padded to 32; factors: fp32 (N x K / 32,); table: fp32 (16,)."""

    packed: Tensor
    factors: Tensor
    table: Tensor
    n_rows: int
    n_columns: int


def bitsandbytes_matrix(weight: TileWeight, device: Any) -> BitsandbytesMatrix:
    """Convert a weight to bitsandbytes' layout on a device. Raises UsageError if its tiles are not plain int4."""
    if weight.layout != "int4":
        raise UsageError(
            f"bitsandbytes multiplies 4-bit weights only, and without zero points, not {weight.layout}; "
            "use the triton or torch matmul."
        )
    codes = layout.unpack(weight.tiles)[: weight.n_rows]
    packed = codes[:, 0::2] << 4 | codes[:, 1::2]
    factors = layout.unpack_scales(weight.scales)[: weight.n_rows].float() * (2.0**weight.exponent * UNIT)
    return BitsandbytesMatrix(
        packed.reshape(-1, 1).to(device),
        factors.reshape(-1).to(device),
        (torch.tensor(weight.codebook, dtype=torch.float32) / UNIT).to(device),
        weight.n_rows,
        codes.shape[1],
    )


def matmul(x: Tensor, matrix: BitsandbytesMatrix, out: Tensor | None = None) -> Tensor:
    """Multiply fp32 (m, K) on a CUDA device by the matrix, and return out, fp32 (m, N).

    Computes row by row, so that a row's bits don't depend on m.

    Raises:
        UsageError: if x is not on a CUDA device.
    """
    if not x.is_cuda:
        raise UsageError(f"bitsandbytes multiplies these weights on NVIDIA GPUs only, not on {x.device}.")
    from bitsandbytes.functional import QuantState, gemv_4bit

    out = x.new_empty(len(x), matrix.n_rows) if out is None else out
    padded = torch.nn.functional.pad(x, (0, matrix.n_columns - x.shape[1]))
    shape = torch.Size((matrix.n_rows, matrix.n_columns))
    state = QuantState(matrix.factors, shape, matrix.table, BLOCK, "nf4", torch.float32)
    for row in range(len(x)):
        gemv_4bit(padded[row : row + 1], matrix.packed, out[row : row + 1], state=state)
    return out
