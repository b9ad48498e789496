"""Predictors: from a row's features to the chance that its likeliest candidate is the full model's token.

All answer NaN for a row whose features are not finite. NaN reaches no threshold: such a row passes every layer.
A probability's last bits may depend on the rows beside it, as products of matrices do; which drafts are made depends
on them, never which tokens come out.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from hetero_ee.errors import ModelError, shown
from hetero_ee.speculation.exits.features import Floats, is_finite

MAX_FEATURES, MAX_HIDDEN = 4096, 4096
Arrays = dict[str, NDArray[Any]]


class Predictor(Protocol):
    """kind: the name under which predictor_from_arrays finds it; n_features: columns that it reads."""

    kind: ClassVar[str]

    @property
    def n_features(self) -> int: ...

    def probability(self, features: Floats) -> Floats:
        """(m, n_features) fp32 -> (m,), 0 to 1, NaN for rows that are not finite."""

    def arrays(self) -> Arrays:
        """What predictor_from_arrays needs to make it again, bit for bit."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """The operation exit_predictor's parameters, fp32: first (h, n_features), first_bias (h,), second (h,),
    second_bias (1,); features go in as they are, unstandardised."""

    first: Floats
    first_bias: Floats
    second: Floats
    second_bias: Floats


@dataclass(frozen=True, slots=True, eq=False)
class MlpPredictor:
    """SpecEE's network: n_features - h - 1, ReLU, sigmoid. mean, scale (n_features,): features less mean, divided by
    scale, go into first (h, n_features), first_bias (h,); then second (h,), second_bias (1,)."""

    kind: ClassVar[str] = "mlp"
    mean: Floats
    scale: Floats
    first: Floats
    first_bias: Floats
    second: Floats
    second_bias: Floats
    network: Network = field(init=False, repr=False)
    _first_columns: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Folded once: the same network for the CPU, and for a GPU's operation, which knows no mean and scale.
        first, first_bias = _folded(self.first, self.first_bias, self.mean, self.scale)
        object.__setattr__(self, "network", Network(first, first_bias, self.second, self.second_bias))
        object.__setattr__(self, "_first_columns", np.ascontiguousarray(first.T))

    @property
    def n_features(self) -> int:
        return len(self.mean)

    def probability(self, features: Floats) -> Floats:
        """See Predictor.probability."""
        return _of_finite_rows(features, self.n_features, self._probability)

    def _probability(self, features: Floats) -> Floats:
        inner = features.dot(self._first_columns)
        inner += self.network.first_bias
        np.maximum(inner, 0.0, out=inner)
        return _sigmoid(inner.dot(self.network.second), self.network.second_bias)

    def arrays(self) -> Arrays:
        """See Predictor.arrays."""
        names = ("mean", "scale", "first", "first_bias", "second", "second_bias")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "MlpPredictor":
        """Raises ModelError for what arrays() cannot have written."""
        n_features, n_hidden = _length(cls.kind, arrays, "mean"), _length(cls.kind, arrays, "second")
        shapes = {"mean": (n_features,), "scale": (n_features,), "first": (n_hidden, n_features)}
        shapes |= {"first_bias": (n_hidden,), "second": (n_hidden,), "second_bias": (1,)}
        found = cls(**_checked(cls.kind, arrays, shapes))
        _require_usable(cls.kind, "first", found.network.first)
        _require_usable(cls.kind, "first_bias", found.network.first_bias)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class LogisticPredictor:
    """Logistic regression: mean, scale, weights (n_features,), bias (1,)."""

    kind: ClassVar[str] = "logistic"
    mean: Floats
    scale: Floats
    weights: Floats
    bias: Floats
    _folded: tuple[Floats, Floats] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_folded", _folded(self.weights, self.bias, self.mean, self.scale))

    @property
    def n_features(self) -> int:
        return len(self.mean)

    def probability(self, features: Floats) -> Floats:
        """See Predictor.probability."""
        return _of_finite_rows(features, self.n_features, self._probability)

    def _probability(self, features: Floats) -> Floats:
        weights, bias = self._folded
        return _sigmoid(features.dot(weights), bias)

    def arrays(self) -> Arrays:
        """See Predictor.arrays."""
        return {"mean": self.mean, "scale": self.scale, "weights": self.weights, "bias": self.bias}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "LogisticPredictor":
        """Raises ModelError for what arrays() cannot have written."""
        n_features = _length(cls.kind, arrays, "mean")
        shapes = dict.fromkeys(("mean", "scale", "weights"), (n_features,)) | {"bias": (1,)}
        found = cls(**_checked(cls.kind, arrays, shapes))
        for folded in found._folded:
            _require_usable(cls.kind, "weights", folded)
        return found


@dataclass(frozen=True, slots=True)
class ThresholdPredictor:
    """No network: the likeliest candidate's probability and its gap to the second each have to reach a threshold.

    Its "probability" is a score, 0.5 exactly where the nearer of the two is met: least of value / threshold, halved,
    at most 1. Reads exit_features of n_candidates.
    """

    kind: ClassVar[str] = "threshold"
    n_candidates: int
    top_probability: float
    gap: float

    @property
    def n_features(self) -> int:
        return 3 * self.n_candidates

    def probability(self, features: Floats) -> Floats:
        """See Predictor.probability."""
        return _of_finite_rows(features, self.n_features, self._probability)

    def _probability(self, features: Floats) -> Floats:
        top, gap = top_and_gap(features)
        score = np.minimum(top / np.float32(self.top_probability), gap / np.float32(self.gap))
        return np.asarray(np.minimum(0.5 * score, 1.0), np.float32)

    def arrays(self) -> Arrays:
        """See Predictor.arrays."""
        thresholds = np.array([self.top_probability, self.gap], np.float32)
        return {"n_candidates": np.array([self.n_candidates], np.float32), "thresholds": thresholds}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "ThresholdPredictor":
        """Raises ModelError for what arrays() cannot have written."""
        found = _checked(cls.kind, arrays, {"n_candidates": (1,), "thresholds": (2,)})
        n_candidates = float(found["n_candidates"][0])
        if not n_candidates.is_integer() or not 1 <= n_candidates <= MAX_FEATURES // 3:
            raise ModelError(f"the threshold predictor names {shown(n_candidates)} candidates; run calibrate again.")
        return cls(int(n_candidates), *(float(value) for value in found["thresholds"]))


def top_and_gap(features: Floats) -> tuple[Floats, Floats]:
    """exit_features (m, 3k) -> the largest candidate probability (m,), and how far the second lies below it."""
    k = features.shape[1] // 3
    softmax = features[:, k : 2 * k]
    if k == 1:
        return softmax[:, 0], softmax[:, 0]
    ordered = np.partition(softmax, (-2, -1), axis=1)
    return ordered[:, -1], ordered[:, -1] - ordered[:, -2]


def predictor_from_arrays(kind: str, arrays: Mapping[str, NDArray[Any]]) -> Predictor:
    """The predictor of this kind whose arrays() these are. Raises ModelError for anything else."""
    match kind:
        case MlpPredictor.kind:
            return MlpPredictor.from_arrays(arrays)
        case LogisticPredictor.kind:
            return LogisticPredictor.from_arrays(arrays)
        case ThresholdPredictor.kind:
            return ThresholdPredictor.from_arrays(arrays)
        case _:
            raise ModelError(f"exit predictors are mlp, logistic or threshold, not {shown(kind)}; run calibrate again.")


def _folded(weights: Floats, bias: Floats, mean: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """Weights (.., n_features) and bias that give for a row what the given ones give for (row - mean) / scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        unscaled = weights / scale.astype(np.float64)
        return unscaled.astype(np.float32), np.asarray(bias - unscaled @ mean.astype(np.float64), np.float32)


