"""Opens stores: folders with quantized weights, their manifest, and the model's configuration and tokenizer files.

Weights are memory-mapped. Every checksum is checked, those of the tiles only after opening. writer.py writes stores.
"""

import hashlib
import mmap
import os
import sys
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hetero_ee.errors import DamagedStoreError, StoreError
from hetero_ee.hub.model_files import MAX_SMALL_FILE_BYTES, SMALL_FILES
from hetero_ee.hub.regular_file import find_file, read_file, reason_of
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.file_watch import FileWatch
from hetero_ee.weights.model_weights import ModelWeights, as_stored, check_complete
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.store.checksums import damaged_region, first_damaged
from hetero_ee.weights.store.manifest import ROWS, WEIGHTS_FILE, CopiedFile, Entry, Manifest, check_size, read_manifest
from hetero_ee.weights.store.names import MANIFEST_FILE
from hetero_ee.weights.tiles import TILE_BYTES, tile_grid
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.host.memory import memory_info
from hetero_ee_profiles.opened_file import open_regular


def is_store(folder: Path) -> bool:
    """Return whether `folder` looks like a store, whether or not it is valid."""
    return os.path.lexists(folder / MANIFEST_FILE)


def copied_files(model_folder: Path) -> list[Path]:
    """Return a model's small files, of which its store gets copies."""
    return [file for name in SMALL_FILES if (file := find_file(model_folder, name))]


def checked_manifest(folder: Path) -> Manifest:
    """Read the manifest and check the size of weights.bin and the small files. Raises: StoreError."""
    manifest = read_manifest(folder)
    check_copies(folder, manifest)
    return manifest


def open_store(folder: Path, spec: ModelSpec, manifest: Manifest | None = None) -> ModelWeights:
    """Map the store's weights into memory, read-only. Pages are read when they are first used.

    Checks scales, fp32 tensors and the small files at once. Tiles, most of the bytes, are checked in the background
    unless they exceed the free RAM. If the file is written to, the weights' watch checks everything again.

    Args:
        manifest: The result of checked_manifest, if it was called before.

    Raises:
        DamagedStoreError: A checksum differs.
        StoreError: The store can't be read.
    """
    manifest = manifest or checked_manifest(folder)

    def check(_: Path) -> None:
        check_size(folder, manifest)
        _check_regions(folder, manifest, ("scales", "values", "tiles"))

    watch = FileWatch([folder / WEIGHTS_FILE], check)
    _check_regions(folder, manifest, ("scales", "values"))
    weights = mapped_weights(folder, manifest, spec)
    _check_finite(folder, weights)
    if manifest.weights_bytes < memory_info(this_host()).available_bytes:
        opened = open_regular(folder / WEIGHTS_FILE, buffering=0)  # opened now: another file may get its name
        watch.check_later(lambda: _check_regions(folder, manifest, ("tiles",), opened))
    return replace(weights, watch=watch)


def mapped_weights(folder: Path, manifest: Manifest, spec: ModelSpec) -> ModelWeights:
    """Map the weights in the manifest without reading them. Raises: StoreError: unless they are the model's."""
    buffer = _mapped(folder / WEIGHTS_FILE)
    weights = ModelWeights({}, {}, manifest.quantizer)
    for entry in manifest.entries:
        if entry.layout == "fp32":
            data = buffer[entry.offset : entry.offset + entry.data_bytes]
            weights.vectors[entry.name] = data.view(torch.float32).view(entry.shape)
        else:
            weights.matrices[entry.name] = _weight(buffer, entry)
    check_complete(weights, as_stored(spec, weights), folder)
    return weights


def mapped_weight(file: Path, entry: Entry) -> TileWeight | RowWeight:
    """Map one matrix of a store's file, which may be unfinished. Raises: StoreError: if it can't be mapped."""
    return _weight(_mapped(file), entry)


def check_copies(folder: Path, manifest: Manifest) -> None:
    """Check that the store's small files are those in the manifest, unchanged. Raises: StoreError."""
    known = {file.name: file for file in manifest.files}
    for name in SMALL_FILES:
        if problem := copy_problem(folder / name, known.get(name)):
            raise DamagedStoreError(f"{folder / name} {problem}; put the original back, or convert the model again.")


