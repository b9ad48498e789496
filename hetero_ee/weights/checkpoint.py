"""Reads Hugging Face checkpoints in safetensors, one tensor at a time. No pickle is ever opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_four_bit_type
from hetero_ee.hub.gguf.folder import gguf_files
from hetero_ee.hub.model_files import INDEX_FILE, SINGLE_FILE, indexed_files
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.blocks import TensorSpec, all_tensors, decoder_blocks
from hetero_ee.models.families import FAMILIES
from hetero_ee.models.hf_names import IGNORED_SUFFIXES, Part, checkpoint_parts
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.bitsandbytes_4bit import (
    FourBitMatrix,
    RawTensors,
    companion_names,
    four_bit_matrix,
    stacked_tiles,
)
from hetero_ee.weights.safetensors_file import MAX_TENSORS, StoredTensor, read_header
from hetero_ee.weights.weight import TileWeight

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
MAX_LISTED = 5  # differences named in one error
MAX_SHOWN = 200  # characters of a name or a reason in an error
CHECK_ELEMENTS = 2**20  # values looked at together for NaN: a bounded copy, whatever the tensor's size


@dataclass(frozen=True, slots=True)
class _Located:
    """Where a tensor lies: its file, its name there, and what the file's header says of it."""

    file: Path
    name: str
    stored: StoredTensor


