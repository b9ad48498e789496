"""Converts a checkpoint to a store. Memory holds two tensors: one that is written and the next, which is read."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hetero_ee.config import CONVERTING, Progress, warner
from hetero_ee.errors import DiskFullError, UsageError
from hetero_ee.hub.model_id import model_name
from hetero_ee.layers.tensors import MATRIX_LAYOUTS, TensorRole, TensorSpec, is_in_rows
from hetero_ee.models.blocks import all_tensors
from hetero_ee.models.draft_head import stored_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.blocks import KeptCodes
from hetero_ee.weights.checkpoint import FLOAT_TYPES, Checkpoint
from hetero_ee.weights.gguf_checkpoint import GgufCheckpoint, open_checkpoint
from hetero_ee.weights.model_weights import is_quantized
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import Workers, quantize
from hetero_ee.weights.rows import RowWeight, in_rows
from hetero_ee.weights.store.filesystem import ELSEWHERE, FileSystem, store_errors, store_lock
from hetero_ee.weights.store.import_report import ImportReport
from hetero_ee.weights.store.manifest import ROWS, aligned, region_sizes
from hetero_ee.weights.store.names import STORES_FOLDER
from hetero_ee.weights.store.reader import copied_files, is_store
from hetero_ee.weights.store.source import Source
from hetero_ee.weights.store.writer import StoreWriter, partial_folder
from hetero_ee.weights.tiles import TILE_BYTES
from hetero_ee.weights.weight import TileWeight

SPARE_BYTES = 2**20  # free disk space required for the manifest and folder entries
SPACE_RESERVE = 1.05  # free disk space required, relative to the known sizes
FOUR_BITS = (
    "Most of the weights are rounded to 4 bits, which changes what the model writes (SmolLM2-135M: KL divergence 0.15 "
    "to 0.22 nats; less than half of that after hetero-ee convert --calibrate)"
)
OWN_CODES_KEPT = "; files that are quantized already, such as GGUF, keep their own codes"  # without a quantizer
NOTICED_WEIGHTS = 10**8  # smaller models are toys and get no FOUR_BITS notice; the demo loses 0.004 nats
# Rounds a matrix as a quantizer does, for the inputs that it receives from a text. Called in the order of the blocks.
Fit = Callable[[TensorSpec, Tensor, str, Workers], TileWeight]
Written = Callable[[str], TileWeight | RowWeight | None]  # returns a matrix by name if the store has it already
FitWith = Callable[[Workers, Written], Fit]  # makes one when a conversion begins
WAITING = "Another process is converting this model; waiting for it"


def cached_store(folder: Path, quantization: Quantization, cache: Path) -> Path:
    """Return the path in the cache of the store that belongs to the model in `folder`, whether or not it exists."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in model_name(folder))[:64]
    return cache / STORES_FOLDER / f"{name}-{quantization.name}-{Source.of(folder).key(quantization)}"


def convert(
    folder: Path,
    spec: ModelSpec,
    target: Path,
    quantization: Quantization,
    *,
    threads: int = 1,
    progress: Progress | None = None,
    files: FileSystem | None = None,
    fit_with: FitWith | None = None,
) -> Path:
    """Write the store of the checkpoint in `folder` to `target`, completely or not at all.

    The bytes are the same for any number of threads. Waits for another process that is converting the same model, and
    uses its result. Resumes a conversion that was interrupted.

    Args:
        fit_with: if given, quantizes the layers' matrices that don't keep the checkpoint's codes.

    Raises:
        CheckpointError, StoreError: The checkpoint can't be read, or the store can't be written.
        DiskFullError: The disk is too small.
    """
    if is_store(target):
        return target
    files = files or FileSystem()
    source, checkpoint = Source.of(folder), open_checkpoint(folder, spec)

    def waiting() -> None:
        if progress:
            progress(WAITING, 0, 0)

    with store_lock(target, files, waiting):
        if not is_store(target):
            with _resumable(target), worker_threads(threads) as workers:
                _write(source, checkpoint, target, quantization, workers, progress, files, fit_with)
    return target


