"""Exit predictors side by side: fitted to the same rows, judged on the same other ones, timed alternately."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.mlp_training import MlpTraining
from hetero_ee.calibration.predictor_fitting import fit_logistic, fit_mlp, fit_threshold
from hetero_ee.calibration.predictor_quality import PredictorQuality, calibrate_threshold, quality
from hetero_ee.calibration.stages import CHOOSE, TRAIN, is_in
from hetero_ee.calibration.traces import traces
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.features import candidate_mass, exit_features, rich_features
from hetero_ee.speculation.exits.predictors import Predictor
from hetero_ee.speculation.sources.candidates import HeadCandidates

Floats = NDArray[np.float32]
Chunks = Sequence[Sequence[int]]
N_ROUNDS, N_CALLS = 30, 300  # timed


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One exit layer's, being a row's first. logits (m, 4) of the candidates; mass (m,): see candidate_mass; is_right
    (m,); part (m,): number of the chunk."""

    logits: Floats
    mass: Floats
    is_right: NDArray[np.bool_]
    part: NDArray[np.int64]

    def features(self, is_rich: bool) -> Floats:
        plain = exit_features(self.logits, np.zeros_like(self.logits))
        return rich_features(plain, mass=self.mass) if is_rich else plain

    def of_part(self, part: tuple[int, ...]) -> "Batch":
        """The rows of TRAIN or CHOOSE."""
        kept = np.array([is_in(int(number), part) for number in self.part])
        return Batch(self.logits[kept], self.mass[kept], self.is_right[kept], self.part[kept])


@dataclass(frozen=True, slots=True)
class Kind:
    """fit: features, labels -> a predictor. is_rich: whether it takes rich_features, for which the mass of the whole
    vocabulary is summed up."""

    name: str
    fit: Callable[[Floats, NDArray[np.bool_]], Predictor]
    is_rich: bool = False


def kinds(precision: float) -> tuple[Kind, ...]:
    wide = replace(MlpTraining(), n_hidden=512)
    return (
        Kind("MLP 12-64-1", fit_mlp),
        Kind("MLP 12-512-1", lambda features, labels: fit_mlp(features, labels, training=wide)),
        Kind("logistic, 12 features", fit_logistic),
        Kind("logistic, 20 features", fit_logistic, is_rich=True),
        Kind("two thresholds", lambda features, labels: fit_threshold(features, labels, precision=precision)),
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """qualities: of exit layer 1, 2, ... on the other text. fit_s: seconds an exit layer; microseconds: of judging
    one row, from its logits."""

    kind: str
    qualities: tuple[PredictorQuality, ...]
    fit_s: float
    microseconds: float

    @property
    def mean(self) -> PredictorQuality:
        """Of each figure over the exit layers."""
        metrics = [(each.precision, each.recall, each.exit_rate) for each in self.qualities]
        return PredictorQuality(*(sum(column) / len(metrics) for column in zip(*metrics, strict=True)))


def compare_predictors(
    executor: Executor, maps: Mapping[int, ExitMap], chunks: Chunks, other: Chunks, precision: float
) -> list[Compared]:
    """Fitted to TRAIN of `chunks`, thresholds set on CHOOSE at `precision`, judged on `other`."""
    rows, other_rows = (list(boundary_rows(executor, maps, part)) for part in (chunks, other))
    found, judges = [], []
    for kind in kinds(precision):
        start_s = time.perf_counter()
        fits = [kind.fit(*labelled(each.of_part(TRAIN), kind)) for each in rows]
        fit_s = (time.perf_counter() - start_s) / len(fits)
        qualities = [judged(*each, kind, precision) for each in zip(fits, rows, other_rows, strict=True)]
        found.append((kind.name, tuple(qualities), fit_s))
        judges.append(judge(kind, fits[len(fits) // 2], executor.spec.vocab_size))
    return [Compared(*each, micros) for each, micros in zip(found, microseconds_in_turn(judges), strict=True)]


def boundary_rows(executor: Executor, maps: Mapping[int, ExitMap], chunks: Chunks) -> Iterator[Batch]:
    """Those of exit layer 1, 2, ..."""
    parts: list[list[Batch]] = [[] for _ in range(executor.spec.n_layers - 1)]
    for number, found in enumerate(traces(executor, chunks)):
        for exit_layer, normed in enumerate(found.normed, start=1):
            whole = executor.lm_head(maps[exit_layer].apply(normed) if exit_layer in maps else normed)
            candidates = HeadCandidates().of(whole)
            mass = candidate_mass(candidates.logits, whole.numpy())
            is_right = candidates.token_ids[:, 0] == found.tokens.numpy()
            parts[exit_layer - 1].append(Batch(candidates.logits, mass, is_right, np.full(len(is_right), number)))
    for own in parts:
        yield Batch(*(np.concatenate([getattr(p, n) for p in own]) for n in ("logits", "mass", "is_right", "part")))


def labelled(batch: Batch, kind: Kind) -> tuple[Floats, NDArray[np.bool_]]:
    return batch.features(kind.is_rich), batch.is_right


def judged(predictor: Predictor, batch: Batch, other: Batch, kind: Kind, precision: float) -> PredictorQuality:
    features, labels = labelled(batch.of_part(CHOOSE), kind)
    threshold = calibrate_threshold(predictor.probability(features), labels, precision)
    features, labels = labelled(other, kind)
    return quality(predictor.probability(features), labels, threshold)


def judge(kind: Kind, predictor: Predictor, vocab_size: int) -> Callable[[], object]:
    """Judges one row, from the logits of its candidates, and of the whole vocabulary where their mass is asked for."""
    whole = np.random.default_rng(0).normal(size=(1, vocab_size)).astype(np.float32)
    logits = -np.sort(-whole)[:, :4].copy()
    nothing = np.zeros_like(logits)

    def once() -> object:
        features = exit_features(logits, nothing.copy())
        if kind.is_rich:
            features = rich_features(features, mass=candidate_mass(logits, whole))
        return predictor.probability(features)

    return once


def microseconds_in_turn(judges: Sequence[Callable[[], object]]) -> list[float]:
    """The median of each one's rounds, a round of each after the other, so that a busy machine hits all alike."""
    rounds: list[list[float]] = [[] for _ in judges]
    for _ in range(N_ROUNDS):
        for times, once in zip(rounds, judges, strict=True):
            start_s = time.perf_counter()
            for _ in range(N_CALLS):
                once()
            times.append((time.perf_counter() - start_s) / N_CALLS * 1e6)
    return [median(times) for times in rounds]
