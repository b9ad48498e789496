"""Weights of which executors leave out what was asked for."""

from dataclasses import replace

from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.file import WAY_OUT
from hetero_ee.sparsity.job import found_sparsity
from hetero_ee.sparsity.request import SparsityRequest
from hetero_ee.weights.model_weights import ModelWeights


def with_thresholds(
    weights: ModelWeights, spec: ModelSpec, place: CalibrationPlace, request: SparsityRequest
) -> ModelWeights:
    """The same neuron-major weights with the least activations that the request comes to, as calibrated for this store.

    Raises UsageError where nothing was calibrated, StoreError where that is damaged or of other weights.
    """
    if request.is_exact:
        return weights
    curves = found_sparsity(place)
    if curves is None:
        raise UsageError(f"which neurons this model can do without was not calibrated yet; {WAY_OUT} for it.")
    chosen = curves.auto() if request.share is None else curves.at(request.share)
    return replace(weights, vectors=weights.vectors | chosen.least(spec, weights))
