"""Calibration of a model's early exits: measurements, and the maps and predictors fitted to them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hetero_ee.options.engine import BOTH, NO_SCHEDULE, OFFLINE, ONLINE
from hetero_ee.planning.statistics import DepthStatistics, ExitRates, ExitStatistics
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.predictor import ExitPredictor
from hetero_ee.speculation.exits.recent_exits import N_LAST, RADIUS

MAX_DRAFTS = 8  # drafts in one simulated draft-verify step
NO_EXIT = 2.0  # a threshold that no probability reaches


@dataclass(frozen=True, slots=True)
class ExitLayerMetrics:
    """Metrics of one exit layer, measured on held-out tokens.

    Acceptance comes from simulated draft-verify steps. Such a step drafts until the gate refuses or MAX_DRAFTS is
    reached, and keeps the drafts before the first wrong one.
    """

    agreement: float  # share of tokens whose likeliest token here, without a map, is the full model's
    mapped_agreement: float | None  # with the exit map, if there is one
    exit_rate: float  # share of tokens at which the gate opens
    precision: float  # share of the exits whose draft is right
    recall: float  # share of the tokens with a right draft that exit
    acceptance: float  # share of drafts kept
    kept_drafts: tuple[int, ...]  # number of draft-verify steps by the drafts that they kept, from 0 on
    refused_precision: float  # share of the other tokens whose draft would be right

    def __post_init__(self) -> None:
        shares = (self.agreement, self.exit_rate, self.precision, self.recall, self.acceptance, self.refused_precision)
        _check_shares(*shares, self.mapped_agreement or 0.0)
        if len(self.kept_drafts) != MAX_DRAFTS + 1 or min(self.kept_drafts) < 0:
            raise ValueError(f"kept_drafts has to be {MAX_DRAFTS + 1} counts")

    @property
    def drafted_agreement(self) -> float:
        """Share of drafts that agree with the full model, using the exit map if there is one."""
        return self.agreement if self.mapped_agreement is None else self.mapped_agreement


@dataclass(frozen=True, slots=True)
class DepthMetrics:
    """Statistics of the depth at which tokens exit, if each exits at the first exit layer whose gate opens. The depth
    is the number of layers run. It is n_layers for a token that never exits."""

    histogram: tuple[int, ...]  # tokens by depth 1..n_layers
    mean_depth: float
    oracle_mean_depth: float  # with gates that open where, and only where, the draft is right
    locality: float  # share of tokens whose depth is near one of the last ones in the sequence (see recent_exits.py)
    near_share: float  # mean share of depths that are near those: the locality that chance would give

    def __post_init__(self) -> None:
        n_layers = len(self.histogram)
        if min(self.histogram, default=0) < 0 or not sum(self.histogram):
            raise ValueError("the histogram has to hold counts, some above 0")
        if not all(1 <= depth <= n_layers for depth in (self.mean_depth, self.oracle_mean_depth)):
            raise ValueError(f"mean depths must be between 1 and {n_layers}")
        _check_shares(self.locality, self.near_share)


@dataclass(frozen=True, slots=True, eq=False)
class FittedExitLayer:
    """A fitted exit after `exit_layer` layers. A token may exit if a predictor's probability reaches its threshold.

    The partial predictor judges tokens whose candidates were chosen at an earlier exit layer. Only the logits of those
    candidates are computed, and the features include the change since the last exit layer that judged the token.
    """

    exit_layer: int
    exit_map: ExitMap | None  # None if no map agrees with the full model more often than without one
    predictor: ExitPredictor
    threshold: float
    partial_predictor: ExitPredictor | None = None  # None if there are too few tokens
    partial_threshold: float = NO_EXIT

    def opens(self, features: NDArray[np.float32], *, is_partial: bool) -> NDArray[np.bool_]:
        """Return a mask (m,) of the tokens that may exit, from features (m, 12). If is_partial, the partial predictor
        judges."""
        if not is_partial:
            return np.asarray(self.predictor.probability(features) >= self.threshold)
        if self.partial_predictor is None:
            return np.zeros(len(features), np.bool_)
        return np.asarray(self.partial_predictor.probability(features) >= self.partial_threshold)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExitLayerCalibration(FittedExitLayer):
    metrics: ExitLayerMetrics


@dataclass(frozen=True, slots=True)
class DraftedMetrics:
    """Metrics of one exit layer for candidates of a draft, measured on held-out tokens as if each was judged there."""

    oracle: float  # share of tokens that could exit rightly: the likeliest token is a candidate and the full model's
    exit_rate: float
    precision: float  # share of the exits that are right
    recall: float  # share of the tokens that could exit rightly that do

    def __post_init__(self) -> None:
        _check_shares(self.oracle, self.exit_rate, self.precision, self.recall)


@dataclass(frozen=True, slots=True, eq=False)
class DraftedExitLayer:
    predictor: ExitPredictor
    threshold: float
    metrics: DraftedMetrics


@dataclass(frozen=True, slots=True, eq=False)
class DraftedExits:
    """Exits whose candidates come from a draft head or draft model, see calibration/drafted_fitting.py."""

    draft: str  # its name, for people
    coverage: float  # share of held-out tokens that are among the draft's candidates
    exit_layers: tuple[DraftedExitLayer, ...]  # 1, 2, ... n_layers - 1
    schedule: tuple[int, ...]
    depths: tuple[int, ...] = ()  # tokens by depth 1..n_layers in mode specee; (): not measured


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Size and origin of the calibration text. Token counts exclude position 0 of each chunk."""

    description: str  # for people
    n_train_tokens: int
    n_threshold_tokens: int
    n_held_out_tokens: int
    n_activation_tokens: int = 0  # above 0 only in files of earlier versions

    @property
    def n_tokens(self) -> int:
        return self.n_train_tokens + self.n_threshold_tokens + self.n_held_out_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Calibration of a model. All metrics are measured on held-out tokens."""

    n_layers: int
    hidden_size: int
    text: CalibrationText
    exit_layers: tuple[ExitLayerCalibration, ...]
    schedule: tuple[int, ...]  # exit layers that judge every token, ascending; empty in files of earlier versions
    depths: DepthMetrics
    specee_depths: tuple[int, ...] = ()  # tokens by depth 1..n_layers in mode specee; (): not measured
    drafted: DraftedExits | None = None  # None without a draft
    routes: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # see calibration/routes.py

    def at(self, exit_layer: int) -> ExitLayerCalibration:
        """Return the calibration of one exit layer, 1 to n_layers - 1."""
        return self.exit_layers[exit_layer - 1]

    @property
    def exits_digest(self) -> str:
        """Return a digest of the exit maps and predictors. Calibrations with equal digests choose and judge alike."""
        found = hashlib.sha256()
        for each in self.exit_layers:
            maps = {} if each.exit_map is None else each.exit_map.parts
            for array in (*(part.numpy() for part in maps.values()), *each.predictor.parts.values()):
                found.update(f"{each.exit_layer} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def statistics(self) -> ExitStatistics:
        """Return the planner's exit statistics for exact mode, where every token finally passes every layer."""
        rates = {}
        for each in self.exit_layers:
            known, rank = each.metrics, 0 if each.exit_map is None else each.exit_map.rank
            rates[each.exit_layer] = ExitRates(known.exit_rate, known.precision, known.refused_precision, rank)
        return ExitStatistics(self._source, self.n_layers, rates)

    def suits(self, draft: str) -> bool:
        """Return whether there are exits for the candidates of the draft with this name."""
        return self.drafted is not None and self.drafted.draft == draft

    def schedule_of(self, *, is_drafted: bool) -> tuple[int, ...]:
        """Return the schedule, for candidates of a draft if is_drafted and the calibration has exits for them."""
        return self.drafted.schedule if is_drafted and self.drafted is not None else self.schedule

    def depth_statistics(self, *, is_drafted: bool, scheduling: str = BOTH) -> tuple[DepthStatistics, ...]:
        """Return the exit depths that the planner needs for mode specee, or () if they were not measured.

        They were measured with scheduling BOTH. Other schedulings are taken to exit alike and to judge at other layers.

        Args:
            is_drafted: Whether a draft provides candidates, so that any exit layer may judge. If the calibration has no
                exits for them, tokens are taken to exit as without it.
        """
        has_own = is_drafted and self.drafted is not None and bool(self.drafted.depths)
        depths = self.drafted.depths if has_own and self.drafted is not None else self.specee_depths
        schedule = self.schedule_of(is_drafted=has_own)
        if not depths:
            return ()
        layers, n_tokens = range(1 if is_drafted else schedule[0], self.n_layers), sum(depths)
        shares = tuple(depths[layer - 1] / n_tokens for layer in layers)
        judged = tuple(_chance_judged(layer, schedule, depths, scheduling) for layer in layers)
        made = DepthStatistics("specee", self._source, tuple(layers), shares, True, is_drafted, judged)
        return (replace(made, schedule=schedule),)

    def depths_at_schedule(self, mode: str) -> DepthStatistics | None:
        """Return an estimate for a mode that judges only at the schedule's exit layers, by the whole lm_head.

        Tokens are taken to exit as in mode specee, those between two such layers at the earlier one. None if mode
        specee was not measured.
        """
        if not self.specee_depths:
            return None
        n_tokens = sum(self.specee_depths)
        ends = (*(layer - 1 for layer in self.schedule[1:]), self.n_layers - 1)
        exits = (sum(self.specee_depths[layer - 1 : end]) for layer, end in zip(self.schedule, ends, strict=True))
        return DepthStatistics(mode, self._source, self.schedule, tuple(count / n_tokens for count in exits))

    @property
    def _source(self) -> str:
        return f"calibration on {self.text.description}"


def _chance_judged(exit_layer: int, schedule: Sequence[int], depths: Sequence[int], scheduling: str) -> float:
    """Return the chance that a token that reaches this exit layer is judged there."""
    if scheduling == NO_SCHEDULE or (scheduling != ONLINE and exit_layer in schedule):
        return 1.0
    near = 0 if scheduling == OFFLINE else sum(depths[max(0, exit_layer - RADIUS - 1) : exit_layer + RADIUS])
    return float(1 - (1 - near / sum(depths)) ** N_LAST)  # that one of the last exits was near


def _check_shares(*shares: float) -> None:
    for share in shares:
        if not 0 <= share <= 1:
            raise ValueError(f"a share is {share}, expected 0 to 1")
