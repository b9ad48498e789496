"""Weights as the operations of a GPU take them, each prepared once for all segments that multiply with it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetero_ee.models.blocks import Block, least_activations
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.weight import TileWeight
from hetero_ee_kernels.row_matrix import RowMatrix
from hetero_ee_kernels.tile_matrix import TileMatrix


def tile_matrix(weight: TileWeight, device: Any) -> TileMatrix:
    """The weight as the GPU kernels take it: the same bytes as in memory and on disk, copied and not repacked."""
    tiles, scales = weight.tiles.to(device), weight.scales.to(device)
    return TileMatrix(tiles, scales, weight.exponent, weight.codebook, weight.n_rows)


def row_matrix(weight: RowWeight, device: Any) -> RowMatrix:
    """Likewise, of rows."""
    codes, scales = weight.codes.to(device), weight.scales.to(device)
    return RowMatrix(codes, scales, weight.exponent, weight.codebook, weight.n_columns)


@dataclass(frozen=True, slots=True)
class GpuLinear:
    """multiply(x, matrix, out); bias: None or fp32 (N,)."""

    multiply: Callable[..., Any]
    matrix: Any
    bias: Tensor | None


class GpuWeights:
    """Matrices and vectors of these blocks on a device. Raises TypeError for matrices that are not in tiles or rows.

    What lies on the device already stays where it is, but for vectors, which are copied.
    """

    def __init__(self, weights: ModelWeights, blocks: Iterable[Block], operations: GpuOperations, device: Any) -> None:
        blocks = list(blocks)
        names = {tensor.name for block in blocks for tensor in block.tensors.values()}
        vectors = names | {least_activations(block) for block in blocks}
        self._ops, self._device = operations, device
        self.vectors = {  # copies on a CPU too: a mapped vector begins anywhere
            name: vector.to(device, copy=True) for name, vector in weights.vectors.items() if name in vectors
        }
        mine = {name: weight for name, weight in weights.matrices.items() if name in names}
        self.rows = {name: row_matrix(w, device) for name, w in mine.items() if isinstance(w, RowWeight)}
        self.linears = {name: self._linear(name, w) for name, w in mine.items() if name not in self.rows}

    def linear(self, block: Block, short: str) -> GpuLinear:
        """The block's matrix of that name."""
        return self.linears[block.tensors[short].name]

    def neurons(self, block: Block, short: str) -> RowMatrix:
        """The block's matrix of that name, which has a row for each neuron."""
        return self.rows[block.tensors[short].name]

    def least(self, block: Block) -> Tensor | None:
        """Below which activations of the FFN's neurons don't count; None where all but zeros do."""
        return self.vectors.get(least_activations(block))

    def vector(self, block: Block, short: str) -> Tensor | None:
        """The block's vector of that name, None where it has none."""
        tensor = block.tensors.get(short)
        return None if tensor is None else self.vectors[tensor.name]

    def release(self) -> None:
        """Gives all memory back; nothing can be used any more."""
        self.vectors.clear()
        self.linears.clear()
        self.rows.clear()

    def _linear(self, name: str, weight: Any) -> GpuLinear:
        return gpu_linear(name, weight, self.vectors.get(f"{name}_bias"), self._ops, self._device)


def gpu_linear(name: str, weight: Any, bias: Tensor | None, operations: GpuOperations, device: Any) -> GpuLinear:
    """The matrix as the operations take it. Raises TypeError where it is not in tiles."""
    if not isinstance(weight, TileWeight):
        raise TypeError(f"{name} is {type(weight).__name__}, the GPU kernels multiply tiles.")
    if weight.layout == "int4":
        return GpuLinear(operations.matmul_int4, operations.prepare_int4(weight, device), bias)
    return GpuLinear(operations.matmul_int8, operations.prepare_int8(weight, device), bias)
