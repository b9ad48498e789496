"""Read Hugging Face checkpoints in safetensors, one tensor at a time. Pickles are never opened."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_config_file, read_saved_format
from hetero_ee.hub.gguf.folder import gguf_files
from hetero_ee.hub.model_files import INDEX_FILE, SINGLE_FILE, indexed_files
from hetero_ee.hub.regular_file import find_file
from hetero_ee.layers.tensors import MATRIX_LAYOUTS, TensorRole, TensorSpec
from hetero_ee.models.blocks import all_tensors
from hetero_ee.models.draft_head import mtp_names, stored_blocks
from hetero_ee.models.families import FAMILIES
from hetero_ee.models.hf_names import (
    IGNORED_PREFIXES,
    IGNORED_SUFFIXES,
    Part,
    checkpoint_parts,
    engine_order,
    mtp_part_name,
    text_part_name,
    unused_tensors,
)
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.blocks import HALF_ROUNDING, KeptCodes, RowBlocks, kept_tiles
from hetero_ee.weights.formats.opening import IGNORED_SUFFIXES as OF_ACTIVATIONS
from hetero_ee.weights.formats.opening import column_order, saved_matrices
from hetero_ee.weights.formats.saved_matrix import RawTensors
from hetero_ee.weights.quantizers import Workers
from hetero_ee.weights.safetensors_file import MAX_TENSORS, StoredTensor, read_header

FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
SHORT_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
BIAS = ".bias"
MAX_LISTED = 5  # differences named in one error
MAX_SHOWN = 200  # characters of a name or a reason in an error
CHECK_ELEMENTS = 2**20  # values checked for NaN at a time, to bound the copy


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor's file, its name in that file, and its description in the file's header."""

    file: Path
    name: str
    stored: StoredTensor


def kept_layout(role: TensorRole) -> str:
    """Return the layout of a tensor that keeps a file's codes: 8 bits for embeddings and heads."""
    return "int8" if role is TensorRole.VOCABULARY else MATRIX_LAYOUTS.get(role, "int4")


