"""Measures a calibration's chunks: sums for fitting exit maps, and drafts.

The data is split by chunk, never by token, since tokens of one text depend on each other. Of four chunks, two are for
training, one for choosing (thresholds, ranks of maps, the schedule), and one is held out for the metrics.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hetero_ee.calibration.map_fitting import NormalEquations, SelectionTokens, fit_exit_map, head_metric
from hetero_ee.calibration.traces import ChunkDrafts, DraftedChunk, drafts_of, fields_of, trace
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.weights.store.record import Arrays

Chunk = tuple[int, ...]
SPLIT_CHUNKS = 4
TRAIN, CHOOSE, HELD_OUT = (0, 1), (2,), (3,)
FINAL, TOKENS, SELECTION = "final", "tokens", "selection."  # names of MapSums' arrays


def is_in(number: int, part: tuple[int, ...]) -> bool:
    """Return whether the chunk with this number belongs to `part`: TRAIN, CHOOSE or HELD_OUT."""
    return number % SPLIT_CHUNKS in part


def first_numbers(chunks: Sequence[Chunk], part: tuple[int, ...], n_tokens: int) -> list[int]:
    """Return the numbers of the first chunks of a part, up to n_tokens in total."""
    numbers, n_found = [], 0
    for number, chunk in enumerate(chunks):
        if is_in(number, part) and n_found < n_tokens:
            numbers.append(number)
            n_found += len(chunk) - 1
    return numbers


class MapSums:
    """Normal equations over chunks of TRAIN, and tokens of CHOOSE for choosing maps, for each of these exit layers."""

    def __init__(self, executor: Executor, chunks: Sequence[Chunk], exit_layers: Sequence[int]) -> None:
        self._executor, self._chunks = executor, chunks
        self._equations = {exit_layer: NormalEquations(executor.spec.hidden_size) for exit_layer in exit_layers}
        self._selection: dict[str, list[Tensor]] = {}  # parts of the chunks by exit layer, FINAL and TOKENS

    def add_chunk(self, number: int) -> None:
        found = trace(self._executor, self._chunks[number])
        if is_in(number, CHOOSE):
            parts = {FINAL: found.final, TOKENS: found.tokens}
            for name, part in (parts | {str(each): found.at(each) for each in self._equations}).items():
                self._selection.setdefault(name, []).append(part)
            return
        for exit_layer, equations in self._equations.items():
            equations.add(found.at(exit_layer), found.final)

    def arrays(self) -> Arrays:
        arrays: Arrays = {}
        for exit_layer, equations in self._equations.items():
            arrays[f"{exit_layer}.products"] = equations.products.numpy()
            arrays[f"{exit_layer}.targets"] = equations.targets.numpy()
        return arrays | {SELECTION + name: torch.cat(parts).numpy() for name, parts in self._selection.items()}

    def restore(self, arrays: Arrays) -> None:
        for exit_layer, equations in self._equations.items():
            equations.products.copy_(torch.from_numpy(arrays[f"{exit_layer}.products"]))
            equations.targets.copy_(torch.from_numpy(arrays[f"{exit_layer}.targets"]))
        for name, array in arrays.items():
            if name.startswith(SELECTION):
                self._selection[name.removeprefix(SELECTION)] = [torch.from_numpy(array)]

    def fitted(self) -> dict[int, ExitMap]:
        """Return the exit maps that are better than no map."""
        if not self._equations or not self._selection:
            return {}
        executor = self._executor
        metric = head_metric(executor.weights.matrices[executor.blocks[-1].tensors["tokens"].name])
        maps = {
            exit_layer: fit_exit_map(equations, metric, self._selection_at(exit_layer), executor.lm_head)
            for exit_layer, equations in self._equations.items()
        }
        return {exit_layer: found for exit_layer, found in maps.items() if found is not None}

    def _selection_at(self, exit_layer: int) -> SelectionTokens:
        normed, final, tokens = (torch.cat(self._selection[name]) for name in (str(exit_layer), FINAL, TOKENS))
        return SelectionTokens(normed, final, tokens)


def map_arrays(maps: Mapping[int, ExitMap]) -> Arrays:
    arrays: Arrays = {"exit_layers": np.array([*maps], np.int64)}
    parts = ((exit_layer, found.parts) for exit_layer, found in maps.items())
    return arrays | {f"{layer}.{name}": part.numpy() for layer, of_map in parts for name, part in of_map.items()}


def parsed_maps(arrays: Arrays) -> dict[int, ExitMap]:
    """Return the exit maps that were saved as these arrays."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {
        exit_layer: ExitMap.of_parts(
            {
                name.removeprefix(f"{exit_layer}."): part
                for name, part in tensors.items()
                if name.startswith(f"{exit_layer}.")
            }
        )
        for exit_layer in arrays["exit_layers"].tolist()
    }


def draft_arrays(
    executor: Executor,
    number: int,
    chunk: Chunk,
    maps: Mapping[int, ExitMap],
    draft: DraftCandidates | None,
    *,
    with_logits: bool,
) -> Arrays:
    """Draft on a chunk with the exit maps, and return the fields of its ChunkDrafts, the same in every run.

    With with_logits, the fields of its PartialLogits are included; with a draft, those of its DraftedChunk.
    """
    found = trace(executor, chunk)
    candidates = None if draft is None else draft.along(executor, chunk, found.states)
    drafts = drafts_of(executor, found, maps, candidates, with_unmapped=is_in(number, HELD_OUT))
    sampled = drafts.partial.sampled(np.random.default_rng(number))
    arrays = fields_of(ChunkDrafts(drafts.features, drafts.is_right, drafts.is_right_unmapped, *sampled))
    if candidates is not None:
        labels = drafts.best, found.tokens.numpy()
        arrays |= fields_of(DraftedChunk.of(candidates, drafts.drafted_logits, *labels, seed=number))
    return arrays | (fields_of(drafts.partial) if with_logits else {})
