"""Times real passes of the CPU executor, split into products, attention and the rest.

Every part is timed within a pass, so that the CPU's caches hold what they hold in real use. A part's sample is its mean
over one pass. So a disturbance affects only the pass that it hits, and delays of single layers are included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.layers.ops import Activation, LookUp, Neurons, Norm
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.blocks import Block
from hetero_ee.ops.cpu import CpuHeads, CpuMatrix, CpuOps
from hetero_ee.ops.cpu_rows import CpuRows
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.profiling.preset import PassSampling
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.weights.weight import TileWeight, Weight
from hetero_ee_cpu_ops.attention.kv_write import KvWrite
from hetero_ee_profiles.probe_samples import Clock

N_LONG_HEADS = 2  # products of the lm_head with a chunk: as slow as several layers, and rarely needed
LONG_PASS_S = 0.05  # longer passes need no timing without stopwatches, whose cost is negligible there
FILL_TOKENS = 256  # keys and values written at a time, before the passes
CLOCK_READS = 50  # consecutive, of which the quickest is the cost of reading the clock
N_OTHERS = 5  # stopwatches in a layer in addition to those of products
MAX_WATCH_S = 1e-6  # highest cost of a stopwatch: more is noise
SMALLEST_S = 1e-8  # lower bound, against noise
TOKEN_ID = 1
Shape = tuple[str, int, int]  # layout, n_rows, n_columns


@dataclass(frozen=True, slots=True)
class PassSamples:
    """Seconds of passes of m tokens that end at position context_tokens, through n_layers layers and the lm_head.

    Short passes are also timed as a whole, without stopwatches. Passes of more than MAX_DECODE_TOKENS tokens compute
    only the last token's logits.
    """

    m: int
    context_tokens: int
    n_layers: int
    pass_s: tuple[float, ...]  # whole passes
    products: dict[Shape, tuple[float, ...]]  # of one product in the layers
    per_layer: dict[Shape, int]  # how often a layer has that product
    attention_s: tuple[float, ...]  # of one layer
    layer_s: tuple[float, ...]  # of everything else in a layer
    executor_s: tuple[float, ...]  # of that outside kernels: norms, rotation, cache writes and activation are inside
    head: Shape
    head_s: tuple[float, ...]  # of the lm_head's product of m tokens
    outside_s: tuple[float, ...]  # of everything else in a pass

    @property
    def besides_attention_s(self) -> float:
        """Median seconds of one layer without attention."""
        products_s = sum(count * median(self.products[shape]) for shape, count in self.per_layer.items())
        return products_s + median(self.layer_s)

    @property
    def besides_layers_s(self) -> float:
        """Median seconds outside of layers. Prompt chunks have no head, whose noise would exceed the rest."""
        head_s = median(self.head_s) if self.m <= MAX_DECODE_TOKENS else 0.0
        return head_s + median(self.outside_s)


def probe_pass(
    executor: CpuExecutor,
    m: int,
    context_tokens: int,
    sampling: PassSampling,
    clock: Clock,
    n_layers: int | None = None,
) -> PassSamples:
    """Time passes through the first n_layers (None: all), and leave the cache as it was.

    Short passes of few tokens alternate with and without stopwatches.

    Raises:
        ValueError: if the cache can't hold context_tokens.
    """
    watched, cache = _WatchedExecutor(executor, clock, n_layers), executor.cache
    sequence = cache.open_new()
    turn = _Turn(sequence, context_tokens - m, m, watched.n_layers, clock)
    begun_s = clock()
    try:
        watched.fill_context(sequence, context_tokens - m)
        first_s = turn.run(watched)  # the first passes compile and warm
        runners = [executor, watched] if m <= MAX_DECODE_TOKENS and first_s < LONG_PASS_S else [watched]
        for runner in runners[:-1]:
            turn.run(runner)
        watched.forget()
        heads_s = watched.head_seconds(m) if m > MAX_DECODE_TOKENS else None
        passes: list[list[float]] = [[] for _ in runners]
        ready_s = clock()
        while sampling.goes_on(len(passes[-1]), clock() - ready_s, ready_s - begun_s):
            for runner, seconds in zip(runners, passes, strict=True):
                seconds.append(turn.run(runner))
            watched.end_pass(passes[-1][-1])
    finally:
        cache.close(sequence)
    return watched.samples(m, context_tokens, passes[-1], passes[0], heads_s)


def time_pass(executor: CpuExecutor, m: int, context_tokens: int, clock: Clock, n_layers: int | None = None) -> float:
    """Return the seconds of one pass with every token's logits. There is no warm-up, so it may be slow."""
    watched, cache = _WatchedExecutor(executor, clock, n_layers), executor.cache
    sequence = cache.open_new()
    try:
        watched.fill_context(sequence, context_tokens - m)
        return _Turn(sequence, context_tokens - m, m, watched.n_layers, clock, all_heads=True).run(executor)
    finally:
        cache.close(sequence)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A pass of m tokens after `before` tokens of context, through the first n_layers layers and the lm_head."""

    sequence: int
    before: int
    m: int
    n_layers: int
    clock: Clock
    all_heads: bool = False  # compute every token's logits, for a chunk too

    @torch.inference_mode()
    def run(self, runner: CpuExecutor) -> float:
        """Run the pass, roll the cache back and return the seconds."""
        start_s = self.clock()
        batch = Batch.of_sequence(self.sequence, self.before, [TOKEN_ID] * self.m)
        hidden = runner.run(batch, None, range(self.n_layers))
        runner.to_logits(hidden if self.all_heads or self.m <= MAX_DECODE_TOKENS else hidden[-1:]).argmax(-1).tolist()
        seconds = self.clock() - start_s
        runner.cache.truncate(self.sequence, self.before)
        return seconds


class _StopWatch:
    """Measures intervals in seconds, less the time of reading the clock."""

    def __init__(self, clock: Clock) -> None:
        self.now_s = clock
        self._start_s = 0.0
        self._cost_s = min(late - early for early, late in pairwise([clock() for _ in range(CLOCK_READS)]))
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self._start_s = self.now_s()

    def __exit__(self, *error: object) -> None:
        self.seconds.append(self.now_s() - self._start_s - self._cost_s)

    def taken(self) -> list[float]:
        """Return the intervals measured since the last call."""
        found, self.seconds = self.seconds, []
        return found


class _WatchedOps(CpuOps):
    """The CPU's operations, timed by stopwatches.

    Attributes:
        products: the matrices of the products so far, in order.
    """

    def __init__(self, ops: CpuOps, clock: Clock) -> None:
        vars(self).update(vars(ops))
        self.attending, self.multiplying, self.placing, self.others = (_StopWatch(clock) for _ in range(4))
        self.products: list[CpuMatrix] = []

    def rows(self, batch: Batch, counts: NeuronCounts, look_up: LookUp | None = None) -> CpuRows:
        with self.placing:
            return super().rows(batch, counts, look_up)

    def linear(self, x: Any, matrix: CpuMatrix, into: str) -> Any:
        with self.multiplying:
            product = super().linear(x, matrix, into)
        self.products.append(matrix)
        return product

    def attend(self, queries: Any, heads: CpuHeads, rows: CpuRows) -> Any:
        with self.attending:
            return super().attend(queries, heads, rows)

    def write_kv(self, qkv: Any, heads: CpuHeads, rows: CpuRows) -> Any:
        with self.placing:
            rows.places(heads.cache)  # found once per pass
        with self.others:
            return super().write_kv(qkv, heads, rows)

    def add_norm(self, x: Any, delta: Any, norm: Norm | None) -> Any:
        with self.others:
            return super().add_norm(x, delta, norm)

    def norm_in_place(self, x: Any, norm: Norm) -> Any:
        with self.others:
            return super().norm_in_place(x, norm)

    def activate(self, x: Any, activation: Activation) -> Any:
        with self.others:
            return super().activate(x, activation)

    def sparse_ffn(self, x: Any, active: Any, neurons: Neurons, scores: Any, rows: CpuRows) -> Any:
        with self.others:
            return super().sparse_ffn(x, active, neurons, scores, rows)


class _WatchedExecutor(CpuExecutor):
    """An executor whose parts are timed. It shares weights, cache and threads with another executor.

    The caller must call end_pass after each pass. Passes run through n_layers layers (None: all).
    """

    _ops: _WatchedOps

    def __init__(self, executor: CpuExecutor, clock: Clock, n_layers: int | None = None) -> None:
        vars(self).update(vars(executor))
        self.n_layers = n_layers or executor.spec.n_layers
        self._ops, self._walking = _WatchedOps(executor._ops, clock), _StopWatch(clock)
        self.forget()

    def forget(self) -> None:
        ops = self._ops
        for watch in (ops.attending, ops.multiplying, ops.placing, ops.others, self._walking):
            watch.seconds.clear()
        ops.products.clear()
        self._products: dict[Shape, list[float]] = {}
        self._per_layer: dict[Shape, int] = {}
        self._attention_s: list[float] = []
        self._layer_s: list[float] = []
        self._executor_s: list[float] = []
        self._head_s: list[float] = []
        self._outside_s: list[float] = []

    def fill_context(self, sequence: int, n_tokens: int) -> None:
        """Write random keys and values of n_tokens tokens, since memory that was never written is faster to read."""
        random, layers = np.random.default_rng(0), range(self.n_layers)
        parts = [part for part in self.cache.parts if isinstance(part, CpuKvCache) and part.head_dim]
        for first in range(0, n_tokens, FILL_TOKENS):
            batch = Batch.of_sequence(sequence, first, [TOKEN_ID] * min(FILL_TOKENS, n_tokens - first))
            self.cache.admit(batch, layers)
            for part in parts:
                places = CpuOps.rows(self._ops, batch, self._neurons).places(part)
                write, size = (
                    KvWrite(part.n_layers, part.n_kv_heads, part.head_dim, part.kind),
                    part.n_kv_heads * part.head_dim,
                )
                pairs = random.standard_normal((len(batch), 2 * size), np.float32)
                for layer in set(part.held_layers) & set(layers):
                    write.write(pairs, places, part.index(layer), 0, size)

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        with self._walking:
            return super().forward(hidden, batch, blocks)

    def end_pass(self, pass_s: float) -> None:
        """Store the samples of a pass that took pass_s with stopwatches. Its last product is the lm_head's."""
        ops, n_layers = self._ops, self.n_layers
        *products_s, head_s = ops.multiplying.taken()
        attention_s, others_s = ops.attending.taken(), sum(ops.others.taken())
        layers_s = sum(self._walking.taken()) - sum(ops.placing.taken())
        by_shape: dict[Shape, list[float]] = {}
        for matrix, seconds in zip(ops.products, products_s, strict=False):
            by_shape.setdefault(_shape(matrix.weight), []).append(seconds)
        ops.products.clear()
        for shape, found in by_shape.items():
            self._products.setdefault(shape, []).append(fmean(found))
            self._per_layer[shape] = len(found) // n_layers
        rest_s = layers_s - sum(products_s) - sum(attention_s)
        self._attention_s.append(fmean(attention_s))
        self._layer_s.append(rest_s / n_layers)
        self._executor_s.append((rest_s - others_s) / n_layers)
        self._head_s.append(head_s)
        self._outside_s.append(pass_s - layers_s - head_s)

    def head_seconds(self, m: int) -> list[float]:
        """Return the seconds of the lm_head's product of m tokens, measured N_LONG_HEADS times."""
        for _ in range(N_LONG_HEADS):
            self.lm_head(torch.ones(m, self.spec.hidden_size))
        self._ops.products.clear()
        return self._ops.multiplying.taken()

    def samples(
        self,
        m: int,
        context_tokens: int,
        watched_s: Sequence[float],
        plain_s: Sequence[float],
        heads_s: Sequence[float] | None,
    ) -> PassSamples:
        """Return all samples, less the time that stopwatches cost.

        Args:
            watched_s: seconds of passes with stopwatches.
            plain_s: seconds of passes without stopwatches; watched_s if there are none.
            heads_s: seconds of the lm_head; None to use those measured in the passes.
        """
        n_watches = N_OTHERS + sum(self._per_layer.values())
        watches_s = (median(watched_s) - median(plain_s)) / self.n_layers
        watches_s = min(max(watches_s, 0.0), n_watches * MAX_WATCH_S)
        return PassSamples(
            m=m,
            context_tokens=context_tokens,
            n_layers=self.n_layers,
            pass_s=tuple(plain_s),
            products={shape: _above_0(found) for shape, found in self._products.items()},
            per_layer=dict(self._per_layer),
            attention_s=_above_0(self._attention_s),
            layer_s=_above_0([seconds - watches_s for seconds in self._layer_s]),
            executor_s=_above_0([seconds - watches_s for seconds in self._executor_s]),
            head=_shape(self.weights.matrices[self.blocks[-1].tensors["tokens"].name]),
            head_s=_above_0(self._head_s if heads_s is None else heads_s),
            outside_s=_above_0(self._outside_s),
        )


def _shape(weight: Weight) -> Shape:
    assert isinstance(weight, TileWeight)
    return weight.layout, *weight.shape


def _above_0(samples: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(seconds, SMALLEST_S) for seconds in samples)
