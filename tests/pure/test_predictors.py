"""Predictors: held to the operation exit_predictor, safe for rows that mean nothing, read back with suspicion."""

from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import ModelError
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.predictors import (
    LogisticPredictor,
    MlpPredictor,
    Predictor,
    ThresholdPredictor,
    predictor_from_arrays,
)
from hetero_ee_kernels.reference import exit_predictor

KINDS = ["mlp", "logistic", "threshold"]


def random(seed: int, *shape: int, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale + mean).astype(np.float32)


def predictor_of(kind: str, n_hidden: int = 64) -> Predictor:
    mean = np.array([8.0] * 4 + [0.25] * 4 + [0.1] * 4, np.float32)
    scale = np.array([2.0] * 4 + [0.3] * 8, np.float32)
    match kind:
        case "mlp":
            first, second = random(3, n_hidden, 12, scale=0.3), random(4, n_hidden, scale=1.5 * n_hidden**-0.5)
            return MlpPredictor(mean, scale, first, random(5, n_hidden, mean=1.0), second, random(6, 1))
        case "logistic":
            return LogisticPredictor(mean, scale, random(3, 12, scale=0.3), random(4, 1))
        case _:
            return ThresholdPredictor(4, 0.5, 0.2)


def features(m: int, seed: int = 7) -> np.ndarray:
    return exit_features(random(seed, m, 4, scale=2.0, mean=8.0), np.full((m, 4), 0.25, np.float32))


@pytest.mark.parametrize("n_hidden", [1, 64, 512])
def test_features_and_network_are_the_operations(n_hidden: int) -> None:
    predictor = predictor_of("mlp", n_hidden)
    assert isinstance(predictor, MlpPredictor)
    previous, its_previous = np.zeros((6, 4), np.float32), torch.zeros(6, 4)
    parts = vars_of(predictor.network)
    for layer in range(3):
        logits = random(layer, 6, 4, scale=2.0, mean=8.0)
        found = predictor.probability(exit_features(logits, previous))
        expected = exit_predictor(torch.from_numpy(logits), its_previous, *parts)
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)
        assert found.std() > 0.01


def vars_of(network: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(getattr(network, name)) for name in ("first", "first_bias", "second", "second_bias")]


def test_the_mlp_standardises_what_it_reads() -> None:
    predictor = predictor_of("mlp")
    assert isinstance(predictor, MlpPredictor)
    rows = features(9).astype(np.float64)
    inner = np.maximum(((rows - predictor.mean) / predictor.scale) @ predictor.first.T + predictor.first_bias, 0)
    expected = 1 / (1 + np.exp(-(inner @ predictor.second + predictor.second_bias)))
    np.testing.assert_allclose(predictor.probability(features(9)), expected, atol=1e-5)


def test_the_logistic_regression_standardises_what_it_reads() -> None:
    predictor = predictor_of("logistic")
    assert isinstance(predictor, LogisticPredictor)
    total = ((features(9) - predictor.mean) / predictor.scale).astype(np.float64) @ predictor.weights + predictor.bias
    np.testing.assert_allclose(predictor.probability(features(9)), 1 / (1 + np.exp(-total)), atol=1e-5)


@pytest.mark.parametrize(
    ("softmax", "expected"),
    [
        ([0.5, 0.3, 0.1, 0.1], 0.5),
        ([0.1, 0.8, 0.05, 0.05], 0.8),
        ([0.5, 0.45, 0.05, 0.0], 0.125),
        ([0.4, 0, 0, 0], 0.4),
    ],
)
def test_both_thresholds_have_to_be_met(softmax: list[float], expected: float) -> None:
    rows = np.zeros((1, 12), np.float32)
    rows[0, 4:8] = softmax
    assert ThresholdPredictor(4, 0.5, 0.2).probability(rows)[0] == pytest.approx(expected, abs=1e-6)


