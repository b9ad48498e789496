"""Predictors of active neurons: what they are fitted to, what is measured of them, and fits that are broken off."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.errors import ModelError, UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.factors import Factors, FactorTraining, fit_factors, rank_of
from hetero_ee.sparsity.fit import SparsityFit
from hetero_ee.sparsity.predictor import (
    MARGINS,
    MAX_PREDICTED_KL_NATS,
    NeuronPredictor,
    PredictorMeasurement,
    layer_arrays,
    least_within,
)
from hetero_ee.sparsity.predictor_fit import PredictorFit
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.store.record import parsed_checksummed
from hetero_ee.weights.weight import DenseWeight
from tests.sparse_models import random_chunks, sparse_model

FAMILIES = ("llama-relu", "opt")  # with a gate, and without one but with biases
SHORT = FactorTraining(n_steps=20)


def model(family: str) -> tuple[ModelSpec, ModelWeights]:
    spec, weights = sparse_model(family)
    return replace(spec, first_in_rows=True), weights


def fit(family: str, training: FactorTraining = SHORT, n_chunks: int = 16, **more: object) -> PredictorFit:
    spec, weights = model(family)
    return PredictorFit(spec, weights, random_chunks(spec, n_chunks), training, **more)  # type: ignore[arg-type]


def bits(predictor: NeuronPredictor) -> list[object]:
    arrays = [layer_arrays(layer) for layer in predictor.layers]
    return [predictor.measured, [{name: array.tobytes() for name, array in each.items()} for each in arrays]]


def planted(n_tokens: int = 2000, rank: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of unequal size, a first matrix of this rank but for noise, scores and a shift: a tenth is active."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(n_tokens, 48, generator=random) * torch.linspace(0.1, 3, 48)
    first = torch.randn(96, rank, generator=random) @ torch.randn(rank, 48, generator=random)
    first += 0.1 * torch.randn(96, 48, generator=random)
    products = inputs @ first.T
    shift = torch.full((96,), -float(products.quantile(0.9)))
    return inputs, (products + shift).clamp_min(0).bfloat16(), first, shift


def test_of_a_first_matrix_of_low_rank_the_factors_find_the_active_neurons() -> None:
    inputs, scores, first, shift = planted(5000)
    found = fit_factors(inputs[:4000], scores[:4000], first, shift, 8, FactorTraining())
    logits = inputs[4000:] @ found.inner.T @ found.outer.T + found.bias
    is_active, is_predicted = scores[4000:] > 0, logits > -2
    recall = (is_active & is_predicted).sum() / is_active.sum()
    assert is_active.float().mean() == pytest.approx(0.1, abs=0.03)
    assert recall > 0.95 and is_predicted.float().mean() < 0.2


def test_what_adds_most_is_found_first() -> None:
    inputs, scores, first, shift = planted(rank=30)
    found = fit_factors(inputs, scores, first, shift, 8, FactorTraining())
    is_active, is_predicted = scores > 0, inputs @ found.inner.T @ found.outer.T + found.bias > 0
    recall = (is_active & is_predicted).sum() / is_active.sum()
    found_score = scores[is_predicted].double().sum() / scores.double().sum()
    assert 0.3 < recall < 0.9 and found_score > recall + 0.1


def test_a_short_text_takes_fewer_steps() -> None:
    training = FactorTraining()
    assert [training.steps(n_tokens) for n_tokens in (1, 512, 1024, 4096, 8192)] == [1, 40, 80, 300, 300]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_fit_does_not_depend_on_units(scale: float) -> None:
    inputs, scores, first, shift = planted()

    def logits(factors: Factors, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ factors.inner.T @ factors.outer.T + factors.bias

    plain = logits(fit_factors(inputs, scores, first, shift, 8, SHORT), inputs)
    scaled = logits(fit_factors(scale * inputs, scale * scores, first, scale * shift, 8, SHORT), scale * inputs)
    assert ((plain > 0) == (scaled > 0)).float().mean() > 0.995


def test_nothing_is_active_or_nothing_comes_in() -> None:
    inputs, scores, first, shift = planted()
    for given_inputs, given_scores in ((inputs, torch.zeros_like(scores)), (torch.zeros_like(inputs), scores)):
        found = fit_factors(given_inputs, given_scores, first, shift, 8, SHORT)
        assert all(part.isfinite().all() for part in (found.inner, found.outer, found.bias))


def test_ranks_are_an_eighth_in_whole_tiles() -> None:
    assert [rank_of(size) for size in (16, 64, 192, 256, 264, 4096)] == [16, 32, 32, 32, 64, 512]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(1)
def test_a_fit_is_the_same_each_time_and_better_than_chance(family: str) -> None:
    found = fit(family).predictor()
    assert bits(found) == bits(fit(family).predictor())
    assert bits(found) != bits(fit(family, replace(SHORT, seed=1)).predictor())
    measured = fit(family).measure(found, 0.0)
    assert measured.recall > measured.predicted_share + 0.1 and measured.kl_nats > 0
    most = fit(family).measure(found, MARGINS[-1])
    assert most.recall > measured.recall and most.predicted_share > measured.predicted_share
    assert most.active_share == pytest.approx(measured.active_share, abs=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_all_are_predicted_nothing_changes(family: str) -> None:
    found = fit(family).predictor()
    layers = tuple(replace(layer, bias=torch.full_like(layer.bias, 1e6)) for layer in found.layers)
    measured = fit(family).measure(NeuronPredictor(layers, ()), 0.0)
    assert (measured.recall, measured.predicted_share, measured.kl_nats) == (1, 1, 0)


def test_states_that_are_not_finite_are_refused() -> None:
    spec, weights = model("llama-relu")
    name = "layers.1.attention.output"
    weights.matrices[name] = DenseWeight(torch.full_like(weights.matrices[name].dequantize(), torch.inf))
    with pytest.raises(ModelError, match="layer 1 of this model computes values that are not finite"):
        PredictorFit(spec, weights, random_chunks(spec), SHORT).predictor()


@given(st.integers(0, len(MARGINS)))
def test_the_least_margin_within_the_bound_is_chosen(first_good: int) -> None:
    def measure(margin: float) -> PredictorMeasurement:
        kl = MAX_PREDICTED_KL_NATS if MARGINS.index(margin) >= first_good else 0.1
        return PredictorMeasurement(margin, 0.9, 0.2, 0.1, kl)

    found = least_within(measure)
    predictor = NeuronPredictor((), tuple(found))
    assert len(found) <= 6
    if first_good < len(MARGINS):
        assert predictor.chosen().margin == MARGINS[first_good]
    else:
        with pytest.raises(UsageError, match=r"within 0.001 nats of KL divergence, 0.1 at best; .* --sparsity exact"):
            predictor.chosen()


def kept(folder: Path) -> KeptSteps:
    """By a clock that stands: nothing takes time, so that every step is saved."""
    return KeptSteps(folder / "partial", "ab" * 32, clock=lambda: 0.0)


def interrupting(call: int) -> Callable[[str, int, int], None]:
    calls = iter(range(call))

    def progress(*_: object) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("call", [0, 1, 3, 6, 14])
@pytest.mark.sample(1)
def test_a_fit_that_was_broken_off_goes_on_to_the_same_bytes(
    tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bits(fit("llama-relu").predictor())
    with pytest.raises(KeyboardInterrupt):
        fit("llama-relu", progress=interrupting(call), kept=kept(tmp_path)).predictor()
    n_fitted = 0

    def counted(*given: object) -> Factors:
        nonlocal n_fitted
        n_fitted += 1
        return fit_factors(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("hetero_ee.sparsity.predictor_fit.fit_factors", counted)
    steps = kept(tmp_path)
    assert bits(fit("llama-relu", kept=steps).predictor()) == whole
    assert n_fitted == max(0, 4 - call)  # of 4 layers, those that were done are not fitted again
    steps.remove()
    assert not [*tmp_path.iterdir()]


def test_states_of_layers_that_are_done_with_are_forgotten(tmp_path: Path) -> None:
    fit("llama-relu", kept=kept(tmp_path)).predictor()
    arrays = parsed_checksummed((tmp_path / "partial").read_bytes())
    assert [name for name in arrays if name.endswith("states")] == ["layer 3/states"]


@pytest.mark.parametrize("call", [0, 9, 17, 30])
@pytest.mark.sample(1)
def test_curves_that_were_broken_off_go_on_to_the_same_bytes(tmp_path: Path, call: int) -> None:
    spec, weights = sparse_model("llama")
    chunks = random_chunks(spec)

    def curves(**more: object) -> tuple[object, ...]:
        made = SparsityFit(spec, weights, chunks, **more)  # type: ignore[arg-type]
        found = made.measured(made.curves(), (0.25,))
        return found.thresholds.tobytes(), found.errors.tobytes(), found.measured

    with pytest.raises(KeyboardInterrupt):
        curves(progress=interrupting(call), kept=kept(tmp_path))
    assert curves(kept=kept(tmp_path)) == curves()


def test_what_is_kept_is_this_steps_alone() -> None:
    steps = KeptSteps()
    assert [steps.once(f"layer {n}", lambda n=n: {"": np.array([n])})[""][0] for n in (1, 10, 1)] == [1, 10, 1]