class Checkpoint:
    """The weight files of one model folder, checked against `spec` before any tensor is read.

    Raises:
        CheckpointError: if files are missing, damaged or pickles, or hold other tensors than the configuration says.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.files, self._family = folder, weight_files(folder), FAMILIES[spec.architecture]
        located = {mtp_part_name(name, spec): found for name, found in self._locate_tensors().items()}
        self._located = located  # all headers are read before any file is mapped
        has_mtp = any(name.startswith(f"model.layers.{spec.n_layers}.") for name in located)
        self.spec = spec if has_mtp else replace(spec, mtp=None)  # whatever config.json says
        self._parts = checkpoint_parts(self.spec, located.keys())
        self._roles = {tensor.name: tensor.role for tensor in self.tensors()}
        self._use_saved_head()
        self._opened = {file: _open(file) for file in self.files}
        saved = read_saved_format(folder)
        self.title = saved.title if saved else None  # of the format; None if all weights are floats
        raw = RawTensors(folder, self._located.keys(), self._header, self._raw)
        self._saved = saved_matrices(raw, self._parts, saved)
        self._check_shapes()
        self._check_tied_head()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor that this engine calls `name`, as fp32. Raises CheckpointError for NaN or Inf."""
        return self.values(name).float()

    def values(self, name: str, workers: Workers = map) -> Tensor:
        """Return the same as `tensor`, but in the parts' 16-bit type if they share one, which halves the memory."""
        parts, order = self._parts[name], self._neuron_order(name)
        if len(parts) == 1 and order is None:
            return self._read(parts[0])
        n_rows = [part.n_rows for part in parts]
        kinds = {self._kind(part) for part in parts}
        kind = kinds.pop() if len(kinds) == 1 else torch.float32
        stacked = torch.empty(sum(n_rows), *parts[0].stored_shape[1:], dtype=kind)
        for rows, part in zip(torch.split(stacked, n_rows), parts, strict=True):  # one part in memory besides the whole
            values = self._read(part)
            rows.copy_(values if order is None else values[_in_each(order, len(values))])
        return stacked

    def tiles(self, name: str, workers: Workers = map) -> KeptCodes | None:
        """Return a tensor as tiles with the checkpoint's codes; None if a part has codes that tiles cannot hold.

        Codes that 8-bit tiles cannot hold exactly become the nearest values. The head, the embedding and the model's
        8-bit matrices become 8-bit tiles, other matrices 4-bit ones.
        """
        if name in mtp_names(self.spec).values():  # it may be in another format than the model's layers
            return None
        kind = kept_layout(self._roles[name])
        parts, order = list[RowBlocks](), self._neuron_order(name)
        for part in self._parts[name]:
            saved = self._saved.get(part.hf_name)
            found = saved.blocks(in_8_bits=kind == "int8") if saved and not part.n_turned else None
            if found is None:
                return None
            rows = engine_order(part) if order is None else _in_each(order, part.shape[0])
            parts.append(found if rows is None else found.reordered(torch.as_tensor(rows)))
        return kept_tiles(kind, parts, 0.0, HALF_ROUNDING, workers=workers)

    def types(self, name: str) -> list[str]:
        """Return the types in which the checkpoint stores the parts of the tensor that this engine calls `name`."""
        is_saved = {part.hf_name in self._saved for part in self._parts[name]}
        floats = {self._header(part.hf_name)[0] for part in self._parts[name] if part.hf_name not in self._saved}
        return sorted(floats | ({self.title} if self.title and True in is_saved else set()))

    def tensors(self) -> list[TensorSpec]:
        return all_tensors(stored_blocks(self.spec))

    def _neuron_order(self, name: str) -> Tensor | None:
        """Return the order of neurons that sorts down's columns by group; None if it is the file's.

        Only gate and up have an order, which matches that of down.
        """
        prefix, _, short = name.removesuffix("_bias").rpartition(".")
        if not prefix.endswith(".ffn") or short not in ("gate_up", "up"):
            return None
        [down] = self._parts[f"{prefix}.down"]
        return column_order(self._saved[down.hf_name]) if down.hf_name in self._saved else None

    def _read(self, part: Part) -> Tensor:
        if part.hf_name in self._saved:
            tensor = self._saved[part.hf_name].dequantize()
        else:
            tensor = self._raw(part.hf_name).to(self._kind(part))
            refuse_non_finite(tensor, part.hf_name, self._located[part.hf_name].file)
            tensor = tensor.transpose(-1, -2) if part.is_transposed and tensor.dim() == 3 else tensor
        tensor, rows = tensor.reshape(part.stored_shape), engine_order(part)
        tensor = turned(part, tensor if rows is None else tensor[rows])
        return tensor.float() + part.added if part.added else tensor

    def _kind(self, part: Part) -> torch.dtype:
        """Return the torch type in which a part is read."""
        is_saved = part.hf_name in self._saved
        return torch.float32 if is_saved else SHORT_TYPES.get(self._header(part.hf_name)[0], torch.float32)

    def _raw(self, name: str) -> Tensor:
        """Return the tensor with the values and type of its file."""
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

    def _locate_tensors(self) -> dict[str, _Located]:
        """Find tensors by full name; checkpoints of a bare decoder omit the prefix "model.".

        A tensor that appears twice, in two files or by two names, is refused, since either could be meant.
        """
        headers = {file: read_header(file) for file in self.files}
        if (n_tensors := sum(map(len, headers.values()))) > MAX_TENSORS:
            raise CheckpointError(f"{self.folder} holds {n_tensors} tensors, expected at most {MAX_TENSORS}.")
        located: dict[str, _Located] = {}
        for file, header in headers.items():
            for saved_name, stored in header.items():
                name = text_part_name(saved_name) if self._family.text_types else saved_name
                if name is None:
                    continue
                if name in located:
                    raise CheckpointError(
                        f"{self.folder}: tensor {_printable(name)} is in both {_printable(located[name].file.name)} "
                        f"and {_printable(file.name)}; remove one."
                    )
                located[name] = _Located(file, saved_name, stored)
        prefix, head_name = self._family.decoder_prefix, self._family.head_name
        if any(name.startswith(prefix) for name in located):
            return located
        return {name if name.startswith(head_name) else prefix + name: found for name, found in located.items()}

    def _use_saved_head(self) -> None:
        """Use the head as embedding, or the embedding as head, if the model is tied and saved only that one.

        transformers ties models that read images too if config.json says so, whatever its text_config says.
        """
        [embedding], head_name = self._parts["embedding.tokens"], self._family.head_name
        saved = {embedding.hf_name, head_name} & self._located.keys()
        if saved == {head_name} and self.spec.tied_head:
            self._parts["embedding.tokens"] = [Part(head_name, embedding.shape)]
        if saved == {embedding.hf_name} and not self.spec.tied_head and self._family.text_types:
            is_tied = read_config_file(self.folder).get("tie_word_embeddings") is True
            self._parts["head.tokens"] = [embedding] if is_tied else self._parts["head.tokens"]

    def _is_empty_bias(self, name: str) -> bool:
        """Return whether tensor `name` is a bias of zeros, which old GPTQ packers added to matrices without bias."""
        is_bias = name.endswith(BIAS) and f"{name.removesuffix(BIAS)}.weight" in self._saved
        return is_bias and len(self._header(name)[1]) == 1 and not self._raw(name).any()

    def _check_tied_head(self) -> None:
        """Check that a tied model that saved both head and embedding saved equal values.

        transformers unties them if their values differ; this engine requires config.json to say so.
        """
        [embedding], name = self._parts["embedding.tokens"], self._family.head_name
        if not self.spec.tied_head or name not in self._located or embedding.hf_name == name:
            return
        if not torch.equal(self._read(Part(name, embedding.shape)).float(), self._read(embedding).float()):
            raise CheckpointError(
                f"{self.folder}: config.json ties the head to the embedding, but {name} holds other values; "
                "set tie_word_embeddings to false in config.json to use both, as transformers does."
            )

    def _check_shapes(self) -> None:
        shapes = {part.hf_name: part.shape for parts in self._parts.values() for part in parts}
        expected = {name: shape for name, shape in shapes.items() if name not in self._saved}
        present = set(self._located)
        missing = sorted(expected.keys() - present)
        known = {
            *expected,
            *unused_tensors(self.spec),
            *(name for matrix in self._saved.values() for name in matrix.tensor_names),
        }
        if self.spec.tied_head:
            known.add(self._family.head_name)
        ignored = (*IGNORED_SUFFIXES, *(OF_ACTIVATIONS if self._saved else ()))
        unused = range(self.spec.n_layers, self.spec.n_layers + self.spec.n_unused_layers)
        prefixes = (*IGNORED_PREFIXES, *(f"model.layers.{layer}." for layer in unused))
        others = {n for n in present - known if not n.endswith(ignored) and not n.startswith(prefixes)}
        extra = sorted(n for n in others if not self._is_empty_bias(n))
        refuse(self.folder, "lacks tensors", missing)
        refuse(self.folder, f"holds tensors that {self.spec.architecture} does not have", extra)
        wrong = []
        for name, shape in expected.items():
            stored_type, stored_shape = self._header(name)
            if stored_shape != shape:
                wrong.append(f"{name} is {list(stored_shape)}, expected {list(shape)}")
            elif stored_type not in FLOAT_TYPES:
                wrong.append(f"{name} has type {stored_type}, expected one of {', '.join(sorted(FLOAT_TYPES))}")
        refuse(self.folder, "does not fit its config.json", wrong)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, sorted by name; for a folder that represents a GGUF file, its parts.

    If a folder has both a single weight file and an index, the single file is used, as in transformers.

    Raises:
        CheckpointError: if there are none, or some are missing.
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
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    advice = f"; rename {_printable(others[0])} to {SINGLE_FILE} if it is the whole model" if len(others) == 1 else ""
    raise CheckpointError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} exists{advice}.")


