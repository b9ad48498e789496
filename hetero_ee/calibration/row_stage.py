"""The last stage of a calibration: features and labels of every counted token at every exit layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.draft_rows import draft_rows
from hetero_ee.calibration.stages import CHOOSE, HELD_OUT, Chunk, first_numbers, is_in
from hetero_ee.calibration.tensors import Arrays
from hetero_ee.calibration.traces import trace
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.sliced_logits import SlicedLogits

VALUES, RANK = "values", "rank"  # names of the sliced logits' arrays
BY_CHUNK = ("features", "is_right", "is_right_unmapped", "sliced_features", "sliced_is_right", "sliced_first")


class RowStage:
    """With the maps that were fitted. Of each chunk, by exit layer and token:

    features fp32 (n_exit_layers, m, 12), of the first exit layer evaluated for a row; is_right bool (n_exit_layers,
    m): the draft is the full model's token; is_right_unmapped: it would be without a map (held-out chunks alone, False
    elsewhere). sliced_features, sliced_is_right, sliced_first: the same of candidates that an earlier exit layer took
    (SlicedLogits.drawn; the first exit layer's mean nothing).

    sliced: all sliced logits, by chunk number, of the first choosing and held-out chunks with n_walk_tokens each.
    """

    name = "rows"

    def __init__(
        self, executor: Executor, chunks: Sequence[Chunk], maps: dict[int, ExitMap], n_walk_tokens: int
    ) -> None:
        self.numbers = range(len(chunks))
        self.features: list[NDArray[np.float32]] = []
        self.is_right: list[NDArray[np.bool_]] = []
        self.is_right_unmapped: list[NDArray[np.bool_]] = []
        self.sliced_features: list[NDArray[np.float32]] = []
        self.sliced_is_right: list[NDArray[np.bool_]] = []
        self.sliced_first: list[NDArray[np.int64]] = []
        self.sliced: dict[int, SlicedLogits] = {}
        self._walked = {number for part in (CHOOSE, HELD_OUT) for number in first_numbers(chunks, part, n_walk_tokens)}
        self._executor, self._maps = executor, maps

    def add(self, number: int, chunk: Chunk) -> None:
        rows = draft_rows(
            self._executor, trace(self._executor, chunk), self._maps, with_unmapped=is_in(number, HELD_OUT)
        )
        drawn = rows.sliced.drawn(np.random.default_rng(number))  # the same in every run
        parts = (rows.features, rows.is_right, rows.is_right_unmapped, drawn.features, drawn.is_right, drawn.first)
        for name, part in zip(BY_CHUNK, parts, strict=True):
            getattr(self, name).append(part)
        if number in self._walked:
            self.sliced[number] = rows.sliced

    def finish(self) -> None:
        """Nothing is left to do."""

    def arrays(self) -> Arrays:
        if not self.features:
            return {}
        arrays: Arrays = {name: np.concatenate(getattr(self, name), axis=1) for name in BY_CHUNK}
        if self.sliced:
            kept = SlicedLogits.joined(list(self.sliced.values()))
            arrays |= {VALUES: kept.values, RANK: kept.rank}
        return arrays | {"lengths": np.array([each.shape[1] for each in self.features])}

    def restore(self, arrays: Arrays, is_finished: bool) -> None:
        lengths = arrays["lengths"]
        for name in BY_CHUNK:
            setattr(self, name, _split(arrays[name], lengths))
        numbers = sorted(number for number in self._walked if number < len(lengths))
        if numbers:
            values, rank = (_split(arrays[name], lengths[numbers]) for name in (VALUES, RANK))
            self.sliced = {number: SlicedLogits(*parts) for number, *parts in zip(numbers, values, rank, strict=True)}


def _split(array: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Along the tokens, the second axis."""
    return [np.ascontiguousarray(part) for part in np.split(array, lengths.cumsum()[:-1], axis=1)]
