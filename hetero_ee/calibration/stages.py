"""The stages of a calibration. Each processes chunks one after another and can save and restore its arrays.

The data is split by chunk, never by token, since tokens of one text depend on each other. Of four chunks two train, one
chooses (thresholds, ranks of maps, the schedule) and one is held out for the metrics.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.activations import ActivationRecorder
from hetero_ee.calibration.map_fitting import NormalEquations, SelectionTokens, fit_exit_map, head_metric
from hetero_ee.calibration.traces import ChunkDrafts, PartialLogits, drafts_of, fields_of, joined, split, trace
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.store.record import Arrays

Chunk = tuple[int, ...]
SPLIT_CHUNKS = 4
TRAIN, CHOOSE, HELD_OUT = (0, 1), (2,), (3,)
MAP_PARTS = ("down", "up", "bias")
FINAL, TOKENS, SELECTION = "final", "tokens", "selection."  # names of MapStage's arrays
LENGTHS = "lengths"  # name of DraftStage's array that is not a field of ChunkDrafts or PartialLogits


def is_in(number: int, part: tuple[int, ...]) -> bool:
    """Return whether the chunk with this number belongs to `part`: TRAIN, CHOOSE or HELD_OUT."""
    return number % SPLIT_CHUNKS in part


def first_numbers(chunks: Sequence[Chunk], part: tuple[int, ...], n_tokens: int) -> list[int]:
    """Return the numbers of the first chunks of a part that have n_tokens together."""
    numbers, n_found = [], 0
    for number, chunk in enumerate(chunks):
        if is_in(number, part) and n_found < n_tokens:
            numbers.append(number)
            n_found += len(chunk) - 1
    return numbers


class Stage(Protocol):
    """One stage. numbers: of the chunks that it processes, in order."""

    name: str

    @property
    def numbers(self) -> Sequence[int]: ...

    def add(self, number: int, chunk: Chunk) -> None: ...

    def finish(self) -> None:
        """Called once after the last chunk, unless a finished stage was restored."""

    def arrays(self) -> Arrays:
        """Return everything that `restore` needs. May be called between any two calls of `add`."""

    def restore(self, arrays: Arrays, is_finished: bool) -> None:
        """Continue from what `arrays` has returned in another run."""


class ActivationStage:
    """Sums activations over the first training chunks, on an executor of its own in plain torch."""

    name = "activations"

    def __init__(self, spec: ModelSpec, weights: ModelWeights, chunks: Sequence[Chunk], max_tokens: int) -> None:
        self._recorder = ActivationRecorder(spec, weights)
        self._executor = ReferenceExecutor(spec, weights, max(map(len, chunks)), self._recorder)
        self.numbers = first_numbers(chunks, TRAIN, max_tokens)

    def add(self, number: int, chunk: Chunk) -> None:
        trace(self._executor, chunk)

    def finish(self) -> None:
        """Nothing is left to do."""

    @property
    def n_tokens(self) -> int:
        return self._recorder.n_tokens

    @property
    def means(self) -> dict[str, NDArray[np.float32]]:
        """Means per token, by name."""
        n_tokens = max(1, self.n_tokens)
        return {name: (sums / n_tokens).astype(np.float32) for name, sums in self._recorder.sums.items()}

    def arrays(self) -> Arrays:
        return {**self._recorder.sums, "n_tokens": np.array([self.n_tokens])}

    def restore(self, arrays: Arrays, is_finished: bool) -> None:
        self._recorder.n_tokens = int(arrays.pop("n_tokens")[0])
        self._recorder.sums = arrays


class MapStage:
    """Sums the normal equations over the training chunks, keeps tokens to choose by, and fits the exit maps.

    exit_layers: those that may get a map. maps: filled when the stage is finished.
    """

    name = "maps"

    def __init__(
        self, executor: Executor, chunks: Sequence[Chunk], exit_layers: Sequence[int], n_selection_tokens: int
    ) -> None:
        train = [number for number in range(len(chunks)) if is_in(number, TRAIN)]
        self.numbers = [*train, *first_numbers(chunks, CHOOSE, n_selection_tokens)]
        self.maps: dict[int, ExitMap] = {}
        self._executor, self._exit_layers = executor, exit_layers
        hidden_size = executor.spec.hidden_size
        self._equations = {exit_layer: NormalEquations(hidden_size) for exit_layer in exit_layers}
        self._selection: dict[str, list[Tensor]] = {}  # parts of the chunks by exit layer, FINAL and TOKENS
        self._is_finished = False

    def add(self, number: int, chunk: Chunk) -> None:
        found = trace(self._executor, chunk)
        if is_in(number, CHOOSE):
            parts = {FINAL: found.final, TOKENS: found.tokens}
            for name, part in (parts | {str(each): found.at(each) for each in self._exit_layers}).items():
                self._selection.setdefault(name, []).append(part)
            return
        for exit_layer, equations in self._equations.items():
            equations.add(found.at(exit_layer), found.final)

    def finish(self) -> None:
        if self._equations and self._selection:
            block = self._executor.blocks[-1]
            metric = head_metric(self._executor.weights.matrices[block.tensors["tokens"].name])
            for exit_layer, equations in self._equations.items():
                found = fit_exit_map(equations, metric, self._selection_at(exit_layer), self._executor.lm_head)
                if found is not None:
                    self.maps[exit_layer] = found
        self._is_finished = True
        self._equations, self._selection = {}, {}

    def arrays(self) -> Arrays:
        if self._is_finished:
            return {
                f"{exit_layer}.{name}": part.numpy()
                for exit_layer, found in self.maps.items()
                for name in MAP_PARTS
                if (part := getattr(found, name)) is not None
            }
        arrays: Arrays = {}
        for exit_layer, equations in self._equations.items():
            arrays[f"{exit_layer}.products"] = equations.products.numpy()
            arrays[f"{exit_layer}.targets"] = equations.targets.numpy()
        return arrays | {SELECTION + name: torch.cat(parts).numpy() for name, parts in self._selection.items()}

    def restore(self, arrays: Arrays, is_finished: bool) -> None:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._is_finished = is_finished
        if is_finished:
            for each in self._exit_layers:
                if f"{each}.up" in tensors:
                    self.maps[each] = ExitMap(
                        tensors.get(f"{each}.down"), tensors[f"{each}.up"], tensors[f"{each}.bias"]
                    )
            return
        for exit_layer, equations in self._equations.items():
            equations.products.copy_(tensors[f"{exit_layer}.products"])
            equations.targets.copy_(tensors[f"{exit_layer}.targets"])
        for name, tensor in tensors.items():
            if name.startswith(SELECTION):
                self._selection[name.removeprefix(SELECTION)] = [tensor]

    def _selection_at(self, exit_layer: int) -> SelectionTokens:
        normed, final, tokens = (torch.cat(self._selection[name]) for name in (str(exit_layer), FINAL, TOKENS))
        return SelectionTokens(normed, final, tokens)


class DraftStage:
    """Drafts on every chunk with the fitted maps, and keeps partial logits of the first chunks of CHOOSE."""

    name = "drafts"

    def __init__(
        self, executor: Executor, chunks: Sequence[Chunk], maps: dict[int, ExitMap], n_schedule_tokens: int
    ) -> None:
        self.numbers = range(len(chunks))
        self.chunks: list[ChunkDrafts] = []
        self.partial: list[PartialLogits] = []
        self._executor, self._maps = executor, maps
        self._scheduling = first_numbers(chunks, CHOOSE, n_schedule_tokens)

    def add(self, number: int, chunk: Chunk) -> None:
        found = trace(self._executor, chunk)
        drafts = drafts_of(self._executor, found, self._maps, with_unmapped=is_in(number, HELD_OUT))
        sampled = drafts.partial.sampled(np.random.default_rng(number))  # the same in every run
        self.chunks.append(ChunkDrafts(drafts.features, drafts.is_right, drafts.is_right_unmapped, *sampled))
        if number in self._scheduling:
            self.partial.append(drafts.partial)

    def finish(self) -> None:
        """Nothing is left to do."""

    def arrays(self) -> Arrays:
        if not self.chunks:
            return {}
        arrays = fields_of(joined(self.chunks)) | {LENGTHS: np.array([each.is_right.shape[1] for each in self.chunks])}
        if self.partial:
            arrays |= fields_of(joined(self.partial))
        return arrays

    def restore(self, arrays: Arrays, is_finished: bool) -> None:
        lengths = arrays[LENGTHS]
        self.chunks = split(ChunkDrafts, arrays, lengths)
        kept = [number for number in self._scheduling if number < len(lengths)]
        self.partial = split(PartialLogits, arrays, lengths[kept]) if kept else []