def test_one_candidate_has_no_second() -> None:
    rows = np.array([[3.0, 1.0, 0.0]], np.float32)
    assert ThresholdPredictor(1, 0.5, 0.5).probability(rows).tolist() == [1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_means_nothing_reaches_no_threshold_and_harms_no_other(kind: str, bad: float) -> None:
    predictor, rows = predictor_of(kind), features(5)
    good = predictor.probability(rows.copy())
    rows[1, 5], rows[3, 0] = bad, bad
    with np.errstate(all="raise"):
        found = predictor.probability(rows)
    assert np.isnan(found[[1, 3]]).all() and not (found[[1, 3]] >= 0).any()
    np.testing.assert_allclose(found[[0, 2, 4]], good[[0, 2, 4]], atol=1e-6)
    assert np.isnan(predictor.probability(np.full((1, 12), bad, np.float32))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_chances_whatever_the_logits(kind: str) -> None:
    logits = np.array([[1e4, -1e4, 0, 3], [-1e4, -1e4, -1e4, -1e4], [0, 0, 0, 0]], np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = predictor_of(kind).probability(exit_features(logits, np.zeros((3, 4), np.float32)))
    assert found.dtype == np.float32 and ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_other_columns_are_refused(kind: str) -> None:
    for rows in (features(2)[:, :11], features(1)[0], np.zeros((2, 20), np.float32)):
        with pytest.raises(ValueError, match=r"expected \(m, 12\)"):
            predictor_of(kind).probability(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_written_and_read_back_bit_for_bit(kind: str) -> None:
    predictor = predictor_of(kind)
    arrays = predictor.arrays()
    assert all(array.dtype == np.float32 for array in arrays.values())
    again = predictor_from_arrays(predictor.kind, {name: array.copy() for name, array in arrays.items()})
    assert type(again) is type(predictor) and again.n_features == predictor.n_features == 12
    np.testing.assert_array_equal(again.probability(features(9)), predictor.probability(features(9)))


def damaged(arrays: dict[str, np.ndarray], name: str, what: str) -> dict[str, np.ndarray]:
    found = {key: array.copy() for key, array in arrays.items()}
    match what:
        case "missing":
            del found[name]
        case "extra":
            found["more"] = found[name]
        case "double":
            found[name] = found[name].astype(np.float64)
        case "shape":
            found[name] = np.append(found[name].ravel(), found[name].ravel())
        case "scalar":
            found[name] = found[name].ravel()[0].reshape(())
        case "empty":
            found[name] = found[name][:0]
        case "nan" | "inf":
            found[name].flat[0] = float(what)
    return found


@pytest.mark.parametrize("what", ["missing", "extra", "double", "shape", "scalar", "empty", "nan", "inf"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_in_one_sentence(kind: str, what: str) -> None:
    arrays = predictor_of(kind).arrays()
    for name in arrays:
        with pytest.raises(ModelError, match=f"{kind} predictor") as caught:
            predictor_from_arrays(kind, damaged(arrays, name, what))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("mlp", "scale", 0.0),
        ("mlp", "scale", -1.0),
        ("mlp", "scale", 1e-44),
        ("mlp", "mean", 3e38),
        ("logistic", "scale", 0.0),
        ("logistic", "scale", 1e-44),
        ("threshold", "thresholds", 0.0),
        ("threshold", "n_candidates", 2.5),
        ("threshold", "n_candidates", 0.0),
        ("threshold", "n_candidates", 1e9),
    ],
)
def test_values_that_no_calibration_writes_are_refused(kind: str, name: str, value: float) -> None:
    arrays = damaged(predictor_of(kind).arrays(), name, "")
    arrays[name][:] = value
    with pytest.raises(ModelError):
        predictor_from_arrays(kind, arrays)


@pytest.mark.parametrize("kind", ["mlp", "logistic"])
def test_weights_that_overflow_once_unscaled_are_refused(kind: str) -> None:
    arrays = damaged(predictor_of(kind).arrays(), "scale", "")
    arrays["mean"][:], arrays["scale"][:] = 0.0, 1e-44
    with pytest.raises(ModelError, match="no calibration writes"):
        predictor_from_arrays(kind, arrays)


@pytest.mark.parametrize("kind", ["", "forest", "mlp\x1b[2J", "x" * 10_000])
def test_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="mlp, logistic or threshold") as caught:
        predictor_from_arrays(kind, {})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200
