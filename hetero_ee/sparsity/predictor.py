"""A predictor of active neurons: for each FFN two int4 matrices of low rank, in tiles, and a bias.

On disk it is a record next to the store. Each layer has the arrays of layer_arrays, with names like "0/inner.tiles".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.errors import UsageError
from hetero_ee.models.blocks import neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.quantizers import FITTED_LIMIT, MAX_EXPONENT, MIN_EXPONENT
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.record import Arrays, RecordArrays, RecordKind
from hetero_ee.weights.tiles import INT4_TILE_BYTES, TILE_ROWS, region_bytes, tile_grid
from hetero_ee.weights.weight import TileWeight

MAX_PREDICTED_KL_NATS = 0.001  # about a thousandth of the perplexity, PowerInfer's bound (arXiv 2312.12456)
MARGINS = tuple(step / 4 for step in range(33))  # logits
HEADER_BYTES = 2**20  # and everything else that is not a tile, scale or bias
LAYER_HEADER_BYTES = 2**12
WAY_OUT = "run hetero-ee calibrate --sparsity predicted"


@dataclass(frozen=True, slots=True, eq=False)
class LayerPredictor:
    """Predictor of one FFN's active neurons, with logits outer (inner x) + bias. Shapes: inner (rank, hidden), outer
    (ffn, rank), bias fp32 (ffn,)."""

    inner: TileWeight
    outer: TileWeight
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PredictorMeasurement:
    """Measurement of one margin on held-out text. Neurons with a logit above -margin are computed."""

    margin: float
    recall: float  # share of the active neurons that were computed
    predicted_share: float  # share of all neurons that were computed
    active_share: float  # share of all neurons that are not 0
    kl_nats: float  # mean KL divergence of the next-token distribution, from all neurons to the predicted ones

    def __post_init__(self) -> None:
        shares = self.recall, self.predicted_share, self.active_share
        is_possible = all(0 <= share <= 1 for share in shares) and 0 <= self.kl_nats < math.inf
        if self.margin not in MARGINS or not is_possible:
            raise ValueError(f"it measures {shares} and {self.kl_nats} nats at {self.margin}")


@dataclass(frozen=True, slots=True, eq=False)
class NeuronPredictor:
    """Predictors of all layers, in order, with measurements of several margins."""

    layers: tuple[LayerPredictor, ...]
    measured: tuple[PredictorMeasurement, ...]

    @property
    def rank(self) -> int:
        return self.layers[0].inner.shape[0]

    def chosen(self, max_kl_nats: float = MAX_PREDICTED_KL_NATS) -> PredictorMeasurement:
        """Return the measurement of the smallest margin within the bound. Raises: UsageError: if no margin is."""
        within = [each for each in self.measured if each.kl_nats <= max_kl_nats]
        if not within:
            least = min((each.kl_nats for each in self.measured), default=math.inf)
            raise UsageError(
                f"this model's active neurons can't be predicted within {max_kl_nats} nats of KL divergence, "
                f"{least:.2g} at best; calibrate on more text, or use --sparsity exact."
            )
        return min(within, key=lambda each: each.margin)

    def expected(self, spec: ModelSpec, measured: PredictorMeasurement) -> ModelSpec:
        """Return the spec with this predictor and the measured shares of active neurons, for planning."""
        active = measured.active_share
        return replace(
            spec,
            neuron_major=True,
            first_in_rows=True,
            predictor_rank=self.rank,
            predicted_share=measured.predicted_share,
            active_shares=(measured.recall * active, active),
        )

    def merged(self, spec: ModelSpec, weights: ModelWeights, margin: float) -> ModelWeights:
        """Return the weights together with the predictor's. `spec` comes from `expected`."""
        matrices, vectors = dict(weights.matrices), dict(weights.vectors)
        for block, layer in zip(neuron_blocks(spec), self.layers, strict=True):
            matrices[block.tensors["predictor_in"].name] = layer.inner
            matrices[block.tensors["predictor_out"].name] = layer.outer
            vectors[block.tensors["predictor_out_bias"].name] = layer.bias + margin
        return replace(weights, matrices=matrices, vectors=vectors)


