"""Measures a calibration's chunks: activations, sums for fitting exit maps, and drafts.

The data is split by chunk, never by token, since tokens of one text depend on each other. Of four chunks, two are for
training, one for choosing (thresholds, ranks of maps, the schedule), and one is held out for the metrics.

Activations are the second moments of the matrices' inputs, which show which columns' quantization errors matter, and
how often FFN neurons are active. They are measured with the reference operations, which see every matrix's input.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.file import FREQUENCY, MOMENT, watched_blocks
from hetero_ee.calibration.map_fitting import NormalEquations, SelectionTokens, fit_exit_map, head_metric
from hetero_ee.calibration.traces import FIRST_COUNTED, ChunkDrafts, drafts_of, fields_of, trace
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.layers.ops import Router
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.store.record import Arrays
from hetero_ee.weights.weight import Weight

Chunk = tuple[int, ...]
SPLIT_CHUNKS = 4
TRAIN, CHOOSE, HELD_OUT = (0, 1), (2,), (3,)
FINAL, TOKENS, SELECTION = "final", "tokens", "selection."  # names of MapSums' arrays
ACTIVE_SHARE = 0.05  # share of a token's largest activation; below, a neuron is inactive


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


class Activations(BatchedTorchOps):
    """Reference operations that also sum up the inputs of the layers' matrices, in float64.

    `sums` has, by name, "<matrix>.second_moment": the sums of squares of each input feature, and
    "layers.*.ffn.active_share": the number of tokens at which a neuron was active (above 0 for ReLU, else above
    ACTIVE_SHARE of the token's largest activation), or "layers.*.moe.active_share": that chose an expert.
    Position 0 of a chunk is left out.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, chunks: Sequence[Chunk]) -> None:
        self._spec, self._chunks = spec, chunks
        self._names = {
            id(weights.matrices[tensor.name]): tensor.name
            for block in watched_blocks(spec)
            for tensor in block.tensors.values()
            if tensor.name in weights.matrices
        }
        self._routers = {
            id(weights.vectors[block.tensors["router"].name]): block.name
            for block in watched_blocks(spec)
            if isinstance(block.mixer, MoeSpec)
        }
        self._first = next(iter(self._names.values()))  # at which tokens are counted
        self._executor = ReferenceExecutor(spec, weights, max(map(len, chunks)), self)
        self.sums: Arrays = {}
        self.n_tokens = 0

    @property
    def means(self) -> dict[str, NDArray[np.float32]]:
        """Sums divided by the number of tokens, by name."""
        return {name: (sums / max(1, self.n_tokens)).astype(np.float32) for name, sums in self.sums.items()}

    def add_chunk(self, number: int) -> None:
        trace(self._executor, self._chunks[number])

    def arrays(self) -> Arrays:
        return {**self.sums, "n_tokens": np.array([self.n_tokens])}

    def restore(self, arrays: Arrays) -> None:
        self.n_tokens = int(arrays.pop("n_tokens")[0])
        self.sums = arrays

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        self._count(x, weight)
        return super().product(x, weight, bias)

    def summed(self, inner: Tensor, down: Weight) -> Tensor:
        self._count(inner, down)
        return super().summed(inner, down)

    def route(self, x: Tensor, router: Router) -> Tensor:
        routes, spec = super().route(x, router), router.spec
        chosen = routes[FIRST_COUNTED:, : spec.n_active].long().flatten()
        counts = torch.bincount(chosen, minlength=spec.n_experts).double()
        self._add(f"{self._routers[id(router.weights)]}.{FREQUENCY}", counts)
        return routes

    def _count(self, x: Tensor, weight: Weight) -> None:
        name = self._names.get(id(weight))
        if name is not None:
            counted = x[FIRST_COUNTED:]
            self._add(f"{name}.{MOMENT}", counted.double().square().sum(0))
            if name.endswith(".ffn.down"):
                self._add(f"{name.removesuffix('.down')}.{FREQUENCY}", self._active(counted).double().sum(0))
            if name == self._first:
                self.n_tokens += len(counted)

    def _active(self, inner: Tensor) -> Tensor:
        """Return a mask (m, ffn) of the active neurons, from the inputs of the second FFN matrix."""
        if self._spec.activation in ("relu", "fatrelu"):
            return inner != 0 if self._spec.gated else inner > 0
        size = inner.abs()
        return size > ACTIVE_SHARE * size.amax(dim=1, keepdim=True)

    def _add(self, name: str, values: Tensor) -> None:
        array = values.numpy()
        self.sums[name] = self.sums[name] + array if name in self.sums else array


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
    executor: Executor, number: int, chunk: Chunk, maps: Mapping[int, ExitMap], *, with_logits: bool
) -> Arrays:
    """Draft on a chunk with the exit maps, and return the fields of its ChunkDrafts, the same in every run.

    With with_logits, the fields of its PartialLogits are included.
    """
    drafts = drafts_of(executor, trace(executor, chunk), maps, with_unmapped=is_in(number, HELD_OUT))
    sampled = drafts.partial.sampled(np.random.default_rng(number))
    found = fields_of(ChunkDrafts(drafts.features, drafts.is_right, drafts.is_right_unmapped, *sampled))
    return found | (fields_of(drafts.partial) if with_logits else {})