def turned(part: Part, rows: Tensor) -> Tensor:
    """Return a part's picked rows in this engine's layout, see Part.n_turned."""
    return rows.view(part.n_turned, -1, rows.shape[1]).transpose(1, 2).flatten(0, 1) if part.n_turned else rows


def _in_each(order: Tensor, n_rows: int) -> Tensor:
    """Return indices that reorder each group of len(order) consecutive rows, of n_rows in all, by `order`."""
    starts = torch.arange(0, n_rows, len(order))
    return (starts[:, None] + order).flatten()


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    from hetero_ee_cpu_ops.jit.bus_error import report_bus_errors

    report_bus_errors()  # since safetensors maps the file
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged or not a safetensors file ({_printable(error)}); get the file again."
        ) from error


def refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        raise CheckpointError(f"{folder} {what}: {'; '.join(map(_printable, names[:MAX_LISTED]))}{more}.")


def _printable(text: object) -> str:
    """Shorten `text` to one line; names from untrusted files can contain line ends and terminal commands."""
    shown = str(text)[:MAX_SHOWN]
    return shown if shown.isprintable() else ascii(shown)


def refuse_non_finite(tensor: Tensor, name: str, file: Path) -> None:
    for first, chunk in enumerate(torch.split(tensor.flatten(), CHECK_ELEMENTS)):
        if not torch.isfinite(torch.stack(torch.aminmax(chunk))).all():  # four times as fast as isfinite of all values
            finite = torch.isfinite(chunk)
            flat = first * CHECK_ELEMENTS + int((~finite).nonzero()[0])
            index = [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]
            raise CheckpointError(
                f"{file}: tensor {name} holds {tensor[tuple(index)].item()} at {index}; the weights are damaged."
            )
