"""Estimates how long a calibration will take, before it starts, by timing a little of each of its parts."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from hetero_ee.calibration.predictor_fitting import PredictorTraining, fit_predictor
from hetero_ee.calibration.routes import route_shapes
from hetero_ee.calibration.run import CalibrationSettings
from hetero_ee.calibration.stages import SPLIT_CHUNKS, Chunk
from hetero_ee.calibration.traces import trace
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.features import N_FEATURES, likeliest

PROBE_TOKENS, PROBE_STEPS, PROBE_SIZE = 48, 50, 256
HEAD_PASSES = 4  # with the lm_head, to choose a map: without one, and for some of the ranks
FITS = 2  # predictors per exit layer
MAP_COST = 6.0  # of fitting an exit map, in eigendecompositions of its size: SmolLM2-135M on a Xeon, 2026-11-28


def estimated_s(
    executor: Executor,
    write: Callable[[int], list[Chunk]] | None,
    n_tokens: int,
    settings: CalibrationSettings,
    clock: Callable[[], float],
) -> float:
    """Return the expected seconds of calibrating on n_tokens.

    Args:
        write: makes the model write texts of PROBE_TOKENS tokens, see own_writer; None if the caller gave texts.
    """

    def timed(work: Callable[[], object]) -> float:
        work()  # the first call warms up
        start_s = clock()
        work()
        return clock() - start_s

    spec, quarter = executor.spec, n_tokens // SPLIT_CHUNKS
    n_probed = min(PROBE_TOKENS, executor.cache.max_tokens)
    n_selected = min(quarter, settings.n_selection_tokens)
    n_routed = min(2 * quarter, settings.n_route_tokens) if route_shapes(spec) else 0
    n_passes = n_tokens + 2 * quarter + n_selected + n_routed
    n_heads = (spec.n_layers - 1) * (n_tokens + quarter + HEAD_PASSES * n_selected)
    states = torch.ones(n_probed, spec.hidden_size)
    seconds = timed(lambda: trace(executor, [1] * n_probed)) * n_passes / n_probed
    seconds += timed(lambda: likeliest(executor.lm_head(states))) * n_heads / n_probed
    n_steps = settings.training.steps(2 * quarter)
    fit_s = FITS * n_steps * _step_s(settings.training, timed)
    seconds += (spec.n_layers - 1) * (fit_s + _map_s(spec.hidden_size, timed))
    if write is not None:
        start_s = clock()
        n_written = sum(map(len, write(0)))
        seconds += (clock() - start_s) * n_tokens / max(1, n_written)
    return seconds


def _step_s(training: PredictorTraining, timed: Callable[[Callable[[], object]], float]) -> float:
    features = np.random.default_rng(0).standard_normal((PROBE_SIZE, N_FEATURES), np.float32)
    few = replace(training, n_steps=PROBE_STEPS, n_epochs=PROBE_STEPS)
    return timed(lambda: fit_predictor(features, features[:, 0] > 0, few)) / PROBE_STEPS


def _map_s(hidden_size: int, timed: Callable[[Callable[[], object]], float]) -> float:
    matrix = torch.eye(PROBE_SIZE, dtype=torch.float64) + 0.1
    return MAP_COST * timed(lambda: torch.linalg.eigh(matrix)) * (hidden_size / PROBE_SIZE) ** 3
