"""Prepare the weights of a model's blocks for one device's operations, each weight once."""

from collections.abc import Iterable
from typing import Any

from hetero_ee.layers.ops import Array, Matrix, Ops, Parameters
from hetero_ee.models.blocks import Block, least_activations
from hetero_ee.weights.model_weights import ModelWeights


class DeviceWeights:
    """Prepared matrices and vectors, by the names of their tensors.

    Args:
        blocks: the blocks whose weights to prepare; None for all. A GPU copies weights that it doesn't hold yet.

    Raises:
        TypeError: if the device cannot multiply with one of the matrices.
    """

    def __init__(self, ops: Ops, weights: ModelWeights, blocks: Iterable[Block] | None = None) -> None:
        matrices, vectors = weights.matrices, weights.vectors
        if blocks is not None:
            chosen = list(blocks)
            names = {tensor.name for block in chosen for tensor in block.tensors.values()}
            with_least = names | {least_activations(block) for block in chosen}
            matrices = {name: weight for name, weight in matrices.items() if name in names}
            vectors = {name: vector for name, vector in vectors.items() if name in with_least}
        self.vectors: dict[str, Array] = {name: ops.vector(vector) for name, vector in vectors.items()}
        self.matrices: dict[str, Matrix] = {
            name: ops.matrix(name, weight, self.vectors.get(f"{name}_bias")) for name, weight in matrices.items()
        }

    def of(self, block: Block) -> Parameters:
        return _BlockParameters(self, block)

    def release(self) -> None:
        """Free all memory. The weights can't be used afterwards."""
        self.vectors.clear()
        self.matrices.clear()


class _BlockParameters:
    def __init__(self, weights: DeviceWeights, block: Block) -> None:
        self._weights, self._block = weights, block

    def matrix(self, short: str) -> Matrix:
        return self._weights.matrices[self._block.tensors[short].name]

    def vector(self, short: str) -> Any:
        tensor = self._block.tensors.get(short)
        return None if tensor is None else self._weights.vectors[tensor.name]

    def least(self) -> Any:
        return self._weights.vectors.get(least_activations(self._block))