def _write(
    source: Source,
    checkpoint: Checkpoint | GgufCheckpoint,
    target: Path,
    quantization: Quantization,
    workers: Workers,
    progress: Progress | None,
    files: FileSystem,
    fit_with: FitWith | None,
) -> None:
    tensors = all_tensors(stored_blocks(stored_spec(checkpoint.spec, quantization)))
    identity = {
        "source_key": source.key(quantization),
        "tensors": [[tensor.name, *tensor.shape] for tensor in tensors],
    }
    with StoreWriter(target, files, identity) as writer:
        fit = fit_with and fit_with(workers, writer.written)
        n_bytes = planned_bytes(tensors, quantization)
        _require_space(source, n_bytes, writer.allocated_bytes, target, files)
        writer.allocate(n_bytes)
        n_there, report = len(writer.entries), ImportReport(checkpoint.title)
        if fit is None and _is_mostly_rounded(checkpoint, tensors, quantization):
            warner(progress)(FOUR_BITS + (OWN_CODES_KEPT if checkpoint.title is None else ""))
        read = _read_ahead(checkpoint, quantization, tensors[n_there:], workers)
        for index, tensor in enumerate(tensors):
            if index >= n_there:
                made = _quantized(next(read), tensor, quantization, workers, fit)
                _write_tensor(writer, made, checkpoint, tensor, quantization, report)
                del made  # before the next tensor is made
            if progress and index + 1 >= n_there:  # what an earlier run has written took no time in this one
                progress(CONVERTING, writer.entries[index].regions[-1].end, n_bytes)
        writer.copy_files(source.folder)
        digests = source.digests(workers)
        source.check_unchanged()
        provenance = source.provenance(checkpoint.spec, quantization) | {"sha256": digests} | report.fields()
        writer.finish(quantization.name, quantization.vocabulary, provenance)


def _is_mostly_rounded(
    checkpoint: Checkpoint | GgufCheckpoint, tensors: list[TensorSpec], quantization: Quantization
) -> bool:
    """Return whether a conversion rounds most weights to new 4-bit codes. False for toy models."""

    def is_rounded(tensor: TensorSpec) -> bool:
        if not is_quantized(tensor.role) or not _layout(tensor, quantization).startswith("int4"):
            return False
        return quantization.own is None or FLOAT_TYPES.issuperset(checkpoint.types(tensor.name))

    n_rounded = sum(tensor.n_elements for tensor in tensors if is_rounded(tensor))
    n_weights = sum(tensor.n_elements for tensor in tensors)
    return n_weights >= NOTICED_WEIGHTS and 2 * n_rounded > n_weights


@contextmanager
def _resumable(target: Path) -> Iterator[None]:
    """Add a note to an interrupt, such as Ctrl-C, that the finished tensors are kept."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interrupt:
        if partial_folder(target).is_dir():
            interrupt.add_note(f"the conversion to {target} has stopped; run it again to resume it.")
        raise


@contextmanager
def worker_threads(n_threads: int) -> Iterator[Workers]:
    """Yield the map function of a pool of threads that share the parts of a tensor's or a block's work.

    torch's own threads wait for each other after every operation. With one core busy elsewhere, converting the demo
    model took 300 s with them and 7 s without (2-core Zen 5, 2026-11-21).
    """
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(n_threads) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(torch_threads)


def stored_spec(spec: ModelSpec, quantization: Quantization) -> ModelSpec:
    """Return the model's spec with the tensors that its store has. Raises: UsageError: if it can't be neuron-major."""
    if quantization.neuron_major and spec.gated and spec.ffn_bias:
        raise UsageError(
            f"{spec.architecture} has biases next to its gates, as neuron-major FFNs can't; leave out --sparsity."
        )
    layouts = dict(spec.matrix_layouts if quantization.own else ()) | dict(quantization.layouts)
    wider = tuple(sorted((name, layout) for name, layout in layouts.items() if layout != "int4"))
    laid_out = replace(spec, matrix_layouts=wider, neuron_major=quantization.neuron_major)
    return replace(laid_out, first_in_rows=quantization.first_in_rows)


def _read_ahead(
    checkpoint: Checkpoint | GgufCheckpoint, quantization: Quantization, tensors: list[TensorSpec], workers: Workers
) -> Iterator[KeptCodes | Tensor]:
    """Yield each tensor, as the file's codes or as floats, while a thread reads the next one."""

    def read(tensor: TensorSpec) -> KeptCodes | Tensor:
        if not is_quantized(tensor.role):
            return checkpoint.values(tensor.name)
        kept = checkpoint.tiles(tensor.name, workers) if quantization.keeps_codes(tensor) else None
        return _values(checkpoint, tensor, quantization, workers) if kept is None else kept

    with ThreadPoolExecutor(1) as pool:
        following = deque(pool.submit(read, tensor) for tensor in tensors[:1])
        for index in range(len(tensors)):
            found = following.popleft().result()
            following.extend(pool.submit(read, tensor) for tensor in tensors[index + 1 : index + 2])
            yield found
            del found


