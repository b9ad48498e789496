"""How many passes are timed, and of how many rows: what seconds allow, by priority.

Chunks of a prompt, of more than MAX_DECODE_TOKENS, get CHUNKS_SHARE of the seconds at most. Where that does not hold
LEAST_PASSES of each, they give up rows, down to LEAST_ROWS, and then those behind a context. Of what remains, passes of
few rows first, every point has an equal share, in which it gives up passes beyond USUAL_PASSES and then those beyond
LEAST_PASSES. What is left then takes as long as it takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_ee.planning.times.costs import MAX_DECODE_TOKENS

LEAST_PASSES, USUAL_PASSES, MOST_PASSES = 2, 5, 200  # timed at a point, behind one that is not
LEAST_ROWS = 32  # of a chunk whose rows cost what many rows cost: weights are unpacked for eight at a time
CHUNKS_SHARE = 0.6  # of the seconds, at most, for the least passes of chunks
Point = tuple[int, int]  # rows, context


@dataclass(frozen=True, slots=True)
class PassSampling:
    """sample_s: passes are repeated for so long, USUAL_PASSES at least. limit_s: of a point with all that it takes;
    beyond that, only LEAST_PASSES."""

    sample_s: float
    limit_s: float = math.inf

    def goes_on(self, n_passes: int, spent_s: float, before_s: float = 0.0) -> bool:
        """Whether another pass is timed after so many, which took spent_s together. before_s: taken by what came before
        the first."""
        if n_passes < LEAST_PASSES:
            return True
        if before_s + spent_s + spent_s / n_passes > self.limit_s:
            return False
        return n_passes < USUAL_PASSES or (spent_s < self.sample_s and n_passes < MOST_PASSES)


def affordable_points(
    points: Sequence[Point], pass_s: Callable[[int, int], float], left_s: float
) -> tuple[list[Point], float]:
    """The points with the rows of chunks that the seconds allow, and what the least passes of the chunks take of them.

    pass_s: what a pass of a chunk at (rows, context) is expected to take.
    """
    n_rows = max((m for m, _ in points), default=0)

    def least_s(some: Sequence[Point]) -> float:
        return sum((1 + LEAST_PASSES) * pass_s(*point) for point in some if point[0] > MAX_DECODE_TOKENS)

    found = list(points)
    while least_s(found) > CHUNKS_SHARE * left_s and n_rows > LEAST_ROWS:
        n_rows = max(LEAST_ROWS, n_rows // 2)
        found = list(dict.fromkeys(_with_rows(point, n_rows) for point in points))
    if least_s(found) > CHUNKS_SHARE * left_s:
        found = [(m, context_tokens) for m, context_tokens in found if m <= MAX_DECODE_TOKENS or context_tokens == m]
    return found, least_s(found)


def _with_rows(point: Point, n_rows: int) -> Point:
    """At most so many; a chunk that begins a text still does."""
    m, context_tokens = point
    return (n_rows, n_rows if context_tokens == m else context_tokens) if m > n_rows else point