def _of_finite_rows(features: Floats, n_features: int, probability: Callable[[Floats], Floats]) -> Floats:
    if features.ndim != 2 or features.shape[1] != n_features:
        raise ValueError(f"features of shape {features.shape}, expected (m, {n_features})")
    if math.isfinite(np.vdot(features, features)):  # the quickest way to see that all are
        return probability(features)
    finite = is_finite(features)
    found = np.full(len(features), np.nan, np.float32)
    found[finite] = probability(features[finite])
    return found


def _sigmoid(total: NDArray[Any], bias: Floats) -> Floats:
    """1 / (1 + exp(-(total + bias))), in place in total (m,) and without overflow; bias (1,)."""
    total += bias
    total *= 0.5
    np.tanh(total, out=total)
    total += 1.0
    total *= 0.5
    return total


def _length(kind: str, arrays: Mapping[str, NDArray[Any]], name: str) -> int:
    found = arrays.get(name)
    if found is None or found.ndim != 1 or not 1 <= len(found) <= max(MAX_FEATURES, MAX_HIDDEN):
        raise ModelError(f"the {kind} predictor's array {name} is missing or misshapen; run calibrate again.")
    return len(found)


def _checked(kind: str, arrays: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The arrays, exactly these names and shapes, fp32 and finite, scales above 0. Raises ModelError."""
    if set(arrays) != set(shapes):
        raise ModelError(f"the {kind} predictor holds {shown(sorted(arrays))}; expected {', '.join(shapes)}.")
    for name, shape in shapes.items():
        found = arrays[name]
        if found.shape != shape or found.dtype != np.float32:
            raise ModelError(
                f"the {kind} predictor's {name} is {found.dtype} {found.shape}, expected float32 {shape}; "
                "run calibrate again."
            )
        _require_usable(kind, name, found, is_positive=name in ("scale", "thresholds"))
    return dict(arrays)


def _require_usable(kind: str, name: str, found: Floats, is_positive: bool = False) -> None:
    if not np.isfinite(found).all() or (is_positive and found.min() <= 0):
        raise ModelError(f"the {kind} predictor's {name} holds values that no calibration writes; run calibrate again.")
