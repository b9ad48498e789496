"""Expected time of an early-exit mode: how often a token passes each layer, and how many pending tokens join it.

Tokens are assumed to exit independently of each other, at the measured rates. A token that exits stays pending until a
later token goes deeper. When the most tokens allowed are pending, the next one passes all layers. A round is a series
of tokens that ends with one that passes all layers; with a single exit layer it equals a draft-verify step whose drafts
are always right (steps.py). Source: derived (docs/planning.md).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetero_ee.planning.statistics import DepthStatistics
from hetero_ee.planning.times.steps import Step, StepTimes


@dataclass(frozen=True, slots=True)
class Passes:
    """Average number of passes per token in each range of layers between exit layers."""

    exit_layers: tuple[int, ...]
    batches: tuple[tuple[float, ...], ...]  # [i][m - 1]: average number of passes of m tokens after i exit layers

    @classmethod
    def of(cls, known: DepthStatistics, most: int) -> "Passes":
        """Return the passes that these statistics imply, if at most `most` tokens catch up together."""
        deeper = known.deeper
        rounds = _round_lengths(deeper[-1], most)
        n_tokens = sum(m * chance for m, chance in enumerate(rounds, 1))
        others = [(share - deeper[-1]) / (1 - deeper[-1]) if deeper[-1] < 1 else 0.0 for share in deeper]
        return cls(known.exit_layers, tuple(tuple(n / n_tokens for n in _in_a_round(rounds, a)) for a in others))

    def behind(self, layer: int) -> tuple[float, ...]:
        """Return the average number of passes of 1, 2, ... tokens through this layer (counted from 0), per token."""
        return self.batches[bisect_right(self.exit_layers, layer)]

    @property
    def chances(self) -> list[float]:
        """For each range of layers, the chance that a token reaches it before it is emitted."""
        return [sum(batch) for batch in self.batches]

    def mean_depth(self, n_layers: int) -> float:
        """Return the average number of layers run before a token is emitted. Later catching up is not counted."""
        ends = (0, *self.exit_layers, n_layers)
        return sum(chance * (end - start) for chance, (start, end) in zip(self.chances, pairwise(ends), strict=True))


def early_step(times: StepTimes, known: DepthStatistics, most: int, draft_s: float = 0.0) -> Step:
    """Return the average round of an early-exit mode, which ends with a token that passes all layers.

    Args:
        times: times of passes of up to `most` tokens or more.
        most: maximum number of tokens that catch up together.
        draft_s: seconds of a draft head, if candidates come from one.
    """
    passes = Passes.of(known, most)
    chances, exit_layers = passes.chances, known.exit_layers
    seconds = chances[0] * times.before_s(exit_layers[0]) + (draft_s if known.is_drafted else 0.0)
    for number, (exit_layer, end) in enumerate(zip(exit_layers, (*exit_layers[1:], None), strict=True)):
        looks = known.looks(number)  # only candidates' logits judge, if the mode has candidates
        judge_s = times.exit_head_s(exit_layer, is_partial=looks) + (times.judgement_s if looks else 0.0)
        seconds += chances[number] * known.judging(number) * judge_s
        exited = chances[number] - chances[number + 1]
        if looks:
            seconds += exited * times.exit_head_s(exit_layer)
        for m, n_passes in enumerate(passes.batches[number + 1], 1):
            later_s = 0.0 if end is None else times.verify_s(end, m)
            seconds += n_passes * (times.verify_s(exit_layer, m) - later_s)
    last = passes.batches[-1]
    n_tokens = 1 / chances[-1]
    batch = sum(m * n_passes for m, n_passes in enumerate(last, 1)) / (chances[-1] or 1.0)
    return Step(seconds * n_tokens, n_tokens, batch)


def _round_lengths(all_layers: float, most: int) -> list[float]:
    """Return the chances of rounds of 1, 2, ... `most` tokens. A token passes all layers with chance `all_layers`."""
    lengths = [(1 - all_layers) ** (m - 1) * all_layers for m in range(1, most)]
    return [*lengths, (1 - all_layers) ** (most - 1)]


def _in_a_round(rounds: Sequence[float], goes: float) -> list[float]:
    """Return the average passes of 1, 2, ... tokens per round, in layers that all but its last token may skip.

    A token that passes them also processes the pending tokens directly before it.

    Args:
        rounds: chances of a round of 1, 2, ... tokens.
        goes: the chance that a token other than the last one passes these layers.
    """
    found = [0.0] * len(rounds)
    still = [*rounds]  # [n]: the chance that a round has more than n tokens
    for m in range(len(rounds) - 1, 0, -1):
        still[m - 1] += still[m]
    for place, reached in enumerate(still, 1):  # there is a token at this place if the round is long enough
        ends = rounds[place - 1]
        passes = ends + (reached - ends) * goes
        for m in range(1, place + 1):
            began = goes if m < place else 1.0  # the token before these passed too, or does not exist
            found[m - 1] += passes * (1 - goes) ** (m - 1) * began
    return found