class Checkpoint:
    """The weight files of one model folder, checked against `spec` before any tensor is read.

    Raises CheckpointError for files that are missing, damaged, pickles, or hold other tensors than promised.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        self.files = weight_files(folder)
        self._parts, self._family = checkpoint_parts(spec), FAMILIES[spec.architecture]
        self._located = self._locate_tensors()  # reads all headers before any file is mapped
        self._use_saved_head()
        self._opened = {file: _open(file) for file in self.files}
        self._four_bit = self._four_bit_matrices()
        self._check_shapes()
        self._check_tied_head()

    def tensor(self, name: str) -> Tensor:
        """The tensor of this engine's name `name`, fp32, its parts stacked. Raises CheckpointError at a NaN or Inf."""
        parts = self._parts[name]
        if len(parts) == 1:
            return self._read(parts[0])
        n_rows = [part.shape[0] for part in parts]
        stacked = torch.empty(sum(n_rows), *parts[0].shape[1:])
        for rows, part in zip(torch.split(stacked, n_rows), parts, strict=True):  # one part at a time beside the whole
            rows.copy_(self._read(part))
        return stacked

    def tiles(self, name: str) -> TileWeight | None:
        """The same in tiles, each weight in the 4-bit code it was saved in; None where that is not possible.

        Possible where bitsandbytes saved all its parts, and tiles can hold them (see stacked_tiles).
        """
        matrices = [self._four_bit[part.hf_name] for part in self._parts[name] if part.hf_name in self._four_bit]
        return stacked_tiles(matrices) if len(matrices) == len(self._parts[name]) else None

    def tensors(self) -> list[TensorSpec]:
        """Every tensor of the model, in block order."""
        return all_tensors(decoder_blocks(self.spec))

    def _read(self, part: Part) -> Tensor:
        if part.hf_name in self._four_bit:
            return self._four_bit[part.hf_name].dequantize()
        tensor = self._raw(part.hf_name).float()
        refuse_non_finite(tensor, part.hf_name, self._located[part.hf_name].file)
        return tensor

    def _raw(self, name: str) -> Tensor:
        """The tensor as it lies in its file."""
        located = self._located[name]
        try:
            tensor: Tensor = self._opened[located.file].get_tensor(located.name)
        except Exception as error:  # safetensors raises its own errors, OSError and torch's for a damaged file
            raise CheckpointError(
                f"{located.file}: tensor {name} can't be read ({_printable(error)}); get the file again."
            ) from error
        return tensor

    def _header(self, name: str) -> tuple[str, tuple[int, ...]]:
        stored = self._located[name].stored
        return stored.dtype, stored.shape

    def _four_bit_matrices(self) -> dict[str, FourBitMatrix]:
        """hf name -> matrix, of those that bitsandbytes saved in 4 bits; config.json must say the same of them."""
        raw = RawTensors(self.folder, self._located.keys(), self._header, self._raw)
        parts = [part for parts in self._parts.values() for part in parts]
        found = {part.hf_name: four_bit_matrix(raw, part.hf_name, part.shape) for part in parts}
        matrices = {name: matrix for name, matrix in found.items() if matrix is not None}
        said = read_four_bit_type(self.folder)
        for name, matrix in matrices.items():
            if matrix.state.quant_type != said:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} was quantized to {matrix.state.quant_type}, config.json says "
                    f"{said or 'nothing of that (quantization_config)'}; get config.json of the same model."
                )
        if said and not matrices:
            raise CheckpointError(
                f"{self.folder}: config.json says that the weights are in {said}, and they are not; "
                "get config.json of the same model, or remove its quantization_config."
            )
        return matrices

    def _locate_tensors(self) -> dict[str, _Located]:
        """By full name: checkpoints of the bare decoder leave out the "model." in front.

        A name in two files is refused: which one counts would be a guess.
        """
        headers = {file: read_header(file) for file in self.files}
        if (n_tensors := sum(map(len, headers.values()))) > MAX_TENSORS:
            raise CheckpointError(f"{self.folder} holds {n_tensors} tensors, expected at most {MAX_TENSORS}.")
        located: dict[str, _Located] = {}
        for file, header in headers.items():
            for name, stored in header.items():
                if name in located:
                    raise CheckpointError(
                        f"{self.folder}: tensor {_printable(name)} is in both {_printable(located[name].file.name)} "
                        f"and {_printable(file.name)}; remove one."
                    )
                located[name] = _Located(file, name, stored)
        prefix, head_name = self._family.decoder_prefix, self._family.head_name
        if any(name.startswith(prefix) for name in located):
            return located
        return {name if name.startswith(head_name) else prefix + name: found for name, found in located.items()}

    def _use_saved_head(self) -> None:
        """A tied model may have saved its head alone, which then is the embedding too, as it is for transformers."""
        [embedding], head_name = self._parts["embedding.tokens"], self._family.head_name
        if self.spec.tied_head and embedding.hf_name not in self._located and head_name in self._located:
            self._parts["embedding.tokens"] = [Part(head_name, embedding.shape)]

    def _check_tied_head(self) -> None:
        """A tied model may have saved both. transformers unties them where their values differ; here config.json must
        say so, which all else goes by."""
        [embedding], name = self._parts["embedding.tokens"], self._family.head_name
        if not self.spec.tied_head or name not in self._located or embedding.hf_name == name:
            return
        if not torch.equal(self._read(Part(name, embedding.shape)), self._read(embedding)):
            raise CheckpointError(
                f"{self.folder}: config.json ties the head to the embedding, but {name} holds other values; "
                "set tie_word_embeddings to false in config.json to use both, as transformers does."
            )

    def _check_shapes(self) -> None:
        expected = {part.hf_name: part.shape for parts in self._parts.values() for part in parts}
        present = set(self._located)
        missing = sorted(expected.keys() - present)
        known = {*expected, *(companion for name in self._four_bit for companion in companion_names(name))}
        if self.spec.tied_head:
            known.add(self._family.head_name)
        extra = sorted(name for name in present - known if not name.endswith(IGNORED_SUFFIXES))
        refuse(self.folder, "lacks tensors", missing)
        refuse(self.folder, f"holds tensors that {self.spec.architecture} does not have", extra)
        wrong = []
        for name, shape in expected.items():
            if name in self._four_bit:
                continue
            stored_type, stored_shape = self._header(name)
            if stored_shape != shape:
                wrong.append(f"{name} is {list(stored_shape)}, expected {list(shape)}")
            elif stored_type not in FLOAT_TYPES:
                wrong.append(f"{name} has type {stored_type}, expected one of {', '.join(FLOAT_TYPES)}")
        refuse(self.folder, "does not fit its config.json", wrong)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, in name order. Raises CheckpointError.

    Of a single file and an index the single file counts, as it does for transformers. For a folder that stands for a
    GGUF file, that file or its parts.
    """
    if parts := gguf_files(folder):
        return parts
    single, index = (find_file(folder, name, CheckpointError) for name in (SINGLE_FILE, INDEX_FILE))
    if single:
        return [single]
    if index:
        files = {name: find_file(folder, name, CheckpointError) for name in indexed_files(index)}
        refuse(folder, "lacks weight files named in its index", [name for name, file in files.items() if file is None])
        return [file for file in files.values() if file]
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights as a pickle ({_printable(pickles[0])}), which can run code when opened "
            "and is never read; convert it to safetensors (transformers: model.save_pretrained) or get such a copy."
        )
    raise CheckpointError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there.")


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged or no safetensors file ({_printable(error)}); get the file again."
        ) from error


def refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        raise CheckpointError(f"{folder} {what}: {'; '.join(map(_printable, names[:MAX_LISTED]))}{more}.")


def _printable(text: object) -> str:
    """`text` short and on one line: names in a file from elsewhere can hold line ends and terminal commands."""
    shown = str(text)[:MAX_SHOWN]
    return shown if shown.isprintable() else ascii(shown)


def refuse_non_finite(tensor: Tensor, name: str, file: Path) -> None:
    for first, chunk in enumerate(torch.split(tensor.flatten(), CHECK_ELEMENTS)):
        finite = torch.isfinite(chunk)
        if not finite.all():
            flat = first * CHECK_ELEMENTS + int((~finite).nonzero()[0])
            index = [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]
            raise CheckpointError(
                f"{file}: tensor {name} holds {tensor[tuple(index)].item()} at {index}; the weights are damaged."
            )
