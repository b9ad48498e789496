"""Hold all weights of a model, in memory or mapped from files, by this engine's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from hetero_ee.errors import CheckpointError, DamagedStoreError
from hetero_ee.layers.tensors import TensorRole
from hetero_ee.models.blocks import all_tensors, first_matrix
from hetero_ee.models.draft_head import stored_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import UNQUANTIZED
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.file_watch import FileWatch
from hetero_ee.weights.gguf_checkpoint import GgufCheckpoint
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.store.source_file import SourceFile
from hetero_ee.weights.weight import DenseWeight, TileWeight, Weight

VOCABULARY_LAYOUTS = ("int4", "int8")


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors of a model, by this engine's names."""

    matrices: dict[str, Weight]  # multiplied, or looked up by token
    vectors: dict[str, Tensor]  # norms, biases, position tables, fp32
    quantizer: str = UNQUANTIZED  # name of the quantizer that made the matrices
    watch: FileWatch | None = None  # watches the files that the weights are mapped from
    held_bytes: int = 0  # memory that copied, not mapped, weights use
    expert_orders: Mapping[str, Tensor] = field(default_factory=dict)  # numbers of moved experts, by block name

    @property
    def n_bytes(self) -> int:
        return sum(w.n_bytes for w in self.matrices.values()) + sum(v.nbytes for v in self.vectors.values())

    @property
    def n_weights(self) -> int:
        return sum(w.shape[0] * w.shape[1] for w in self.matrices.values()) + sum(
            v.numel() for v in self.vectors.values()
        )


def is_quantized(role: TensorRole) -> bool:
    """Return whether tensors of this role are stored quantized, in tiles or in rows of neurons, and not as floats."""
    return role not in (TensorRole.POSITIONS, TensorRole.VECTOR)


def as_stored(spec: ModelSpec, weights: ModelWeights) -> ModelSpec:
    """Return the model's spec with its FFN layouts and the width of each matrix taken from the weights."""
    in_layers = {name: weight for name, weight in weights.matrices.items() if name.startswith("layers.")}
    tiles = {name: weight.layout for name, weight in in_layers.items() if isinstance(weight, TileWeight)}
    layouts = tuple(sorted((name, kind) for name, kind in tiles.items() if kind != "int4"))
    rows = {name.rpartition(".")[2] for name, weight in in_layers.items() if isinstance(weight, RowWeight)}
    if not any(name.startswith(f"layers.{spec.n_layers}.") for name in in_layers):
        spec = replace(spec, mtp=None)
    spec = replace(spec, neuron_major=bool(rows), first_in_rows=first_matrix(spec) in rows)
    return replace(spec, matrix_layouts=layouts)


def with_terms(weights: ModelWeights, n_terms: int) -> ModelWeights:
    """Return the weights with matrices in tiles that multiply activations of n_terms int8 terms."""
    matrices = {
        name: replace(weight, n_terms=n_terms) if isinstance(weight, TileWeight) else weight
        for name, weight in weights.matrices.items()
    }
    return replace(weights, matrices=matrices)


def load_dense(checkpoint: Checkpoint | GgufCheckpoint) -> ModelWeights:
    """Load the checkpoint's weights unquantized, as fp32. Tensors saved as fp32 are mapped from the file.

    A change of only a file's permissions or name does not count as a change of the weights.
    """
    opened = {file: SourceFile.of(file) for file in checkpoint.files}

    def check(file: Path) -> None:
        if SourceFile.of(file) != opened[file]:
            raise CheckpointError(f"{file} was written to since it was opened; open the model again.")

    weights = ModelWeights({}, {}, watch=FileWatch(checkpoint.files, check))
    for tensor in checkpoint.tensors():
        values = checkpoint.tensor(tensor.name)
        if is_quantized(tensor.role):
            weights.matrices[tensor.name] = DenseWeight(values)
        else:
            weights.vectors[tensor.name] = values
    return weights


def check_complete(weights: ModelWeights, spec: ModelSpec, folder: Path) -> None:
    """Check that `weights` are exactly the model's tensors, with their shapes and kinds. Raises DamagedStoreError."""
    tensors = all_tensors(stored_blocks(spec))
    for tensor in tensors:
        found = weights.matrices.get(tensor.name) if is_quantized(tensor.role) else weights.vectors.get(tensor.name)
        if found is None:
            kind = "quantized" if is_quantized(tensor.role) else "fp32"
            raise damaged(folder, f" lacks the {kind} tensor {tensor.name}")
        is_wrong = isinstance(found, TileWeight) and found.layout not in VOCABULARY_LAYOUTS
        if tensor.role is TensorRole.VOCABULARY and is_wrong:
            raise damaged(folder, f": tensor {tensor.name} has zero points or 5 or 6 bits, as no embedding or head has")
        if tuple(found.shape) != tensor.shape:
            shapes = f"{tuple(found.shape)}, expected {tensor.shape}"
            raise damaged(folder, f": tensor {tensor.name} has shape {shapes}")
    extra = (weights.matrices.keys() | weights.vectors.keys()) - {tensor.name for tensor in tensors}
    if extra:
        raise damaged(folder, f" holds {min(extra)!r:.80}, which {spec.architecture} does not have")


def damaged(folder: Path, problem: str) -> DamagedStoreError:
    return DamagedStoreError(f"{folder}{problem}; delete {folder} and convert again.")


def expanded(weights: ModelWeights) -> ModelWeights:
    """Return the weights with every matrix dequantized to fp32. Lookups and products give the same bits as before."""
    matrices: dict[str, Weight] = {name: DenseWeight(w.dequantize()) for name, w in weights.matrices.items()}
    return ModelWeights(matrices, weights.vectors, weights.quantizer)
