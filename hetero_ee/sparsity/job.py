"""A calibration of sparsity from text to its file beside the store."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_ee.calibration.job import OWN_TEXT, WAITING, CalibrationRequest, require_enough
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.run import CalibrationRun
from hetero_ee.calibration.stages import SPLIT_CHUNKS, Chunk
from hetero_ee.calibration.texts import chunk_tokens, own_writer, text_chunks
from hetero_ee.config import Progress
from hetero_ee.decoding.texts import Ending
from hetero_ee.errors import StoreError, UsageError
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.sparsity.curves import SparsityCurves
from hetero_ee.sparsity.file import read_sparsity, write_sparsity
from hetero_ee.sparsity.fit import PART_TOKENS, SparsityFit
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.store.calibration_files import sparsity_file
from hetero_ee.weights.store.filesystem import FileSystem, store_lock


@dataclass(frozen=True, slots=True)
class SparsityOutcome:
    """Sparsity curves that were written, or found."""

    curves: SparsityCurves
    file: Path
    seconds: float  # 0 where it was found
    is_new: bool = True


def found_sparsity(place: CalibrationPlace) -> SparsityCurves | None:
    """The curves of the opened store, None where there are none. Raises StoreError."""
    return read_sparsity(sparsity_file(place.store), place.spec, place.key)


def calibrate_sparsity(
    executor: Executor,
    tokenizer: Tokenizer,
    ending: Ending,
    place: CalibrationPlace,
    request: CalibrationRequest,
    targets: Sequence[float] = (),
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SparsityOutcome:
    """Fits the model's sparsity curves and writes them beside its store, unless some that measured these targets are
    there. executor: whose FFNs are neuron-major, with no neuron left out. One process does so at a time.

    Raises UsageError for dense FFNs and texts that are too short, ModelError for a model that writes none, StoreError
    and DiskFullError.
    """
    if not executor.spec.neuron_major:
        raise UsageError("these FFNs are not neuron-major; open the model with sparsity='dense' to calibrate.")
    files, file = FileSystem(), sparsity_file(place.store)
    with store_lock(place.folder, files, lambda: progress(WAITING, 0, 0) if progress else None):
        found = None if request.force else _usable(place, progress)
        if found is not None and {each.target for each in found.measured}.issuperset(targets):
            return SparsityOutcome(found, file, 0.0, is_new=False)
        start_s = clock()
        chunks = _chunks(executor, tokenizer, ending, request, progress, clock)
        fit = SparsityFit(executor.spec, executor.weights, chunks, progress=progress)
        curves = fit.measured(fit.curves(), targets)
        description = OWN_TEXT if request.texts is None else request.description
        write_sparsity(curves, place.key, description, file, files)
    return SparsityOutcome(curves, file, clock() - start_s)


def _usable(place: CalibrationPlace, progress: Progress | None) -> SparsityCurves | None:
    try:
        return found_sparsity(place)
    except StoreError as error:
        if progress:
            progress(f"Calibrating again: {error}", 0, 0)
        return None


def _chunks(
    executor: Executor,
    tokenizer: Tokenizer,
    ending: Ending,
    request: CalibrationRequest,
    progress: Progress | None,
    clock: Callable[[], float],
) -> list[Chunk]:
    """As many as the fit looks at, of the texts or written by the model."""
    n_tokens = min(request.n_tokens, SPLIT_CHUNKS * PART_TOKENS)
    if request.texts is not None:
        return text_chunks(tokenizer, request.texts, n_tokens, ending.context_tokens)
    write = own_writer(executor, tokenizer, ending, chunk_tokens(ending.context_tokens, n_tokens), clock)
    chunks = CalibrationRun(executor, request.settings, None, clock, progress).written(write, n_tokens)
    require_enough(len(chunks))
    return chunks