def least_within(
    measure: Callable[[float], PredictorMeasurement], max_kl_nats: float = MAX_PREDICTED_KL_NATS
) -> list[PredictorMeasurement]:
    """Find the smallest of MARGINS within the bound by bisection, and return all measurements."""
    found, low, high = [], -1, len(MARGINS)
    while high - low > 1:
        middle = (low + high) // 2
        found.append(measure(MARGINS[middle]))
        low, high = (low, middle) if found[-1].kl_nats <= max_kl_nats else (middle, high)
    return found


@dataclass(frozen=True, slots=True)
class PredictorHeader:
    """A predictor without its arrays. `text` describes the calibration text for people."""

    text: str
    rank: int
    measured: tuple[PredictorMeasurement, ...]


PREDICTOR = RecordKind(PredictorHeader, "predictor of active neurons", 1, WAY_OUT)


def write_predictor(
    predictor: NeuronPredictor, key: str, text: str, file: Path, files: FileSystem | None = None
) -> None:
    """Write the predictor for weights with this key, completely or not at all. Raises: StoreError, DiskFullError."""
    layers = enumerate(predictor.layers)
    arrays = {f"{number}/{name}": array for number, layer in layers for name, array in layer_arrays(layer).items()}
    PREDICTOR.write(file, key, PredictorHeader(text, predictor.rank, predictor.measured), arrays, files)


def read_predictor(file: Path, spec: ModelSpec, key: str) -> NeuronPredictor | None:
    """Return the predictor in `file`, None if it does not exist. Raises: StoreError: see RecordKind.read."""

    def make(header: PredictorHeader, arrays: RecordArrays) -> NeuronPredictor:
        layers = (parsed_layer(arrays, f"{number}/", spec, header.rank) for number in range(spec.n_layers))
        return NeuronPredictor(tuple(layers), header.measured)

    return PREDICTOR.read(file, key, _most_bytes(spec), make)


def layer_arrays(layer: LayerPredictor) -> Arrays:
    """Return the bias, and the tiles, scales and codebook of both matrices, with names like "inner.tiles"."""
    arrays: Arrays = {"bias": layer.bias.numpy()}
    for name, weight in (("inner", layer.inner), ("outer", layer.outer)):
        assert weight.codebook is not None, "int4 has one"
        arrays[f"{name}.tiles"], arrays[f"{name}.scales"] = weight.tiles.numpy(), weight.scales.numpy()
        arrays[f"{name}.codebook"] = np.array([weight.exponent, *weight.codebook])
    return arrays


def parsed_layer(arrays: RecordArrays, prefix: str, spec: ModelSpec, rank: int) -> LayerPredictor:
    """Return the layer whose array names begin with `prefix`. Raises: ValueError: if an array doesn't fit the model."""
    if not 0 < rank <= spec.hidden_size:
        raise ValueError(f"its rank is {rank}")
    inner = _matrix(arrays, f"{prefix}inner", rank, spec.hidden_size)
    outer = _matrix(arrays, f"{prefix}outer", spec.ffn_size, rank)
    return LayerPredictor(inner, outer, torch.from_numpy(arrays.take(f"{prefix}bias", np.float32, (spec.ffn_size,))))


def _matrix(arrays: RecordArrays, name: str, n_rows: int, n_columns: int) -> TileWeight:
    grid = tile_grid(n_rows, n_columns)
    tiles = arrays.take(f"{name}.tiles", np.uint8, (*grid, INT4_TILE_BYTES))
    scales = arrays.take(f"{name}.scales", np.float16, (*grid, TILE_ROWS))
    exponent, *codebook = arrays.take(f"{name}.codebook", np.int64, (17,)).tolist()
    is_codebook = codebook == sorted(set(codebook)) and max(map(abs, codebook)) <= FITTED_LIMIT
    if not is_codebook or not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise ValueError(f"its array '{name}.codebook' is not a codebook")
    return TileWeight(torch.from_numpy(tiles), torch.from_numpy(scales), exponent, tuple(codebook), n_rows, n_columns)


def _most_bytes(spec: ModelSpec) -> int:
    """Return the maximum size of a predictor's file, which a predictor with the largest rank has."""
    shapes = (spec.hidden_size, spec.hidden_size), (spec.ffn_size, spec.hidden_size)
    n_bytes = sum(sum(region_bytes("int4", *shape)) for shape in shapes) + FLOAT_BYTES * spec.ffn_size
    return HEADER_BYTES + spec.n_layers * (n_bytes + LAYER_HEADER_BYTES)
