"""Expected time of an early-exit mode: how often a token passes each layer, and how many wait and pass with it.

Tokens exit independently of each other, at the shares that were measured. A token that exits waits for the next one
that goes deeper, and of a number that wait the next one passes all layers. So texts are rounds, which end with a token
that passes all layers; of one exit layer a round is a draft-verify step whose drafts are always right (steps.py).
Source: derived (docs/planning.md).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetero_ee.planning.statistics import DepthStatistics
from hetero_ee.planning.times.steps import Step, StepTimes


@dataclass(frozen=True, slots=True)
class Passes:
    """A text token's passes through the layers between exit layers: before the first one, ..., after the last one."""

    exit_layers: tuple[int, ...]
    batches: tuple[tuple[float, ...], ...]  # [i][m - 1]: passes of m tokens behind i exit layers, on average

    @classmethod
    def of(cls, known: DepthStatistics, most: int) -> "Passes":
        """most: tokens of a catch-up."""
        deeper = known.deeper
        rounds = _round_lengths(deeper[-1], most)
        n_tokens = sum(m * chance for m, chance in enumerate(rounds, 1))
        others = [(share - deeper[-1]) / (1 - deeper[-1]) if deeper[-1] < 1 else 0.0 for share in deeper]
        return cls(known.exit_layers, tuple(tuple(n / n_tokens for n in _in_a_round(rounds, a)) for a in others))

    def behind(self, layer: int) -> tuple[float, ...]:
        """Passes of this layer, counted from 0, with 1, 2, ... tokens."""
        return self.batches[bisect_right(self.exit_layers, layer)]

    @property
    def chances(self) -> list[float]:
        """That a token goes on so far itself: it is judged at each exit layer that it reaches."""
        return [sum(batch) for batch in self.batches]

    def mean_depth(self, n_layers: int) -> float:
        """Layers that are run for a token, those it catches up with later not counted."""
        ends = (0, *self.exit_layers, n_layers)
        return sum(chance * (end - start) for chance, (start, end) in zip(self.chances, pairwise(ends), strict=True))


def early_step(times: StepTimes, known: DepthStatistics, most: int, draft_s: float = 0.0) -> Step:
    """The average round of an early-exit mode: tokens until one passes all layers.

    times: of `most` tokens at least. draft_s: of a draft head, where candidates come from one.
    """
    passes = Passes.of(known, most)
    chances, exit_layers = passes.chances, known.exit_layers
    seconds = chances[0] * times.before_s(exit_layers[0]) + (draft_s if known.is_drafted else 0.0)
    for number, (exit_layer, end) in enumerate(zip(exit_layers, (*exit_layers[1:], None), strict=True)):
        seconds += chances[number] * _judging_s(times, known, number)
        exited = chances[number] - chances[number + 1]
        if known.looks(number):
            seconds += exited * times.exit_head_s(exit_layer)
        for m, n_passes in enumerate(passes.batches[number + 1], 1):
            later_s = 0.0 if end is None else times.verify_s(end, m)
            seconds += n_passes * (times.verify_s(exit_layer, m) - later_s)
    last = passes.batches[-1]
    n_tokens = 1 / chances[-1]
    batch = sum(m * n_passes for m, n_passes in enumerate(last, 1)) / (chances[-1] or 1.0)
    return Step(seconds * n_tokens, n_tokens, batch)


def _judging_s(times: StepTimes, known: DepthStatistics, number: int) -> float:
    """A token that gets to an exit layer; by the candidates alone where they are known."""
    return known.judging(number) * times.exit_head_s(known.exit_layers[number], is_partial=known.looks(number))


def _round_lengths(all_layers: float, most: int) -> list[float]:
    """The chance of 1, 2, ... tokens until one passes all layers, by itself or since no more may wait."""
    lengths = [(1 - all_layers) ** (m - 1) * all_layers for m in range(1, most)]
    return [*lengths, (1 - all_layers) ** (most - 1)]


def _in_a_round(rounds: Sequence[float], goes: float) -> list[float]:
    """Passes of 1, 2, ... tokens in a round, through layers that its last token passes and each other with the chance
    `goes`: a token takes along those before it that did not."""
    found = [0.0] * len(rounds)
    still = [*rounds]  # the chance that a round has more than so many tokens
    for m in range(len(rounds) - 1, 0, -1):
        still[m - 1] += still[m]
    for place, reached in enumerate(still, 1):  # a token is in its place with the chance that the round is so long
        ends = rounds[place - 1]
        passes = ends + (reached - ends) * goes
        for m in range(1, place + 1):
            began = goes if m < place else 1.0  # the one before those passed too, or there is none
            found[m - 1] += passes * (1 - goes) ** (m - 1) * began
    return found
