"""The order of neurons by how often they are active on text. The most active, or hottest, neurons come first.

On disk it is a record next to the store, with the arrays "order", int64 (n_layers, ffn), and "curve", fp32.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.stages import HELD_OUT, TRAIN, Chunk, first_numbers
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.models.blocks import Block, least_activations, neuron_blocks
from hetero_ee.models.spec import CURVE_POINTS, ModelSpec
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.sparsity.recorder import FfnRecorder
from hetero_ee.weights.first_units import BY_NEURON
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.record import Arrays, OtherWeightsError, RecordArrays, RecordKind
from hetero_ee.weights.tiles import permuted_rows
from hetero_ee.weights.weight import TileWeight, Weight

MEASURED_TOKENS = 1024  # for the order, and the same number for the curve
WORTH_IT = 0.9  # a token must need a smaller share of its neurons, or an order gains nothing
HEADER_BYTES = 2**16  # maximum bytes of a file without the order
ORDERED = (*BY_NEURON, "predictor_out")  # matrices with a row per neuron
BIASES = tuple(f"{short}_bias" for short in ORDERED if short != "down")  # down's bias belongs to its columns


@dataclass(frozen=True, slots=True)
class OrderHeader:
    """Header of an order, which has no fields of its own."""


ORDER = RecordKind(OrderHeader, "order of neurons", 1, "delete it, then calibrate sparsity")


@dataclass(frozen=True, slots=True, eq=False)
class NeuronOrder:
    """Neuron numbers of every layer, the most active first.

    order: int64 (n_layers, ffn). curve: see ModelSpec.hot_curve, measured on other text than the order.
    """

    order: NDArray[np.int64]
    curve: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.order.dtype != np.int64 or self.order.ndim != 2:
            raise ValueError("its order has another type or shape")
        if not np.array_equal(
            np.sort(self.order, axis=1), np.tile(np.arange(self.order.shape[1]), (len(self.order), 1))
        ):
            raise ValueError("its order lacks neurons, or has some twice")
        points = (0.0, *self.curve, 1.0)
        if len(self.curve) != CURVE_POINTS or not all(0 <= a <= b <= 1 for a, b in pairwise(points)):
            raise ValueError("its curve does not ascend from 0 to 1")

    def applied(self, spec: ModelSpec, weights: ModelWeights) -> tuple[ModelSpec, ModelWeights]:
        """Return the spec with the curve for planning, and the weights copied into this order."""
        matrices, vectors, held_bytes = dict(weights.matrices), dict(weights.vectors), weights.held_bytes
        for block, row in zip(neuron_blocks(spec), torch.from_numpy(self.order), strict=True):
            for name in _names(block, ORDERED):
                matrices[name] = _permuted(matrices[name], row.long())
                held_bytes += matrices[name].n_bytes
            for name in (*_names(block, BIASES), least_activations(block)):
                if name in vectors:
                    vectors[name] = vectors[name][row.long()]
        made = replace(weights, matrices=matrices, vectors=vectors, held_bytes=held_bytes)
        return replace(spec, hot_curve=self.curve), made


class ActivityRecorder(FfnRecorder):
    """Counter of how often each neuron is active, int64 (n_layers, ffn), without the first tokens of each chunk."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        super().__init__(spec, weights)
        self.counts, self.n_tokens = np.zeros((spec.n_layers, spec.ffn_size), np.int64), 0

    def watch(self, layer: int, active: Tensor, inner: Tensor, rows: Tensor) -> None:
        self.counts[layer] += active[FIRST_SPARSE:].count_nonzero(dim=0).numpy()
        self.n_tokens += len(active[FIRST_SPARSE:]) if layer == 0 else 0


def fitted_order(spec: ModelSpec, weights: ModelWeights, chunks: Sequence[Chunk]) -> NeuronOrder | None:
    """Order the neurons by their activity on chunks of TRAIN, with a curve from HELD_OUT. Returns None if most neurons
    are active at most tokens."""
    fitted, held_out = (
        _activity(spec, weights, [chunks[number] for number in first_numbers(chunks, part, MEASURED_TOKENS)])
        for part in (TRAIN, HELD_OUT)
    )
    order = np.argsort(-fitted.counts, axis=1, kind="stable").astype(np.int64)
    taken = np.take_along_axis(held_out.counts, order, axis=1).sum(axis=0).cumsum()
    if taken[-1] > WORTH_IT * held_out.counts.size * held_out.n_tokens or not taken[-1]:
        return None
    ends = np.arange(1, CURVE_POINTS + 1) * spec.ffn_size / CURVE_POINTS
    curve = np.interp(ends, np.arange(spec.ffn_size + 1), np.concatenate([[0], taken / taken[-1]]))
    return NeuronOrder(order, tuple(map(float, curve)))


def write_order(order: NeuronOrder, key: str, file: Path, files: FileSystem | None = None) -> None:
    """Write the order for weights with this key, completely or not at all. Raises: StoreError, DiskFullError."""
    arrays: Arrays = {"order": order.order, "curve": np.array(order.curve, np.float32)}
    ORDER.write(file, key, OrderHeader(), arrays, files)


def read_order(file: Path, spec: ModelSpec, key: str) -> NeuronOrder | None:
    """Return the order in `file`, or None if it does not exist or belongs to other weights; the order is optional.

    Raises: StoreError: if the file is damaged or of another version.
    """

    def make(header: OrderHeader, arrays: RecordArrays) -> NeuronOrder | None:
        curve = tuple(map(float, arrays.take("curve", np.float32)))
        made = NeuronOrder(arrays.take("order", np.int64), curve)
        return made if made.order.shape == (spec.n_layers, spec.ffn_size) else None

    try:
        return ORDER.read(file, key, HEADER_BYTES + 8 * spec.n_layers * spec.ffn_size, make)
    except OtherWeightsError:
        return None


def _activity(spec: ModelSpec, weights: ModelWeights, chunks: Sequence[Chunk]) -> ActivityRecorder:
    recorder = ActivityRecorder(spec, weights)
    executor = ReferenceExecutor(spec, weights, max(map(len, chunks)), recorder)
    for chunk in chunks:
        sequence = executor.cache.open_new()
        executor.hidden(Batch.of_sequence(sequence, 0, list(chunk)))
        executor.cache.close(sequence)
    return recorder


def _names(block: Block, shorts: Iterable[str]) -> list[str]:
    return [block.tensors[short].name for short in shorts if short in block.tensors]


def _permuted(weight: Weight, order: Tensor) -> Weight:
    if isinstance(weight, RowWeight):
        return replace(weight, codes=weight.codes[order], scales=weight.scales[order])
    assert isinstance(weight, TileWeight), "FFNs in rows are quantized"
    tiles, scales = permuted_rows(weight.tiles, weight.scales, order)
    return replace(weight, tiles=tiles, scales=scales)
