"""Times what the CPU executor does besides multiplying: norms, rotations, the cache, attention, every Python call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.cpu_executor import CpuExecutor
from hetero_ee.runtime.rows import Rows
from hetero_ee.weights.random_weights import random_weights

FEW_LAYERS, MANY_LAYERS = 1, 9
SMALL_VOCABULARY = 64  # the embedding's rows are as long as the model's, and few


@dataclass(frozen=True, slots=True)
class OverheadSamples:
    """Seconds of m rows at the end of a cache of context_tokens: of one layer, and of a pass without layers."""

    m: int
    context_tokens: int
    layer_s: tuple[float, ...]
    whole_pass_s: tuple[float, ...]


class _WithoutProducts(CpuExecutor):
    """Runs everything but the matmuls, whose results are always the same."""

    def _multiplied(self, x: Any, block: Block, short: str) -> Any:
        key = x.shape[0], self._linears[block.tensors[short].name].n_rows
        if key not in self._products:
            self._products[key] = np.full(key, 0.5, np.float32)
        return self._products[key]

    _products: dict[tuple[int, int], Any]

    def __init__(self, spec: ModelSpec, max_tokens: int, threads: int) -> None:
        super().__init__(spec, random_weights(spec), max_tokens, threads)
        self._products = {}


def probe_overheads(
    spec: ModelSpec,
    threads: int,
    points: Sequence[tuple[int, int]],
    repeats: int,
    clock: Callable[[], float],
) -> list[OverheadSamples]:
    """Samples for each (m, context_tokens). Layers are counted out by the difference of two depths."""
    depths = [shallow(spec, n_layers) for n_layers in (FEW_LAYERS, MANY_LAYERS)]
    max_tokens = max(context for _, context in points)
    few, many = (_WithoutProducts(depth, max_tokens, threads) for depth in depths)
    try:
        return [_samples(few, many, m, context, repeats, clock) for m, context in points]
    finally:
        few.close()
        many.close()


def _samples(
    few: CpuExecutor, many: CpuExecutor, m: int, context_tokens: int, repeats: int, clock: Callable[[], float]
) -> OverheadSamples:
    layers, passes = [], []
    runs = [_prepared(executor, m, context_tokens) for executor in (few, many)]
    for _ in range(repeats):
        few_s, many_s = (timed(run, clock) for run in runs)
        layer_s = max((many_s - few_s) / (MANY_LAYERS - FEW_LAYERS), 1e-9)
        layers.append(layer_s)
        passes.append(max(few_s - FEW_LAYERS * layer_s, 1e-9))
    return OverheadSamples(m, context_tokens, tuple(layers), tuple(passes))


def _prepared(executor: CpuExecutor, m: int, context_tokens: int) -> Callable[[], Any]:
    """One pass of m rows at the end of a cache of that length, to be called again and again, warm."""
    cache = executor.cache
    sequence = cache.open_new()
    before = context_tokens - m
    if before:
        cache.admit(Rows.of_sequence(sequence, 0, [0] * before))
    rows = Rows.of_sequence(sequence, before, [0] * m)

    def run() -> None:
        logits = executor.head(executor.hidden(rows)[-1:])
        int(torch.argmax(logits[0]))
        cache.truncate(sequence, before)

    run()
    return run


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Seconds of one run."""
    start_s = clock()
    run()
    return clock() - start_s


def shallow(spec: ModelSpec, n_layers: int) -> ModelSpec:
    """The model with so many layers and few tokens: without its products nothing else depends on them."""
    windows = tuple(None for _ in range(n_layers))
    return replace(
        spec, n_layers=n_layers, sliding_windows=windows, vocab_size=SMALL_VOCABULARY, learned_position_offset=None
    )
