"""A model of whose neurons tokens leave some out, as asked: what planning expects of it, and weights that do so."""

from dataclasses import replace
from pathlib import Path

from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.errors import StoreError, UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.curves import SparsityCurves
from hetero_ee.sparsity.file import WAY_OUT
from hetero_ee.sparsity.job import found_predictor, found_sparsity, order_or_warn
from hetero_ee.sparsity.prediction.file import WAY_OUT as PREDICTOR_WAY_OUT
from hetero_ee.sparsity.prediction.predictor import NeuronPredictor
from hetero_ee.sparsity.request import SparsityRequest
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.store.reader import is_store


def made_sparse(
    spec: ModelSpec, weights: ModelWeights, place: CalibrationPlace, request: SparsityRequest
) -> tuple[ModelSpec, ModelWeights]:
    """The same neuron-major model with the least activations that the request comes to, or with the predictor that it
    asks for, as calibrated for this store.

    Raises UsageError where nothing was calibrated, StoreError where that is damaged or of other weights.
    """
    if request.is_predicted:
        predictor, expected = _predicted(spec, found_predictor(place))
        return expected, predictor.merged(expected, weights, predictor.chosen().margin)
    curves = _known(place, request)
    expected = expecting(spec, request, curves)
    if request.is_exact:
        return expected, weights
    if curves is None:
        raise UsageError(f"which neurons this model can do without was not calibrated yet; {WAY_OUT} for it.")
    chosen = curves.auto() if request.share is None else curves.at(request.share)
    return expected, replace(weights, vectors=weights.vectors | chosen.least(spec, weights))


def planned_sparse(
    spec: ModelSpec, folder: Path | None, cache: Path, quantizer: str | None, request: SparsityRequest
) -> ModelSpec:
    """What opening the model in the folder so would plan for; None for a model that is shapes alone. Raises like
    made_sparse, but plans a share on paper where nothing was calibrated."""
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
        return _predicted(spec, None if place is None else found_predictor(place))[1]
    return expecting(spec, request, None if place is None else _known(place, request))


def expecting(spec: ModelSpec, request: SparsityRequest, curves: SparsityCurves | None) -> ModelSpec:
    """Neuron-major, with the shares of neurons that tokens should need: all that nothing is known of.

    Raises UsageError where AUTO has nothing to go by.
    """
    natural = 1.0 if curves is None else curves.active_share
    if request.share is None and curves is None:
        raise UsageError(f"which neurons this model can do without was not calibrated yet; {WAY_OUT} for it.")
    share = request.share
    if share is None:
        assert curves is not None
        share = curves.auto().target
    first_in_rows = spec.first_in_rows or request.first_in_rows
    shares = min(natural, 1 - share), natural
    return replace(spec, neuron_major=True, first_in_rows=first_in_rows, active_shares=shares)


def _predicted(spec: ModelSpec, predictor: NeuronPredictor | None) -> tuple[NeuronPredictor, ModelSpec]:
    """The predictor that is there, and what to expect with it. Raises UsageError."""
    if predictor is None:
        raise UsageError(f"what this model's active neurons are was not calibrated yet; {PREDICTOR_WAY_OUT} for it.")
    return predictor, predictor.expected(spec, predictor.chosen())


def _known(place: CalibrationPlace, request: SparsityRequest) -> SparsityCurves | None:
    """What was calibrated; what can't be read is an error only where it says which neurons to leave out."""
    try:
        return found_sparsity(place)
    except StoreError:
        if request.is_exact:
            return None
        raise
