"""What the tests of calibrations share: one made of random numbers, and a disk that fails on demand."""

import errno
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.exits.calibration import (
    MAX_DRAFTS,
    NO_EXIT,
    Calibration,
    CalibrationText,
    DepthMetrics,
    DraftedExitLayer,
    DraftedExits,
    DraftedMetrics,
    ExitLayerCalibration,
    ExitLayerMetrics,
)
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.predictor import ExitPredictor
from hetero_ee.weights.store.filesystem import FileSystem
from tests.families import config_of

KEY = "ab" * 32


def small_spec() -> ModelSpec:
    """Five layers, so that every kind of map has an exit layer."""
    return read_spec(config_of("llama", num_hidden_layers=5))


def some_calibration(spec: ModelSpec, seed: int = 0) -> Calibration:
    """Every exit layer with another kind of map and size of predictor."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    size = spec.hidden_size
    maps = (None, ExitMap(torch.randn(3, size), torch.randn(size, 3), torch.randn(size)).rounded())
    full = ExitMap(None, torch.randn(size, size), torch.randn(size)).rounded()
    exit_layers = []
    for exit_layer in range(1, spec.n_layers):
        names = ("agreement", "exit_rate", "precision", "recall", "acceptance", "refused_precision")
        shares = dict(zip(names, random.random(6), strict=True))
        exit_map = (*maps, full)[exit_layer % 3]
        metrics = ExitLayerMetrics(
            mapped_agreement=0.5 if exit_map else None,
            kept_drafts=tuple(range(MAX_DRAFTS + 1)),
            **{name: float(share) for name, share in shares.items()},
        )
        partial = _predictor(exit_layer + 1, seed) if exit_layer > 1 else None
        fits = (exit_map, _predictor(exit_layer, seed), 0.6, partial, 0.7 if partial else NO_EXIT)
        exit_layers.append(ExitLayerCalibration(exit_layer, *fits, metrics=metrics))
    histogram = tuple(range(1, spec.n_layers + 1))
    depths = DepthMetrics(histogram, mean_depth=2.5, oracle_mean_depth=2.0, locality=0.9, near_share=0.4)
    text = CalibrationText("a text", 200, 100, 90)
    counts = (4, 0, 3, *[1] * (spec.n_layers - 3))
    drafted = tuple(
        DraftedExitLayer(_predictor(exit_layer + 3, seed), 0.4, DraftedMetrics(0.6, 0.5, 0.8, 0.7))
        for exit_layer in range(1, spec.n_layers)
    )
    of_draft = DraftedExits("a head", 0.9, drafted, (2, 4), counts)
    return Calibration(spec.n_layers, size, text, tuple(exit_layers), (1, 3), depths, counts, of_draft)


def same(one: Calibration, other: Calibration) -> bool:
    """Whether two calibrations are equal to the last bit."""
    return _plain(one) == _plain(other)


class FailingDisk(FileSystem):
    """A disk on which one call of one kind fails: the `at`-th write, rename and so on, counted from 0."""

    def __init__(self, operation: str, at: int = 0, number: int = errno.ENOSPC) -> None:
        self._operation, self._left, self._errno = operation, at, number

    def write(self, file, data) -> None:  # type: ignore[no-untyped-def]
        self._maybe_fail("write")
        super().write(file, data)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_fail("rename")
        super().rename(source, target)

    def close_durably(self, file) -> None:  # type: ignore[no-untyped-def]
        super().close_durably(file)
        self._maybe_fail("close_durably")

    def create_file(self, file: Path):  # type: ignore[no-untyped-def]
        self._maybe_fail("create_file")
        return super().create_file(file)

    def _maybe_fail(self, operation: str) -> None:
        if operation == self._operation:
            self._left -= 1
            if self._left == -1:
                raise OSError(self._errno, "injected")


def _predictor(exit_layer: int, seed: int) -> ExitPredictor:
    random, n_hidden = np.random.default_rng(seed + exit_layer), 3 + exit_layer
    shapes = (n_hidden, 12), n_hidden, n_hidden, 1
    return ExitPredictor(*(random.normal(size=shape).astype(np.float32) for shape in shapes))


def _plain(calibration: Calibration) -> object:
    def tensor(part: torch.Tensor | None) -> object:
        return None if part is None else part.tolist()

    def network(predictor: ExitPredictor | None) -> object:
        return predictor and [getattr(predictor, field.name).tolist() for field in fields(predictor)]

    exit_layers = [
        (
            each.exit_layer,
            each.exit_map and [tensor(part) for part in (each.exit_map.down, each.exit_map.up, each.exit_map.bias)],
            network(each.predictor),
            each.threshold,
            network(each.partial_predictor),
            each.partial_threshold,
            each.metrics,
        )
        for each in calibration.exit_layers
    ]
    known, drafted = calibration, calibration.drafted
    of_draft = None
    if drafted is not None:
        networks = [(network(each.predictor), each.threshold, each.metrics) for each in drafted.exit_layers]
        of_draft = drafted.draft, drafted.coverage, drafted.schedule, drafted.depths, networks
    counts = known.depths, known.specee_depths
    whole = known.n_layers, known.hidden_size, known.text, known.schedule, counts
    return whole, exit_layers, of_draft