def copy_problem(file: Path, known: CopiedFile | None) -> str | None:
    """Return what is wrong with a small file of a store, None if nothing is.

    Args:
        known: The file's entry in the manifest, None if it has none.

    Raises:
        StoreError: The file can't be read, so its content can't be judged.
    """
    if known is None:
        return "is not in the store's manifest" if os.path.lexists(file) else None
    try:
        if find_file(file.parent, file.name, StoreError) is None:
            return "is missing"
        n_bytes = file.stat().st_size
        if n_bytes != known.n_bytes:
            return f"has {n_bytes} bytes, its store's manifest says {known.n_bytes}"
    except OSError as error:
        raise StoreError(f"{file} can't be read ({reason_of(error)}).") from error
    data = read_file(file, MAX_SMALL_FILE_BYTES, "such a file", StoreError)
    is_same = hashlib.sha256(data).hexdigest() == known.sha256
    return None if is_same else "does not match its checksum in the store's manifest"


def _check_regions(folder: Path, manifest: Manifest, parts: Collection[str], opened: BinaryIO | None = None) -> None:
    """Compare regions with their checksums, those of `opened` in this thread, those of the folder's file in several."""
    entry_of = {region: entry for entry in manifest.entries for region in entry.regions if region.part in parts}
    try:
        if opened is None:
            damaged = first_damaged(folder / WEIGHTS_FILE, entry_of)
        else:
            with opened:
                damaged = damaged_region(opened, entry_of)
    except OSError as error:
        raise StoreError(f"{folder / WEIGHTS_FILE} can't be read ({error}); check its disk.") from error
    if damaged:
        raise DamagedStoreError(
            f"{folder}: the {damaged.part} of tensor {entry_of[damaged].name!r:.80} do not match their checksum; "
            "delete that folder and convert again."
        )


def _check_finite(folder: Path, weights: ModelWeights) -> None:
    """Check that scales and fp32 tensors are finite. Costs 0.05 s per GB right after their checksums were read."""
    quantized = weights.matrices.items()
    scales = {name: weight.scales for name, weight in quantized if isinstance(weight, TileWeight | RowWeight)}
    for name, values in (weights.vectors | scales).items():
        if not all(map(torch.isfinite, values.aminmax())):  # a NaN is both
            raise DamagedStoreError(
                f"{folder}: tensor {name} holds values or scales that are not numbers; "
                "delete that folder and convert again."
            )


def _mapped(file: Path) -> Tensor:
    """Map the file read-only and return its bytes (uint8). Also makes a later SIGBUS end the process with a message.

    A file that fits in the free RAM asks for huge pages, which are read from disk and memory at a higher rate. A larger
    one does not: each page that comes back from the disk would then cost 2 MB.
    A private writable mapping would make Linux reserve memory for the whole file, so stores larger than RAM, the main
    use case, could not be opened.
    """
    from hetero_ee_cpu_ops.jit.bus_error import report_bus_errors  # imported late, since it imports Numba

    report_bus_errors()
    try:
        with open_regular(file) as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if sys.platform == "linux" and len(mapped) < memory_info(this_host()).available_bytes:
            with suppress(OSError):  # a system without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
    except ValueError as error:
        raise DamagedStoreError(f"{file} is empty; delete that folder and convert again.") from error
    except OSError as error:
        raise StoreError(f"{file} can't be mapped into memory ({error}).") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to weights
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _weight(buffer: Tensor, entry: Entry) -> TileWeight | RowWeight:
    data = buffer[entry.offset : entry.offset + entry.data_bytes]
    scales = buffer[entry.scales_offset : entry.scales_offset + entry.scales_bytes].view(torch.float16)
    if entry.layout == ROWS:
        assert entry.codebook is not None, "a manifest is refused otherwise"
        n_rows, n_columns = entry.shape
        return RowWeight(data.view(n_rows, -1), scales.view(n_rows, -1), entry.exponent, entry.codebook, n_columns)
    grid = tile_grid(*entry.shape)
    tiles = data.view(*grid, TILE_BYTES[entry.layout])
    return TileWeight(
        tiles=tiles.view(torch.int8) if entry.layout == "int8" else tiles,
        scales=scales.view(*grid, -1),
        exponent=entry.exponent,
        codebook=entry.codebook,
        n_rows=entry.shape[0],
        n_columns=entry.shape[1],
    )
