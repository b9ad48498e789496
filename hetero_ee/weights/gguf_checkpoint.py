"""Read the weights of a GGUF file, one tensor at a time, as if they came from the model's Hugging Face checkpoint."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hetero_ee.hub.gguf.architecture_fields import predicting_layers
from hetero_ee.hub.gguf.architectures import architecture_of
from hetero_ee.hub.gguf.config import ROPE_TENSORS
from hetero_ee.hub.gguf.folder import gguf_files
from hetero_ee.hub.gguf.header import GgufTensor, tensor_bytes
from hetero_ee.hub.gguf.names import INTERLEAVED, PresentNames, gguf_name
from hetero_ee.hub.gguf.parts import read_model_header
from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.models.blocks import all_tensors
from hetero_ee.models.draft_head import stored_blocks
from hetero_ee.models.hf_names import Part, checkpoint_parts, engine_order, unused_tensors
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.blocks import HALF_ROUNDING, KeptCodes, RowBlocks, kept_tiles
from hetero_ee.weights.checkpoint import Checkpoint, kept_layout, refuse, refuse_non_finite, turned
from hetero_ee.weights.gguf_blocks import FLOATS, KEPT, ROUNDED, floats
from hetero_ee.weights.quantizers import Workers

# Of old files, which are computed, and a copy of attn_k_b and attn_v_b.
IGNORED_SUFFIXES = (".attn_rot_embd.weight", ".rope_freqs.weight", ".attn_kv_b.weight")


class GgufCheckpoint:
    """The weights in GGUF `files`, which the folder represents, checked against `spec` before any tensor is read.

    Raises:
        CheckpointError: if a file is damaged or holds other tensors than its metadata says.
    """

    def __init__(self, folder: Path, files: list[Path], spec: ModelSpec) -> None:
        self.folder, self.spec, self.files = folder, spec, files
        self._header = read_model_header(files)
        self._architecture = architecture_of(self._header)
        self._parts = checkpoint_parts(spec, PresentNames(self._header))
        self._roles = {tensor.name: tensor.role for tensor in self.tensors()}
        self._check_shapes(self._header.file)

    @property
    def title(self) -> str:
        """Name of the file format, for messages."""
        return "GGUF"

    def tensors(self) -> list[TensorSpec]:
        return all_tensors(stored_blocks(self.spec))

    def types(self, name: str) -> list[str]:
        """Return the types in which the file stores the parts of the tensor that this engine calls `name`."""
        return sorted({self._tensor(part).type.name for part in self._parts[name]})

    def tensor(self, name: str, workers: Workers = map) -> Tensor:
        """Return the tensor that this engine calls `name`, as fp32. Raises CheckpointError for NaN or Inf."""
        return torch.cat([self._read(part, workers) for part in self._parts[name]])

    values = tensor

    def tiles(self, name: str, workers: Workers = map) -> KeptCodes | None:
        """Return a tensor as tiles with the file's codes; None if tiles cannot hold it.

        Scales of some types are rounded to fp16. The head and the embedding become 8-bit tiles.
        """
        parts = [self._blocks(part) for part in self._parts[name]]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        most = 0.0 if ROUNDED.isdisjoint(self.types(name)) else HALF_ROUNDING
        return kept_tiles(kept_layout(self._roles[name]), found, most, workers=workers)

    def _read(self, part: Part, workers: Workers) -> Tensor:
        """Read a part as fp32. In GGUF files, norms' scales already include part.added."""
        tensor = self._tensor(part)
        values = floats(self._raw(part), tensor.type.name, workers).view(part.stored_shape)
        if part.hf_name.endswith(self._architecture.logarithms):
            values = torch.log(-values)
        refuse_non_finite(values, tensor.name, tensor.file)
        order = self._order(part)
        return turned(part, values if order is None else values[order])

    def _blocks(self, part: Part) -> RowBlocks | None:
        """Return a part as blocks, or None if blocks cannot keep its type. Non-finite scales never become tiles."""
        tensor = self._tensor(part)
        if tensor.type.name not in KEPT or part.n_turned:
            return None
        raw, order = self._raw(part), self._order(part)
        blocks = RowBlocks(len(raw), lambda rows: KEPT[tensor.type.name](raw[rows]))
        return blocks if order is None else blocks.reordered(order)

    def _raw(self, part: Part) -> Tensor:
        """Read a part's bytes, uint8 (N, bytes per row); a vector is one row. All experts' matrices are one tensor."""
        tensor, shape = self._tensor(part), part.stored_shape
        if part.expert is not None:
            n_experts = tensor.shape[0] if len(tensor.shape) > len(shape) else 1  # llama.cpp drops dimensions of size 1
            n_bytes = tensor.n_bytes // n_experts
            tensor = replace(tensor, start=tensor.start + part.expert * n_bytes, n_bytes=n_bytes)
        raw = torch.frombuffer(tensor_bytes(tensor), dtype=torch.uint8)
        return raw.view(1 if len(shape) == 1 else shape[0], -1)

    def _order(self, part: Part) -> Tensor | None:
        """Return the indices that put the file's rows into this engine's order; None if they already are.

        llama.cpp rotates adjacent features of a head together, transformers features that are half a head apart. Files
        of architecture llama, and of some others, store the rows of queries and keys in llama.cpp's order.
        """
        module = part.hf_name.rpartition(".")[0]
        if not self._architecture.is_interleaved or not module.endswith(INTERLEAVED):
            order = engine_order(part)
            return None if order is None else torch.tensor(order)
        head = self.spec.head_dim
        return torch.arange(part.shape[0]).view(-1, head // 2, 2).swapaxes(1, 2).flatten()

    def _tensor(self, part: Part) -> GgufTensor:
        return self._header.tensors[self._name(part)]

    def _name(self, part: Part) -> str:
        return gguf_name(part.hf_name, self._architecture)

    def _check_shapes(self, file: Path) -> None:
        expected = {self._name(part): _file_shape(part) for parts in self._parts.values() for part in parts}
        present = self._header.tensors
        refuse(file, "lacks tensors", sorted(expected.keys() - present.keys()))
        unused = {gguf_name(name, self._architecture) for name in unused_tensors(self.spec)}
        extra = present.keys() - expected.keys() - set(ROPE_TENSORS) - unused
        predicting = tuple(f"blk.{self.spec.n_layers + n}." for n in range(predicting_layers(self._header)))
        others = (name for name in extra if not name.startswith(predicting))
        unknown = sorted(name for name in others if not name.endswith(IGNORED_SUFFIXES))
        refuse(file, f"holds tensors that {self.spec.architecture} does not have", unknown)
        wrong = []
        for name, shape in expected.items():
            found = present[name]
            is_equal = found.shape == shape or (1, *found.shape) == shape
            if not is_equal and (len(shape) > 1 or (math.prod(found.shape),) != shape):  # vectors may be in rows
                wrong.append(f"{name} is {list(found.shape)}, expected {list(shape)}")
            elif len(shape) == 1 and found.type.name not in FLOATS:
                wrong.append(f"{name} has type {found.type.name}, expected one of {', '.join(FLOATS)}")
        refuse(file, "does not fit its own metadata", wrong)


def _file_shape(part: Part) -> tuple[int, ...]:
    """Return the shape of a part's tensor. That of a layer's last expert tells the number of experts."""
    if part.expert is not None:
        return part.expert + 1, *part.stored_shape
    return part.shape if part.n_experts else part.stored_shape


def open_checkpoint(folder: Path, spec: ModelSpec) -> Checkpoint | GgufCheckpoint:
    """Open the weights of a model folder. Raises CheckpointError or UsageError."""
    files = gguf_files(folder)
    return GgufCheckpoint(folder, files, spec) if files else Checkpoint(folder, spec)
