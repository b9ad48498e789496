"""Runs the calibration of sparsity: fits curves or a predictor on text and writes them next to the store."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from hetero_ee.calibration.job import CalibrationJob
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.stages import SPLIT_CHUNKS, Chunk
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.errors import StoreError, UsageError
from hetero_ee.sparsity.curves import SparsityCurves, read_sparsity, write_sparsity
from hetero_ee.sparsity.factors import FactorTraining
from hetero_ee.sparsity.fit import PART_TOKENS, SparsityFit
from hetero_ee.sparsity.order import NeuronOrder, fitted_order, read_order, write_order
from hetero_ee.sparsity.predictor import NeuronPredictor, read_predictor, write_predictor
from hetero_ee.sparsity.predictor_fit import FITTED_TOKENS, PredictorFit
from hetero_ee.sparsity.request import ZERO_ACTIVATIONS
from hetero_ee.weights.store.calibration_files import (
    ORDER_SUFFIX,
    PARTIAL_SUFFIX,
    PREDICTOR_SUFFIX,
    SPARSITY_SUFFIX,
    neuron_file,
)
from hetero_ee.weights.store.filesystem import FileSystem

ALGORITHM_VERSION = 3  # increases when the numbers change; fits of other versions are not resumed
PREDICTOR_TOKENS = 2 * FITTED_TOKENS  # half of the chunks are fitted to

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SparsityOutcome:
    """Sparsity curves, either new or found next to the store."""

    curves: SparsityCurves
    file: Path
    seconds: float  # duration of this run; 0 if the curves were found
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class PredictorOutcome:
    """A predictor of active neurons, either new or found next to the store."""

    predictor: NeuronPredictor
    file: Path
    seconds: float  # duration of this run; 0 if the predictor was found
    is_new: bool = True


def found_sparsity(place: CalibrationPlace) -> SparsityCurves | None:
    """Return the opened store's sparsity curves, None if it has none. Raises: StoreError."""
    return read_sparsity(neuron_file(place.store, SPARSITY_SUFFIX), place.spec, place.key)


def found_predictor(place: CalibrationPlace) -> NeuronPredictor | None:
    """Return the opened store's predictor of active neurons, None if it has none. Raises: StoreError."""
    return read_predictor(neuron_file(place.store, PREDICTOR_SUFFIX), place.spec, place.key)


def order_or_warn(place: CalibrationPlace, warn: Callable[[str], None]) -> NeuronOrder | None:
    """Return the opened store's order of neurons, or None if it has none. Warns if the order can't be read."""
    try:
        return read_order(neuron_file(place.store, ORDER_SUFFIX), place.spec, place.key)
    except StoreError as error:
        warn(str(error))
        return None


def calibrate_sparsity(job: CalibrationJob, targets: Sequence[float] = ()) -> SparsityOutcome:
    """Fit the model's sparsity curves and write them next to its store, unless these targets are already measured.

    A killed fit is resumed. FFNs must be neuron-major, and the executor must not skip any neuron.

    Raises:
        UsageError: if FFNs are not neuron-major, or the texts are too short.
        ModelError: if the model writes no text.
        StoreError, DiskFullError: if the result can't be written.
    """
    spec, weights = job.executor.spec, job.executor.weights
    if not spec.neuron_major:
        raise UsageError("these FFNs are not neuron-major; open the model with sparsity='dense' to calibrate.")

    def find() -> SparsityCurves | None:
        found = found_sparsity(job.place)
        is_enough = found is not None and {each.target for each in found.measured}.issuperset(targets)
        return found if is_enough else None

    def fit(chunks: Sequence[Chunk], steps: KeptSteps) -> SparsityCurves:
        made = SparsityFit(spec, weights, chunks, progress=job.progress, kept=steps)
        return made.measured(made.curves(), targets)

    kind = NeuronRecord(SPARSITY_SUFFIX, [ALGORITHM_VERSION], SPLIT_CHUNKS * PART_TOKENS, find, fit, write_sparsity)
    return SparsityOutcome(*_calibrated(job, kind))


def calibrate_predictor(job: CalibrationJob) -> PredictorOutcome:
    """Fit a predictor of the model's active neurons and write it next to its store, unless one exists.

    A killed fit is resumed. All FFNs must be in rows, and the executor must not skip any neuron.

    Raises:
        UsageError: if FFNs are not in rows, the texts are too short, or no predictor is good enough.
        ModelError: if the model writes no text.
        StoreError, DiskFullError: if the result can't be written.
    """
    spec, weights, training = job.executor.spec, job.executor.weights, FactorTraining()
    if not spec.first_in_rows or spec.predictor_rank or spec.hot_curve:
        raise UsageError("these FFNs can't be predicted; open the model with sparsity='unpredicted' to calibrate.")

    def fit(chunks: Sequence[Chunk], steps: KeptSteps) -> NeuronPredictor:
        made = PredictorFit(spec, weights, chunks, training, progress=job.progress, kept=steps).predictor()
        made.chosen()  # raises if none is good enough
        return made

    identity = [ALGORITHM_VERSION, asdict(training)]
    find = partial(found_predictor, job.place)
    kind = NeuronRecord(PREDICTOR_SUFFIX, identity, PREDICTOR_TOKENS, find, fit, write_predictor)
    return PredictorOutcome(*_calibrated(job, kind))


@dataclass(frozen=True, slots=True)
class NeuronRecord(Generic[T]):
    """Functions that find, fit and write one kind of record about a store's neurons."""

    suffix: str  # suffix of the file name
    identity: list[object]  # JSON values that differ between fits with other numbers
    n_tokens: int  # most that are used
    find: Callable[[], T | None]
    fit: Callable[[Sequence[Chunk], KeptSteps], T]
    write: Callable[[T, str, str, Path, FileSystem], None]


def _calibrated(job: CalibrationJob, kind: NeuronRecord[T]) -> tuple[T, Path, float, bool]:
    """Return the fields of an outcome: an existing record, or a new one, written with the order of neurons."""
    file = neuron_file(job.place.store, kind.suffix)
    with job.locked():
        found = job.usable(kind.find)
        if found is not None:
            return found, file, 0.0, False
        start_s, text = job.clock(), job.text(kind.n_tokens)
        with job.steps(kind.suffix + PARTIAL_SUFFIX, text.identity, *kind.identity) as steps:
            chunks = text.chunks(steps)
            made = kind.fit(chunks, steps)
            kind.write(made, job.place.key, job.description, file, job.files)
            _write_order(job, chunks)
        return made, file, job.clock() - start_s, True


def _write_order(job: CalibrationJob, chunks: Sequence[Chunk]) -> None:
    """Write the order of the most active neurons first, unless the model has an order already."""
    spec, place = job.executor.spec, job.place
    if spec.activation in ZERO_ACTIVATIONS and not spec.hot_curve:
        order = fitted_order(spec, job.executor.weights, chunks)
        if order is not None:
            write_order(order, place.key, neuron_file(place.store, ORDER_SUFFIX), job.files)
