"""Checkpoint -> store: tensor after tensor, so that memory never holds more than one of them beside the store."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_ee.config import Progress
from hetero_ee.errors import StoreError
from hetero_ee.models.blocks import TensorRole, TensorSpec
from hetero_ee.models.hf_config import read_config_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.checkpoint import Checkpoint, weight_files
from hetero_ee.weights.filesystem import FileSystem, LocalFileSystem
from hetero_ee.weights.manifest import FORMAT_VERSION, Entry, aligned
from hetero_ee.weights.model_weights import is_quantized
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, QUANTIZER_VERSION, Workers, quantizer_named
from hetero_ee.weights.store import StoreWriter, copied_files, is_store

SPARE_BYTES = 2**20  # free disk asked for beyond the weights and the copied files: manifest, folder entries
CONVERTING = "Converting to int4"


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which quantizer makes the matrices and which the embedding and head. Figures: docs/quality.md."""

    matrices: str = DEFAULT_QUANTIZER
    vocabulary: str = "int8"

    def quantizer_of(self, role: TensorRole) -> str:
        return self.vocabulary if role is TensorRole.VOCABULARY else self.matrices


def source_key(folder: Path, quantization: Quantization) -> str:
    """Identifies what a store would be made from: configuration, file names, sizes and times. No file is read whole."""
    files = [*weight_files(folder), *copied_files(folder)]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    versions = [FORMAT_VERSION, QUANTIZER_VERSION]
    identity = [versions, read_config_file(folder), stats, quantization.matrices, quantization.vocabulary]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def cached_store(folder: Path, quantization: Quantization, cache: Path) -> Path:
    """Where the store made from the model in `folder` lies, or would lie."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in folder.resolve().name)[:64]
    return cache / "stores" / f"{name}-{quantization.matrices}-{source_key(folder, quantization)}"


def convert(
    folder: Path,
    spec: ModelSpec,
    target: Path,
    quantization: Quantization,
    *,
    threads: int = 1,
    progress: Progress | None = None,
    files: FileSystem | None = None,
) -> Path:
    """Writes the store of the checkpoint in `folder` to `target`, or nothing; the same bytes for any thread count.

    Raises CheckpointError, StoreError.
    """
    if is_store(target):
        return target
    files = files or LocalFileSystem()
    checkpoint = Checkpoint(folder, spec)
    tensors = checkpoint.tensors()
    _require_space(folder, tensors, quantization, target, files)
    n_weights, n_done = sum(tensor.n_elements for tensor in tensors), 0
    with StoreWriter(target, files) as writer, _worker_threads(threads) as workers:
        for tensor in tensors:
            _write_tensor(writer, checkpoint, tensor, quantization, workers)
            n_done += tensor.n_elements
            if progress:
                progress(CONVERTING, n_done, n_weights)
        return writer.finish(folder, quantization.matrices, quantization.vocabulary, _provenance(folder, checkpoint))


@contextmanager
def _worker_threads(n_threads: int) -> Iterator[Workers]:
    """Threads that share the chunks of a tensor, each computing alone.

    torch's own threads wait for each other at the end of every operation: with one core busy elsewhere, converting the
    demo model took 300 s with them and 7 s without (2-core Zen 5, 2026-11-21).
    """
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(n_threads) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(torch_threads)


def _write_tensor(
    writer: StoreWriter, checkpoint: Checkpoint, tensor: TensorSpec, quantization: Quantization, workers: Workers
) -> None:
    values = checkpoint.tensor(tensor.name)
    if is_quantized(tensor.role):
        quantizer = quantizer_named(quantization.quantizer_of(tensor.role))
        writer.add_tiles(tensor.name, quantizer.quantize(values, workers=workers))
    else:
        writer.add_values(tensor.name, values)


def planned_bytes(tensors: list[TensorSpec], quantization: Quantization) -> int:
    """Size of the weights.bin that these tensors make, to the byte."""
    end = 0
    for tensor in tensors:
        quantized = is_quantized(tensor.role)
        layout = ("int8" if quantization.quantizer_of(tensor.role) == "int8" else "int4") if quantized else "fp32"
        for _, n_bytes in Entry(tensor.name, layout, tensor.shape, 0, 0, 0, None).regions:
            end = aligned(end) + n_bytes
    return end


def _require_space(
    folder: Path, tensors: list[TensorSpec], quantization: Quantization, target: Path, files: FileSystem
) -> None:
    copied_bytes = sum(file.stat().st_size for file in copied_files(folder))
    needed_bytes = planned_bytes(tensors, quantization) + copied_bytes + SPARE_BYTES
    try:
        free_bytes = files.free_bytes(target.parent)
    except OSError as error:
        raise StoreError(f"the free space of {target.parent} can't be read ({error}); check that disk.") from error
    if free_bytes < needed_bytes:
        raise StoreError(
            f"{target.parent} has {free_bytes / 2**20:.0f} MiB free, the store needs {needed_bytes / 2**20:.0f} MiB; "
            "free some space or set HETERO_EE_CACHE_DIR to a folder on another disk."
        )


def _provenance(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "model": folder.resolve().name,
        "architecture": checkpoint.spec.architecture,
        "files": {file.name: file.stat().st_size for file in checkpoint.files},
    }
