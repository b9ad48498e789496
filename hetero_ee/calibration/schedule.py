"""The schedule of a calibration: the exit layers worth judging tokens at, by how tokens exit and by bytes read.

SpecEE (arXiv 2504.08850, section 5.1): a few exit layers take most exits. A token that exits saves the layers after it.
What judging it costs: at its first exit layer the whole lm_head, at every one the map, the predictor and the
candidates' rows of the lm_head. Bytes stand for time, as one token's pass is bound by memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.traces import PartialLogits
from hetero_ee.models.blocks import Block
from hetero_ee.speculation.exits.calibration import FittedExitLayer
from hetero_ee.speculation.exits.candidates import N_CANDIDATES
from hetero_ee.weights.model_weights import ModelWeights

LAYERS_PER_EXIT_LAYER = 4  # at least, so that tokens are judged at 8 of 32: SpecEE's number


class Schedule(NamedTuple):
    """saved: what a token saves on average, in the unit of the costs, by being judged at these exit layers."""

    saved: float
    exit_layers: tuple[int, ...]  # ascending


NO_SCHEDULE = Schedule(0.0, ())


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """By exit layer from 0 on, in any one unit: all tuples have n_layers values."""

    histogram: tuple[float, ...]  # share of tokens that can exit there and later but not before; the rest never can
    layer: tuple[float, ...]  # cost of the layer after it, saved by every token that exits
    predictor: tuple[float, ...]  # cost of judging a token there
    first: float = 0.0  # what a token's first exit layer costs beside that: the whole lm_head

    def __post_init__(self) -> None:
        if not len(self.histogram) == len(self.layer) == len(self.predictor) > 0:
            raise ValueError("histogram, layer and predictor need one entry a layer each")
        if min(self.histogram) < 0 or sum(self.histogram) > 1 + 1e-6:
            raise ValueError("histogram holds shares of all tokens, at most 1 together")


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """Bytes read for one token."""

    layers: tuple[float, ...]  # of each layer
    head: float  # of the whole lm_head
    candidates: float  # of the candidates' rows of it

    @classmethod
    def of(cls, blocks: Sequence[Block], weights: ModelWeights) -> "ReadBytes":
        """blocks: the decoder's, the lm_head last."""
        layers: dict[int, float] = {}
        for block in blocks:
            if block.layer is not None:
                found = (weights.matrices.get(tensor.name) for tensor in block.tensors.values())
                n_bytes = sum(weight.n_bytes for weight in found if weight is not None)
                layers[block.layer] = layers.get(block.layer, 0.0) + n_bytes
        head = blocks[-1].tensors["tokens"]
        head_bytes = float(weights.matrices[head.name].n_bytes)
        return cls(tuple(layers.values()), head_bytes, N_CANDIDATES * head_bytes / head.shape[0])


def fit_schedule(fits: Sequence[FittedExitLayer], partial: PartialLogits, read: ReadBytes) -> Schedule:
    """The best of the schedules that begin with each exit layer, in bytes; none where none pays, or where there is no
    partial predictor at all, as too few tokens tell then.

    fits: of exit layer 1, 2, ... How many tokens an exit layer lets exit depends on which one took their candidates,
    hence a histogram for each first exit layer. An exit counts where it is right.
    """
    n_layers = len(fits) + 1
    if not any(each.partial_predictor for each in fits):
        return NO_SCHEDULE
    own = (0.0, *(_own_bytes(each, read) for each in fits))
    # An exit layer without a partial predictor can't follow another: more expensive than all that it could save.
    never = 2 * sum(read.layers)
    later = (never, *(own[each.exit_layer] if each.partial_predictor else never for each in fits))
    best = NO_SCHEDULE
    for first in range(1, n_layers):
        predictor = (*later[:first], own[first], *later[first + 1 :])
        costs = ExitCosts(_histogram(fits, first, partial), read.layers, predictor, read.head)
        found = choose_exit_layers(costs, max(1, n_layers // LAYERS_PER_EXIT_LAYER), first)
        best = max(best, found, key=lambda schedule: schedule.saved)
    return best


def choose_exit_layers(costs: ExitCosts, n_most: int, first: int) -> Schedule:
    """The at most n_most exit layers, beginning with `first`, that save most together; none where none pays.

    Exact, not greedy: what an exit layer gains depends on the nearest one before it alone, hence dynamic programming
    over (exit layers chosen, the last of them).
    """
    n_layers = len(costs.histogram)
    exitable = tuple(accumulate(costs.histogram))
    after = tuple(accumulate(reversed(costs.layer)))[::-1]  # the cost of all layers from this one on
    gain = exitable[first] * after[first] - costs.predictor[first] - costs.first
    best = {first: Schedule(gain, (first,))}  # by their last exit layer, of so many as the loop has come to
    found = NO_SCHEDULE
    for n_chosen in range(1, n_most + 1):
        found = max([found, *best.values()], key=lambda schedule: schedule.saved)
        longer: dict[int, Schedule] = {}
        for last in range(first + n_chosen, n_layers):
            candidates = [
                Schedule(
                    saved
                    + (exitable[last] - exitable[places[-1]]) * after[last]
                    - (1 - exitable[places[-1]]) * costs.predictor[last],
                    (*places, last),
                )
                for saved, places in best.values()
                if places[-1] < last
            ]
            if candidates:
                longer[last] = max(candidates, key=lambda schedule: schedule.saved)
        best = longer
    return found


def exit_histogram(agrees: NDArray[np.bool_]) -> tuple[float, ...]:
    """agrees (m, n_layers): whether a token's draft at exit layer b is the full model's -> share of tokens, by the
    first exit layer from which on it stays so; exit layer 0, where nothing has run, takes no part."""
    m, n_layers = agrees.shape
    stays = np.logical_and.accumulate(agrees[:, ::-1], axis=1)[:, ::-1]
    stays[:, 0] = False
    first = np.where(stays.any(1), stays.argmax(1), n_layers)
    counts = np.bincount(first, minlength=n_layers + 1)[:n_layers]
    return tuple(float(count) / max(1, m) for count in counts)


def _histogram(fits: Sequence[FittedExitLayer], first: int, partial: PartialLogits) -> tuple[float, ...]:
    """Share of tokens by the exit layer from which on each lets them exit rightly, `first` having taken the candidates
    and the exit layer just before being the one evaluated last."""
    exits = np.zeros((partial.rank.shape[1], len(fits) + 1), np.bool_)
    for exit_layer in range(first, len(fits) + 1):
        fitted, is_partial = fits[exit_layer - 1], exit_layer > first
        if is_partial and fitted.partial_predictor is None:
            exits[:, exit_layer] = exits[:, exit_layer - 1]  # it is not asked, and so keeps nobody
            continue
        features = partial.features(first, exit_layer, exit_layer - 1 if is_partial else None)
        opens = fitted.opens(features, is_partial=is_partial)
        exits[:, exit_layer] = opens & partial.is_right(first, exit_layer)
    return exit_histogram(exits)


def _own_bytes(fitted: FittedExitLayer, read: ReadBytes) -> float:
    """What judging a token at this exit layer reads, beside the whole lm_head."""
    exit_map, predictor = fitted.exit_map, fitted.partial_predictor or fitted.predictor
    n_bytes = sum(each.nbytes for each in (predictor.first, predictor.first_bias, predictor.second))
    if exit_map is not None:
        n_bytes += sum(part.nbytes for part in (exit_map.down, exit_map.up, exit_map.bias) if part is not None)
    return n_bytes + read.candidates
