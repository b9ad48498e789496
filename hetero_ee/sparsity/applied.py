"""Applies activation sparsity to a model: the neurons that tokens skip, and the shares that planning expects."""

from dataclasses import replace
from pathlib import Path

from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.errors import StoreError, UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.curves import WAY_OUT, SparsityCurves
from hetero_ee.sparsity.job import found_predictor, found_sparsity, order_or_warn
from hetero_ee.sparsity.predictor import WAY_OUT as PREDICTOR_WAY_OUT
from hetero_ee.sparsity.predictor import NeuronPredictor
from hetero_ee.sparsity.request import SparsityRequest
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.store.calibration_files import PREDICTOR_SUFFIX, SPARSITY_SUFFIX, neuron_file
from hetero_ee.weights.store.reader import is_store


def made_sparse(
    spec: ModelSpec, weights: ModelWeights, place: CalibrationPlace, request: SparsityRequest
) -> tuple[ModelSpec, ModelWeights]:
    """Return the neuron-major model with the calibrated thresholds or predictor that the request needs.

    Raises:
        UsageError: if nothing was calibrated.
        StoreError: if the calibration is damaged or belongs to other weights.
    """
    if request.is_predicted:
        predictor, expected = _predicted(spec, found_predictor(place), request)
        return expected, predictor.merged(expected, weights, predictor.chosen().margin)
    curves = _known(place, request)
    expected = expecting(spec, request, curves)
    if request.is_exact:
        return expected, weights
    if curves is None:
        raise _uncalibrated(request)
    chosen = curves.auto() if request.share is None else curves.at(request.share)
    return expected, replace(weights, vectors=weights.vectors | chosen.least(spec, weights))


def require_calibration(store: Path, request: SparsityRequest) -> None:
    """Check that the calibration that the request needs exists.

    Args:
        store: the model's store, which need not exist yet.

    Raises:
        UsageError: if there is no such calibration.
    """
    suffix = PREDICTOR_SUFFIX if request.is_predicted else None if request.is_exact else SPARSITY_SUFFIX
    if suffix is not None and not neuron_file(store, suffix).exists():
        raise _uncalibrated(request)


def planned_sparse(
    spec: ModelSpec, folder: Path | None, cache: Path, quantizer: str | None, request: SparsityRequest
) -> ModelSpec:
    """Return the model that opening the folder with this request would plan for.

    A requested share is planned even if nothing was calibrated, unlike in made_sparse.

    Args:
        folder: None if only the model's shapes are known.
    """
    request.check(spec)
    place = None
    if folder is not None and (is_store(folder) or any(folder.glob("*.safetensors"))):
        layout = {"neuron_major": True, "first_in_rows": request.first_in_rows}
        place = CalibrationPlace.of_model(spec, folder, cache, quantizer, **layout)
        place = place if is_store(place.store) else None
    order = None if place is None else order_or_warn(place, lambda problem: None)
    if order is not None:
        spec = replace(spec, hot_curve=order.curve)
    if request.is_predicted:
        return _predicted(spec, None if place is None else found_predictor(place), request)[1]
    return expecting(spec, request, None if place is None else _known(place, request))


def expecting(spec: ModelSpec, request: SparsityRequest, curves: SparsityCurves | None) -> ModelSpec:
    """Return the neuron-major model with the expected shares of active neurons, or all neurons if nothing is known.

    Raises: UsageError: if the request is AUTO and nothing was calibrated.
    """
    natural = 1.0 if curves is None else curves.active_share
    if request.share is None and curves is None:
        raise _uncalibrated(request)
    share = request.share
    if share is None:
        assert curves is not None
        share = curves.auto().target
    first_in_rows = spec.first_in_rows or request.first_in_rows
    shares = min(natural, 1 - share), natural
    return replace(spec, neuron_major=True, first_in_rows=first_in_rows, active_shares=shares)


def _predicted(
    spec: ModelSpec, predictor: NeuronPredictor | None, request: SparsityRequest
) -> tuple[NeuronPredictor, ModelSpec]:
    """Return the predictor and the spec with it. Raises: UsageError: if no predictor was calibrated."""
    if predictor is None:
        raise _uncalibrated(request)
    return predictor, predictor.expected(spec, predictor.chosen())


def _uncalibrated(request: SparsityRequest) -> UsageError:
    if request.is_predicted:
        return UsageError(f"this model has no calibrated predictor of active neurons; {PREDICTOR_WAY_OUT}.")
    return UsageError(f"this model has no calibration of neurons to skip; {WAY_OUT}.")


def _known(place: CalibrationPlace, request: SparsityRequest) -> SparsityCurves | None:
    """Return the calibration. An unreadable one is an error only if it decides which neurons are skipped, else None."""
    try:
        return found_sparsity(place)
    except StoreError:
        if request.is_exact:
            return None
        raise
