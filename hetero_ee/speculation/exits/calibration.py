"""Calibration: what was measured of a model's early exits, and what was fitted to it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.activations import FREQUENCY
from hetero_ee.calibration.metrics import DepthMetrics, ExitLayerMetrics
from hetero_ee.planning.statistics import ExitRates, ExitStatistics, WalkRates
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.predictors import Predictor
from hetero_ee.speculation.exits.schedule import ExitSchedule


@dataclass(frozen=True, slots=True, eq=False)
class FittedExitLayer:
    """Exits in front of layer `exit_layer`, counted from 0: `exit_layer` layers have run.

    exit_map: None where none agrees with the full model more often than no map does. A row may exit where the
    predictor's probability is at least `threshold`; the features are those of the first layer evaluated for a row,
    where the whole head takes the candidates. sliced_predictor, sliced_threshold: the same of a row whose candidates an
    earlier exit layer has taken, with the change since the one evaluated last; None where too few rows tell.
    """

    exit_layer: int
    exit_map: ExitMap | None
    predictor: Predictor
    threshold: float
    sliced_predictor: Predictor | None
    sliced_threshold: float

    def opens(self, features: NDArray[np.float32], *, is_sliced: bool) -> NDArray[np.bool_]:
        """(m, 12) -> (m,): which rows may exit. is_sliced: an earlier exit layer has taken their candidates."""
        if not is_sliced:
            return np.asarray(self.predictor.probability(features) >= self.threshold)
        if self.sliced_predictor is None:
            return np.zeros(len(features), np.bool_)
        return np.asarray(self.sliced_predictor.probability(features) >= self.sliced_threshold)


@dataclass(frozen=True, slots=True, eq=False)
class ExitLayerCalibration(FittedExitLayer):
    """The same with its figures. walk: of tokens judged at the schedule's exit layers before this one as well."""

    metrics: ExitLayerMetrics
    walk: WalkRates


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """What it was measured on. description: for people. Tokens are those that count, without position 0 of a chunk."""

    description: str
    n_train_tokens: int
    n_threshold_tokens: int
    n_held_out_tokens: int
    n_activation_tokens: int

    @property
    def n_tokens(self) -> int:
        return self.n_train_tokens + self.n_threshold_tokens + self.n_held_out_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """All figures are of held-out tokens. schedule: the exit layers worth judging rows at, none where that is not
    known; its units are bytes read (see schedule_fitting.py). activations: means a token by name, see
    activations.py."""

    n_layers: int
    hidden_size: int
    text: CalibrationText
    exit_layers: tuple[ExitLayerCalibration, ...]
    schedule: ExitSchedule
    depths: DepthMetrics
    activations: Mapping[str, NDArray[np.float32]]

    def at(self, exit_layer: int) -> ExitLayerCalibration:
        """exit_layer: 1 to n_layers - 1."""
        return self.exit_layers[exit_layer - 1]

    @property
    def neuron_frequencies(self) -> NDArray[np.float32]:
        """(n_layers, ffn_size): share of tokens at which each FFN neuron is active."""
        names = (f"layers.{layer}.ffn.{FREQUENCY}" for layer in range(self.n_layers))
        return np.stack([self.activations[name] for name in names])

    def statistics(self) -> ExitStatistics:
        """What the planner wants to know. Every token passes every layer in the end, so that no layer is spared."""
        metrics = {each.exit_layer: each.metrics for each in self.exit_layers}
        rates = {n: ExitRates(each.exit_rate, each.precision, each.refused_precision) for n, each in metrics.items()}
        return ExitStatistics(f"calibration on {self.text.description}", self.n_layers, rates)

    def levels(self, exit_layer: int) -> tuple[int, ...]:
        """The schedule's exit layers in front of this one."""
        return tuple(place for place in self.schedule.exit_layers if place < exit_layer)
