"""All weights of a model in memory (or mapped), by this engine's names."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hetero_ee.errors import StoreError
from hetero_ee.models.blocks import TensorRole, all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.weight import DenseWeight, Weight


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """matrices: everything that multiplies or is looked up by token; vectors: norms, biases, position tables, fp32."""

    matrices: dict[str, Weight]
    vectors: dict[str, Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(w.n_bytes for w in self.matrices.values()) + sum(v.nbytes for v in self.vectors.values())

    @property
    def n_weights(self) -> int:
        return sum(w.shape[0] * w.shape[1] for w in self.matrices.values()) + sum(
            v.numel() for v in self.vectors.values()
        )


def is_quantized(role: TensorRole) -> bool:
    """Whether tensors of this role are stored in tiles."""
    return role in (TensorRole.MATRIX, TensorRole.VOCABULARY)


def load_dense(checkpoint: Checkpoint) -> ModelWeights:
    """The checkpoint's weights unquantized, fp32."""
    weights = ModelWeights({}, {})
    for tensor in checkpoint.tensors():
        values = checkpoint.tensor(tensor.name)
        if is_quantized(tensor.role):
            weights.matrices[tensor.name] = DenseWeight(values)
        else:
            weights.vectors[tensor.name] = values
    return weights


def check_complete(weights: ModelWeights, spec: ModelSpec, folder: Path) -> None:
    """Raises StoreError where a tensor of the model is absent or has another shape or kind."""
    for tensor in all_tensors(decoder_blocks(spec)):
        found = weights.matrices.get(tensor.name) if is_quantized(tensor.role) else weights.vectors.get(tensor.name)
        shape = None if found is None else tuple(found.shape)
        if shape != tensor.shape:
            raise StoreError(
                f"{folder}: tensor {tensor.name} has shape {shape}, expected {tensor.shape}; convert again."
            )


def expanded(weights: ModelWeights) -> ModelWeights:
    """The same weights with every matrix in fp32; lookups and products give the same bits."""
    matrices: dict[str, Weight] = {name: DenseWeight(w.dequantize()) for name, w in weights.matrices.items()}
    return ModelWeights(matrices, weights.vectors)
