"""Fits a calibration's schedule: the exit layers at which judging a token saves most bytes, or costs fewest extra ones.

SpecEE (arXiv 2504.08850, section 5.1) found that a few exit layers have most exits. A token that exits saves the later
layers. Judging it reads the whole lm_head at its first exit layer. Every exit layer reads the map, the predictor and
the candidates' rows of the lm_head. Bytes stand for time, since one token's pass is bound by memory.
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
from hetero_ee.speculation.exits.features import N_CANDIDATES
from hetero_ee.weights.model_weights import ModelWeights

LAYERS_PER_EXIT_LAYER = 4  # at least: tokens are judged at up to 8 of 32, as in SpecEE


class Schedule(NamedTuple):
    """Exit layers in ascending order, and the average saving per token from judging there, in the unit of the costs."""

    saved: float
    exit_layers: tuple[int, ...]  # ascending


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Costs and gains by exit layer, starting at 0, in one unit. All tuples have n_layers values."""

    histogram: tuple[float, ...]  # share of tokens that can exit there and later, but not before
    layer: tuple[float, ...]  # cost of the layer after it, saved by every token that exits
    predictor: tuple[float, ...]  # cost of judging a token there
    first: float = 0.0  # extra cost of a token's first exit layer: the whole lm_head

    def __post_init__(self) -> None:
        if not len(self.histogram) == len(self.layer) == len(self.predictor) > 0:
            raise ValueError("histogram, layer and predictor need one entry a layer each")
        if min(self.histogram) < 0 or sum(self.histogram) > 1 + 1e-6:
            raise ValueError("histogram holds shares of all tokens, at most 1 together")


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """Bytes that one token's pass reads."""

    layers: tuple[float, ...]  # bytes of each layer
    head: float  # bytes of the whole lm_head
    candidates: float  # bytes of the candidates' rows of the lm_head

    @classmethod
    def of(cls, blocks: Sequence[Block], weights: ModelWeights) -> "ReadBytes":
        """Return the bytes of these decoder blocks, the last of which is the lm_head."""
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
    """Return the schedule that saves most bytes. If none saves any, it is the one that adds fewest.

    The first exit layer of a schedule chooses the candidates, which affects how many tokens exit later. So each
    possible first exit layer has its own histogram. Only right exits count.

    Args:
        fits: Fits of exit layer 1, 2, ...
        partial: Partial logits of the tokens on which the schedule is chosen.
        read: Bytes of the model's parts.
    """
    n_layers, found = len(fits) + 1, []
    own = (0.0, *(own_bytes(each, read) for each in fits))
    # An exit layer without a partial predictor can't follow another: more expensive than all that it could save.
    never = 2 * sum(read.layers)
    later = (never, *(own[each.exit_layer] if each.partial_predictor else never for each in fits))
    for first in reversed(range(1, n_layers)):  # of equal ones the deepest, which changes fewest tokens
        predictor = (*later[:first], own[first], *later[first + 1 :])
        costs = ExitCosts(_histogram(fits, first, partial), read.layers, predictor, read.head)
        found.append(choose_exit_layers(costs, n_scheduled(n_layers), first))
    return max(found, key=lambda schedule: schedule.saved)


def n_scheduled(n_layers: int) -> int:
    """Return the most exit layers of a schedule."""
    return max(1, n_layers // LAYERS_PER_EXIT_LAYER)


def choose_exit_layers(costs: ExitCosts, n_most: int, first: int) -> Schedule:
    """Return the up to n_most exit layers, starting with `first`, that save most.

    Dynamic programming over the number of exit layers and the last of them finds the optimum, since an exit layer's
    gain depends only on the nearest one before it.
    """
    n_layers = len(costs.histogram)
    exitable = tuple(accumulate(costs.histogram))
    after = tuple(accumulate(reversed(costs.layer)))[::-1]  # cost of all layers from this one on
    gain = exitable[first] * after[first] - costs.predictor[first] - costs.first
    best = {first: Schedule(gain, (first,))}  # best schedule of n_chosen exit layers, by its last one
    found = best[first]
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
    """Return the share of tokens by the first exit layer from which on every draft is right.

    Args:
        agrees: (m, n_layers), whether a token's draft at each exit layer is the full model's. Exit layer 0 is ignored.
    """
    m, n_layers = agrees.shape
    stays = np.logical_and.accumulate(agrees[:, ::-1], axis=1)[:, ::-1]
    stays[:, 0] = False
    first = np.where(stays.any(1), stays.argmax(1), n_layers)
    counts = np.bincount(first, minlength=n_layers + 1)[:n_layers]
    return tuple(float(count) / max(1, m) for count in counts)


def _histogram(fits: Sequence[FittedExitLayer], first: int, partial: PartialLogits) -> tuple[float, ...]:
    """Return the share of tokens by the first exit layer from which on they would exit, and rightly.

    Assumes that `first` chose the candidates and that the exit layer just before was the last one to judge the token.
    """
    exits = np.zeros((partial.rank.shape[1], len(fits) + 1), np.bool_)
    for exit_layer in range(first, len(fits) + 1):
        fitted, is_partial = fits[exit_layer - 1], exit_layer > first
        if is_partial and fitted.partial_predictor is None:
            exits[:, exit_layer] = exits[:, exit_layer - 1]  # it judges no token
            continue
        features = partial.features(first, exit_layer, exit_layer - 1 if is_partial else None)
        opens = fitted.opens(features, is_partial=is_partial)
        exits[:, exit_layer] = opens & partial.is_right(first, exit_layer)
    return exit_histogram(exits)


def own_bytes(fitted: FittedExitLayer, read: ReadBytes) -> float:
    """Return the bytes that this exit layer reads to judge a token, without the whole lm_head."""
    exit_map, predictor = fitted.exit_map, fitted.partial_predictor or fitted.predictor
    n_bytes = sum(each.nbytes for each in (predictor.first, predictor.first_bias, predictor.second))
    if exit_map is not None:
        n_bytes += sum(part.nbytes for part in (exit_map.down, exit_map.up, exit_map.bias) if part is not None)
    return n_bytes + read.candidates
