"""The schedule of a calibration: the exit layers worth judging rows at, by how rows exit and by bytes read.

A row that exits saves the layers behind. What a judged row costs: at its first exit layer the whole head, at every one
the map, the predictor and the candidates' rows of the head. Bytes stand for time, as one row's pass is bound by memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_ee.models.blocks import Block
from hetero_ee.speculation.exits.calibration import FittedExitLayer
from hetero_ee.speculation.exits.candidates import N_CANDIDATES
from hetero_ee.speculation.exits.predictors import Predictor
from hetero_ee.speculation.exits.schedule import (
    NO_SCHEDULE,
    ExitCosts,
    ExitSchedule,
    choose_exit_layers,
    exit_histogram,
)
from hetero_ee.speculation.exits.sliced_logits import Flags, SlicedLogits
from hetero_ee.weights.model_weights import ModelWeights

LAYERS_A_BOUNDARY = 4  # at least, so that 8 of 32 are judged at: SpecEE's number


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """Bytes read for one row. layers: of each layer; head: of the whole head; candidates: of the candidates' rows."""

    layers: tuple[float, ...]
    head: float
    candidates: float

    @classmethod
    def of(cls, blocks: Sequence[Block], weights: ModelWeights) -> "ReadBytes":
        """blocks: the decoder's, the head last."""
        layers: dict[int, float] = {}
        for block in blocks:
            if block.layer is not None:
                layers[block.layer] = layers.get(block.layer, 0.0) + _matrix_bytes(block, weights)
        head = blocks[-1].tensors["tokens"]
        head_bytes = float(weights.matrices[head.name].n_bytes)
        return cls(tuple(layers.values()), head_bytes, N_CANDIDATES * head_bytes / head.shape[0])


def fit_schedule(fits: Sequence[FittedExitLayer], sliced: SlicedLogits, read: ReadBytes) -> ExitSchedule:
    """The best of the schedules that begin with each exit layer, in bytes; none where none pays, or where there is no
    sliced predictor at all, as too few rows tell then.

    fits: of exit layer 1, 2, ... How many rows an exit layer lets exit depends on which one took their candidates,
    hence a histogram for each first exit layer. An exit counts where it is right.
    """
    n_layers = len(fits) + 1
    own = (0.0, *(_own_bytes(each, read) for each in fits))
    # An exit layer without a sliced predictor can't follow another: more expensive than all that it could save.
    later = tuple(
        cost if place and fits[place - 1].sliced_predictor else 2 * sum(read.layers) for place, cost in enumerate(own)
    )
    best = NO_SCHEDULE
    if not any(each.sliced_predictor for each in fits):
        return best
    for first in range(1, n_layers):
        predictor = (*later[:first], own[first], *later[first + 1 :])
        costs = ExitCosts(_histogram(fits, first, sliced), read.layers, predictor, read.head)
        found = choose_exit_layers(costs, max(1, n_layers // LAYERS_A_BOUNDARY), first)
        best = max(best, found, key=lambda schedule: schedule.saved)
    return best


def _histogram(fits: Sequence[FittedExitLayer], first: int, sliced: SlicedLogits) -> tuple[float, ...]:
    """Share of rows by the exit layer from which on each lets them exit rightly, `first` having taken the
    candidates."""
    exits = np.zeros((sliced.rank.shape[1], len(fits) + 1), np.bool_)
    for exit_layer in range(first, len(fits) + 1):
        exits[:, exit_layer] = _right_exits(fits[exit_layer - 1], first, sliced)
        if exit_layer > first and fits[exit_layer - 1].sliced_predictor is None:
            exits[:, exit_layer] = exits[:, exit_layer - 1]  # it is not asked, and so keeps nobody
    return exit_histogram(exits)


def _right_exits(fitted: FittedExitLayer, first: int, sliced: SlicedLogits) -> Flags:
    """(m,): where it lets exit rightly, the exit layer just before being the one evaluated last."""
    exit_layer = fitted.exit_layer
    previous = None if exit_layer == first else exit_layer - 1
    opens = fitted.opens(sliced.features(first, exit_layer, previous), is_sliced=previous is not None)
    return opens & sliced.is_right(first, exit_layer)


def _own_bytes(fitted: FittedExitLayer, read: ReadBytes) -> float:
    """What judging a row at this exit layer reads, beside the whole head."""
    map_bytes = 0
    if fitted.exit_map is not None:
        parts = (fitted.exit_map.down, fitted.exit_map.up, fitted.exit_map.bias)
        map_bytes = sum(part.nbytes for part in parts if part is not None)
    return map_bytes + _predictor_bytes(fitted.sliced_predictor or fitted.predictor) + read.candidates


def _predictor_bytes(predictor: Predictor) -> int:
    return sum(array.nbytes for array in predictor.arrays().values())


def _matrix_bytes(block: Block, weights: ModelWeights) -> int:
    found = (weights.matrices.get(tensor.name) for tensor in block.tensors.values())
    return sum(weight.n_bytes for weight in found if weight is not None)
