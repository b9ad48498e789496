"""Calibrates sparsity on text and writes the results next to the store."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_ee.calibration.job import WAITING, CalibrationRequest, usable
from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.calibration.stages import SPLIT_CHUNKS, Chunk
from hetero_ee.config import Progress
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import StoreError, UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.sparsity.curves import SparsityCurves
from hetero_ee.sparsity.file import read_sparsity, write_sparsity
from hetero_ee.sparsity.fit import PART_TOKENS, SparsityFit
from hetero_ee.sparsity.material import Material
from hetero_ee.sparsity.order import NeuronOrder, fitted_order, read_order, write_order
from hetero_ee.sparsity.prediction.factors import FactorTraining
from hetero_ee.sparsity.prediction.file import read_predictor, write_predictor
from hetero_ee.sparsity.prediction.fit import FITTED_TOKENS, PredictorFit
from hetero_ee.sparsity.prediction.predictor import NeuronPredictor
from hetero_ee.sparsity.request import ZERO_ACTIVATIONS
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.store.calibration_files import ORDER_SUFFIX, PREDICTOR_SUFFIX, SPARSITY_SUFFIX, neuron_file
from hetero_ee.weights.store.filesystem import FileSystem, store_lock

ALGORITHM_VERSION = 1  # increases when the numbers change; fits of other versions are not resumed
PREDICTOR_TOKENS = 2 * FITTED_TOKENS  # half of the chunks are fitted to


@dataclass(frozen=True, slots=True)
class SparsityOutcome:
    """Sparsity curves that were made, or found."""

    curves: SparsityCurves
    file: Path
    seconds: float  # of this run; 0 if it was found
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class PredictorOutcome:
    """A predictor of active neurons that was made, or found."""

    predictor: NeuronPredictor
    file: Path
    seconds: float  # as above
    is_new: bool = True


def found_sparsity(place: CalibrationPlace) -> SparsityCurves | None:
    """Return the sparsity curves of the opened store, None if it has none. Raises: StoreError."""
    return read_sparsity(neuron_file(place.store, SPARSITY_SUFFIX), place.spec, place.key)


def found_predictor(place: CalibrationPlace) -> NeuronPredictor | None:
    """Return the predictor of the opened store's neurons, None if it has none. Raises: StoreError."""
    return read_predictor(neuron_file(place.store, PREDICTOR_SUFFIX), place.spec, place.key)


def order_or_warn(place: CalibrationPlace, warn: Callable[[str], None]) -> NeuronOrder | None:
    """Return the order of the opened store's neurons, None if it has none. Warns about one that can't be read."""
    try:
        return read_order(neuron_file(place.store, ORDER_SUFFIX), place.spec, place.key)
    except StoreError as error:
        warn(str(error))
        return None


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
    """Fit the model's sparsity curves and write them next to its store, unless these targets are measured already.

    A killed fit is resumed. Only one process calibrates a store at a time.

    Args:
        executor: Has neuron-major FFNs and leaves out no neuron.

    Raises:
        UsageError: FFNs are not neuron-major, or the texts are too short.
        ModelError: The model writes no text.
        StoreError, DiskFullError: The result can't be written.
    """
    spec, weights, file = executor.spec, executor.weights, neuron_file(place.store, SPARSITY_SUFFIX)
    if not spec.neuron_major:
        raise UsageError("these FFNs are not neuron-major; open the model with sparsity='dense' to calibrate.")
    files = FileSystem()
    with store_lock(place.folder, files, lambda: progress(WAITING, 0, 0) if progress else None):
        found = None if request.force else usable(lambda: found_sparsity(place), progress)
        if found is not None and {each.target for each in found.measured}.issuperset(targets):
            return SparsityOutcome(found, file, 0.0, is_new=False)
        start_s = clock()
        material = Material(executor, tokenizer, ending, request, SPLIT_CHUNKS * PART_TOKENS, progress, clock)
        with material.keeping(place, SPARSITY_SUFFIX, [ALGORITHM_VERSION]) as (chunks, kept):
            fit = SparsityFit(spec, weights, chunks, progress=progress, kept=kept)
            curves = fit.measured(fit.curves(), targets)
        write_sparsity(curves, place.key, material.description, file, files)
        _write_order(spec, weights, chunks, place, files)
        kept.remove()
    return SparsityOutcome(curves, file, clock() - start_s)


def calibrate_predictor(
    executor: Executor,
    tokenizer: Tokenizer,
    ending: Ending,
    place: CalibrationPlace,
    request: CalibrationRequest,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PredictorOutcome:
    """Fit a predictor of the model's active neurons and write it next to its store, unless one exists.

    It is resumed and locked like calibrate_sparsity.

    Args:
        executor: All its FFNs are in rows, and it leaves out no neuron.

    Raises:
        UsageError: FFNs are not in rows, the texts are too short, or no predictor is good enough.
        ModelError: The model writes no text.
        StoreError, DiskFullError: The result can't be written.
    """
    spec, weights, file = executor.spec, executor.weights, neuron_file(place.store, PREDICTOR_SUFFIX)
    if not spec.first_in_rows or spec.predictor_rank or spec.hot_curve:
        raise UsageError("these FFNs can't be predicted; open the model with sparsity='unpredicted' to calibrate.")
    files, training = FileSystem(), FactorTraining()
    with store_lock(place.folder, files, lambda: progress(WAITING, 0, 0) if progress else None):
        found = None if request.force else usable(lambda: found_predictor(place), progress)
        if found is not None:
            return PredictorOutcome(found, file, 0.0, is_new=False)
        start_s = clock()
        material = Material(executor, tokenizer, ending, request, PREDICTOR_TOKENS, progress, clock)
        with material.keeping(place, PREDICTOR_SUFFIX, [ALGORITHM_VERSION, asdict(training)]) as (chunks, kept):
            predictor = PredictorFit(spec, weights, chunks, training, progress=progress, kept=kept).predictor()
        predictor.chosen()
        write_predictor(predictor, place.key, material.description, file, files)
        _write_order(spec, weights, chunks, place, files)
        kept.remove()
    return PredictorOutcome(predictor, file, clock() - start_s)


def _write_order(
    spec: ModelSpec, weights: ModelWeights, chunks: Sequence[Chunk], place: CalibrationPlace, files: FileSystem
) -> None:
    """Write the order of neurons that are often 0, unless the model has one."""
    if spec.activation in ZERO_ACTIVATIONS and not spec.hot_curve:
        order = fitted_order(spec, weights, chunks)
        if order is not None:
            write_order(order, place.key, neuron_file(place.store, ORDER_SUFFIX), files)