def _quantized(
    found: KeptCodes | Tensor, tensor: TensorSpec, quantization: Quantization, workers: Workers, fit: Fit | None
) -> KeptCodes | Tensor:
    """Return a matrix in tiles, with the codes found, or the tensor as it is if it is stored as floats."""
    if isinstance(found, KeptCodes) or not is_quantized(tensor.role):
        return found
    quantizer = quantization.quantizer_of(tensor.role)
    is_fitted = tensor.role is TensorRole.MATRIX or tensor.name in dict(quantization.layouts)
    weight = fit(tensor, found, quantizer, workers) if fit and is_fitted else quantize(found, quantizer, workers)
    return KeptCodes(weight, [found])


def _write_tensor(
    writer: StoreWriter,
    found: KeptCodes | Tensor,
    checkpoint: Checkpoint | GgufCheckpoint,
    tensor: TensorSpec,
    quantization: Quantization,
    report: ImportReport,
) -> None:
    if not isinstance(found, KeptCodes):
        writer.add_values(tensor.name, found)
        return
    if checkpoint.title is not None and not quantization.neuron_major:
        report.add(checkpoint.types(tensor.name), tensor, found.weight, found.wanted)
    writer.add_matrix(tensor.name, in_rows(found.weight) if is_in_rows(tensor.role) else found.weight)


def _values(
    checkpoint: Checkpoint | GgufCheckpoint, tensor: TensorSpec, quantization: Quantization, workers: Workers
) -> Tensor:
    """Return a matrix of the store as floats. For neuron-major stores, gate_up is split and down transposed."""
    prefix, _, short = tensor.name.rpartition(".")
    is_gated = quantization.neuron_major and prefix.endswith(".ffn") and checkpoint.spec.gated and short != "down"
    values = checkpoint.values(f"{prefix}.gate_up" if is_gated else tensor.name, workers)
    if is_gated:
        gate, up = values.chunk(2)
        return gate if short == "gate" else up
    return values.T.contiguous() if quantization.neuron_major and tensor.name.endswith(".ffn.down") else values


def planned_bytes(tensors: list[TensorSpec], quantization: Quantization) -> int:
    """Return the exact size of the file weights.bin that holds these tensors."""
    end = 0
    for tensor in tensors:
        for n_bytes in region_sizes(_layout(tensor, quantization), tensor.shape):
            end = aligned(end) + n_bytes
    return end


def _layout(tensor: TensorSpec, quantization: Quantization) -> str:
    if not is_quantized(tensor.role):
        return "fp32"
    if is_in_rows(tensor.role):
        return ROWS
    quantizer = quantization.quantizer_of(tensor.role)
    return MATRIX_LAYOUTS.get(tensor.role, quantizer if quantizer in TILE_BYTES else "int4")


def _require_space(source: Source, n_bytes: int, there_bytes: int, target: Path, files: FileSystem) -> None:
    """Check that the disk has space for the store.

    Args:
        n_bytes: Size of the weights.
        there_bytes: Bytes of the weights that the disk already holds.

    Raises:
        DiskFullError: The disk has too little space.
    """
    copied_bytes = sum(file.stat().st_size for file in copied_files(source.folder))
    needed_bytes = int(SPACE_RESERVE * (n_bytes + copied_bytes)) + SPARE_BYTES - there_bytes
    with store_errors(target):
        free_bytes = files.free_bytes(target.parent)
    if free_bytes < needed_bytes:
        raise DiskFullError(
            f"{target.parent} has {free_bytes / 2**20:.0f} MiB free, the store needs {needed_bytes / 2**20:.0f} MiB; "
            f"free some space or {ELSEWHERE}."
        )
