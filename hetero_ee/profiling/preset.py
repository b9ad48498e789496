"""Presets: what is measured, how often, and what is dropped if time is short.

Chunks of a prompt (more than MAX_DECODE_TOKENS tokens) get at most CHUNKS_SHARE of the time. If LEAST_PASSES of each do
not fit, the chunks become shorter, down to LEAST_TOKENS; then chunks after a context are dropped. The remaining time is
divided equally among the points, decode batches first. A point drops passes beyond USUAL_PASSES, then those beyond
LEAST_PASSES. The rest is always measured, however long it takes.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee_profiles.gpu.probe import Sampling
from hetero_ee_profiles.probe_samples import ProductShape

BASE_TOKENS = 16  # the shortest context that attention is timed at
LEAST_PASSES, USUAL_PASSES, MOST_PASSES = 2, 5, 200  # timed per point, after one warm-up
LEAST_TOKENS = 32  # shortest chunk whose tokens cost as much as those of long ones: weights are unpacked for eight
CHUNKS_SHARE = 0.6  # of the seconds, for the fewest passes of chunks
Point = tuple[int, int]  # tokens of a pass, and context including them


@dataclass(frozen=True, slots=True)
class Preset:
    """Amount of measuring: sizes, repetitions and time limits."""

    tokens: tuple[int, ...]  # m of products
    attention: tuple[Point, ...]
    repeats: int
    cycle_bytes: int  # of weights used alternately, so that no cache holds them
    link_bytes: int  # of one large copy between CPU and GPU
    warm_up_s: float  # for an idle GPU, before samples begin
    gpu_sample_s: float  # maximum for all samples of one quantity on the GPU
    pass_sample_s: float  # of passes on the CPU at one point
    cpu_budget_s: float  # for everything on the CPU, including making weights
    duration: str = "a few seconds"  # of everything, for people
    attempts: int = 1  # if something else is running

    @property
    def gpu_sampling(self) -> Sampling:
        return Sampling(self.repeats, self.gpu_sample_s)


QUICK = Preset(
    tokens=(1, 4, 128),
    attention=((1, 16), (1, 1024), (128, 128), (128, 1024)),
    repeats=3,
    cycle_bytes=2**28,
    link_bytes=2**25,
    warm_up_s=0.1,
    gpu_sample_s=0.02,
    pass_sample_s=0.2,
    cpu_budget_s=2.0,
    duration="about 5 seconds",
    attempts=2,
)
FULL = Preset(
    tokens=(1, 2, 4, 8, 16, 128, 512),
    attention=((1, 16), (1, 256), (1, 1024), (1, 4096), (16, 1024), (128, 128), (128, 1024), (512, 512), (512, 2048)),
    repeats=7,
    cycle_bytes=2**30,
    link_bytes=2**28,
    warm_up_s=0.5,
    gpu_sample_s=1.0,
    pass_sample_s=0.5,
    cpu_budget_s=150.0,
    duration="up to 3 minutes",
)


@dataclass(frozen=True, slots=True)
class PassSampling:
    """Limits for repeating the passes of one point."""

    sample_s: float  # in total, for at least USUAL_PASSES
    limit_s: float = math.inf  # for everything at the point; beyond that, only LEAST_PASSES

    def goes_on(self, n_passes: int, spent_s: float, before_s: float = 0.0) -> bool:
        """Return whether another pass should be timed after n_passes that took spent_s seconds in total.

        Args:
            before_s: seconds spent at this point before the first timed pass.
        """
        if n_passes < LEAST_PASSES:
            return True
        if before_s + spent_s + spent_s / n_passes > self.limit_s:
            return False
        return n_passes < USUAL_PASSES or (spent_s < self.sample_s and n_passes < MOST_PASSES)


def product_shapes(spec: ModelSpec) -> list[ProductShape]:
    """Return the shapes of a pass's products, without duplicates, in order.

    Layers are timed with 4 bits and the head with 8 bits, from which other widths are derived. So one profile serves a
    model however it is quantized.
    """
    parts = model_parts(spec.in_plain_int4, KV_TYPE)
    counts = Counter(product for part in parts for product in part.cost.products)
    return [ProductShape(*product, count) for product, count in counts.items()]


def attention_points(preset: Preset) -> list[Point]:
    """Return the points at which attention is timed: the preset's, and all `tokens` at their shortest context."""
    return sorted({*preset.attention, *((m, max(m, BASE_TOKENS)) for m in preset.tokens)})


def affordable_points(
    points: Sequence[Point], pass_s: Callable[[int, int], float], left_s: float
) -> tuple[list[Point], float]:
    """Shorten or drop chunks until the least number of passes of each fits the time that is left.

    Args:
        pass_s: predicts the seconds of a chunk's pass at a point.

    Returns:
        The points, and the seconds that the least passes of chunks need.
    """
    n_tokens = max((m for m, _ in points), default=0)

    def least_s(some: Sequence[Point]) -> float:
        return sum((1 + LEAST_PASSES) * pass_s(*point) for point in some if point[0] > MAX_DECODE_TOKENS)

    found = list(points)
    while least_s(found) > CHUNKS_SHARE * left_s and n_tokens > LEAST_TOKENS:
        n_tokens = max(LEAST_TOKENS, n_tokens // 2)
        found = list(dict.fromkeys(_cut(point, n_tokens) for point in points))
    if least_s(found) > CHUNKS_SHARE * left_s:
        found = [(m, context_tokens) for m, context_tokens in found if m <= MAX_DECODE_TOKENS or context_tokens == m]
    return found, least_s(found)


def _cut(point: Point, n_tokens: int) -> Point:
    """Shorten a chunk to at most n_tokens. One without earlier context (m == context_tokens) stays so."""
    m, context_tokens = point
    return (n_tokens, n_tokens if context_tokens == m else context_tokens) if m > n_tokens else point
