"""A predictor of active neurons on disk: a record next to the store, with the arrays of layer_arrays per layer, as
"0/inner.tiles".
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.prediction.predictor import LayerPredictor, NeuronPredictor, PredictorMeasurement
from hetero_ee.weights.quantizers import FITTED_LIMIT, MAX_EXPONENT, MIN_EXPONENT
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.record import Arrays, RecordArrays, RecordKind
from hetero_ee.weights.tiles import INT4_TILE_BYTES, TILE_ROWS, region_bytes, tile_grid
from hetero_ee.weights.weight import TileWeight

HEADER_BYTES = 2**20  # and everything else that is not a tile, scale or bias
LAYER_HEADER_BYTES = 2**12
WAY_OUT = "run hetero-ee calibrate --sparsity predicted"


@dataclass(frozen=True, slots=True)
class PredictorHeader:
    """A predictor without its arrays. text: what was calibrated on, for people."""

    text: str
    rank: int
    measured: tuple[PredictorMeasurement, ...]


PREDICTOR = RecordKind(PredictorHeader, "predictor of active neurons", 1, WAY_OUT)


def write_predictor(
    predictor: NeuronPredictor, key: str, text: str, file: Path, files: FileSystem | None = None
) -> None:
    """Write the predictor of the weights `key`, completely or not at all. Raises: StoreError, DiskFullError."""
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
    """Return the tiles, scales and codebook of both matrices, by names as "inner.tiles", and the bias."""
    arrays: Arrays = {"bias": layer.bias.numpy()}
    for name, weight in (("inner", layer.inner), ("outer", layer.outer)):
        assert weight.codebook is not None, "int4 has one"
        arrays[f"{name}.tiles"], arrays[f"{name}.scales"] = weight.tiles.numpy(), weight.scales.numpy()
        arrays[f"{name}.codebook"] = np.array([weight.exponent, *weight.codebook])
    return arrays


def parsed_layer(arrays: RecordArrays, prefix: str, spec: ModelSpec, rank: int) -> LayerPredictor:
    """Take the arrays of a layer, whose names begin with `prefix`. Raises: ValueError: if no such layer has them."""
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
    """Return the size of the file of a predictor with the largest rank."""
    shapes = (spec.hidden_size, spec.hidden_size), (spec.ffn_size, spec.hidden_size)
    n_bytes = sum(sum(region_bytes("int4", *shape)) for shape in shapes) + FLOAT_BYTES * spec.ffn_size
    return HEADER_BYTES + spec.n_layers * (n_bytes + LAYER_HEADER_BYTES)
