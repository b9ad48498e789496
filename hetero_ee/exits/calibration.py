"""Calibration: what was measured of a model's early exits, and what was fitted to it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.exits.activations import FREQUENCY
from hetero_ee.exits.exit_map import ExitMap
from hetero_ee.exits.figures import BoundaryFigures, DepthFigures
from hetero_ee.exits.predictors import Predictor
from hetero_ee.planning.rounds import ExitRates
from hetero_ee.planning.statistics import BoundaryRates, ExitStatistics


@dataclass(frozen=True, slots=True, eq=False)
class FittedBoundary:
    """Exits in front of layer `boundary`, counted from 0: `boundary` layers have run.

    exit_map: None where none agrees with the full model more often than no map does. A row may exit where the
    predictor's probability is at least `threshold`; the features are those of the first layer evaluated for a row.
    """

    boundary: int
    exit_map: ExitMap | None
    predictor: Predictor
    threshold: float


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryCalibration(FittedBoundary):
    """The same with its figures."""

    figures: BoundaryFigures


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
    """All figures are of held-out tokens. activations: means a token by name, see activations.py."""

    n_layers: int
    hidden_size: int
    text: CalibrationText
    boundaries: tuple[BoundaryCalibration, ...]
    depths: DepthFigures
    activations: Mapping[str, NDArray[np.float32]]

    def at(self, boundary: int) -> BoundaryCalibration:
        """boundary: 1 to n_layers - 1."""
        return self.boundaries[boundary - 1]

    @property
    def neuron_frequencies(self) -> NDArray[np.float32]:
        """(n_layers, ffn_size): share of tokens at which each FFN neuron is active."""
        names = (f"layers.{layer}.ffn.{FREQUENCY}" for layer in range(self.n_layers))
        return np.stack([self.activations[name] for name in names])

    def statistics(self) -> ExitStatistics:
        """What the planner wants to know. Every token passes every layer in the end, so that no layer is spared."""
        rates = (
            BoundaryRates(each.boundary, ExitRates(each.figures.exit_rate, each.figures.precision))
            for each in self.boundaries
        )
        return ExitStatistics(f"calibration on {self.text.description}", self.n_layers, tuple(rates))
