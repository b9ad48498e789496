"""What is measured of a machine, and how often: presets, points, and passes as the seconds allow.

Chunks of a prompt, of more than MAX_DECODE_TOKENS, get CHUNKS_SHARE of the seconds at most. Where that does not hold
LEAST_PASSES of each, they give up tokens, down to LEAST_TOKENS, and then the points after a context. Of what remains,
decode batches first, every point has an equal share, in which it gives up passes beyond USUAL_PASSES and then those
beyond LEAST_PASSES. What is left then takes as long as it takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.costs.work import MAX_DECODE_TOKENS
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee_profiles.gpu.probe import Sampling
from hetero_ee_profiles.probe_samples import ProductShape

BASE_TOKENS = 16  # the shortest context that attention is timed at
LEAST_PASSES, USUAL_PASSES, MOST_PASSES = 2, 5, 200  # timed at a point, after one that is not
LEAST_TOKENS = 32  # of a chunk whose tokens cost what those of long ones cost: weights are unpacked for eight at a time
CHUNKS_SHARE = 0.6  # of the seconds, at most, for the least passes of chunks
Point = tuple[int, int]  # tokens of a pass, and context with them


@dataclass(frozen=True, slots=True)
class Preset:
    """How much is measured."""

    tokens: tuple[int, ...]  # m of products
    attention: tuple[Point, ...]
    repeats: int
    cycle_bytes: int  # of weights that take turns, so that no cache holds them
    link_bytes: int  # of one large copy between CPU and GPU
    warm_up_s: float  # for a GPU, at rest until then, before samples begin
    gpu_sample_s: float  # of all samples of one quantity on the GPU, at most
    pass_sample_s: float  # of passes on the CPU at one point
    cpu_budget_s: float  # of everything on the CPU, making weights included
    duration: str = "a few seconds"  # of the whole, for people
    attempts: int = 1  # at once, where something else is running

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
    """How often the passes of one point are repeated."""

    sample_s: float  # together, USUAL_PASSES at least
    limit_s: float = math.inf  # of the point with all that it takes; beyond that, only LEAST_PASSES

    def goes_on(self, n_passes: int, spent_s: float, before_s: float = 0.0) -> bool:
        """Whether another pass is timed after n_passes, which took spent_s together.

        before_s: taken by what preceded the first.
        """
        if n_passes < LEAST_PASSES:
            return True
        if before_s + spent_s + spent_s / n_passes > self.limit_s:
            return False
        return n_passes < USUAL_PASSES or (spent_s < self.sample_s and n_passes < MOST_PASSES)


def product_shapes(spec: ModelSpec) -> list[ProductShape]:
    """The products of a pass, each once, in its order.

    A profile holds times of 4 bits for the layers and of 8 for the head, by which all others are told: one profile
    serves a model whatever bits its matrices have.
    """
    counts: dict[tuple[str, int, int], int] = {}
    for part in model_parts(spec.in_plain_int4, KV_TYPE):
        for product in part.cost.products:
            key = product.layout, product.n_rows, product.n_columns
            counts[key] = counts.get(key, 0) + 1
    return [ProductShape(*key, count) for key, count in counts.items()]


def attention_points(preset: Preset) -> list[Point]:
    """Where attention is timed: the points asked for, and the shortest context of each m."""
    return sorted({*preset.attention, *((m, max(m, BASE_TOKENS)) for m in preset.tokens)})


def affordable_points(
    points: Sequence[Point], pass_s: Callable[[int, int], float], left_s: float
) -> tuple[list[Point], float]:
    """The points with chunks as long as the seconds allow, and what the least passes of the chunks take of them.

    pass_s: what a pass of a chunk at a point is expected to take.
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
    """At most so many; a chunk that begins a text still does."""
    m, context_tokens = point
    return (n_tokens, n_tokens if context_tokens == m else context_tokens) if m > n_tokens else point
