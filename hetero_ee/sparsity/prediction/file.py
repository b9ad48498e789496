"""A predictor of active neurons on disk: one recorded file beside the store whose neurons it is of, with the arrays of
layer_arrays for each layer, as "0/inner.tiles".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.recorded_file import read_recorded, require_version, write_recorded
from hetero_ee.calibration.tensor_files import Arrays
from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.errors import StoreError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.prediction.predictor import LayerPredictor, NeuronPredictor, PredictorMeasurement
from hetero_ee.weights.quantizers import FITTED_LIMIT, MAX_EXPONENT, MIN_EXPONENT
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.tiles import INT4_TILE_BYTES, TILE_ROWS, region_bytes, tile_grid
from hetero_ee.weights.weight import TileWeight

FORMAT_VERSION = 1
RECORD_BYTES = 2**20  # and everything else that is no tile, scale or bias
LAYER_HEADER_BYTES = 2**12
PARTS = ("tiles", "scales", "codebook")  # of a matrix; the last is its exponent and the 16 entries
NAMES = (*(f"{matrix}.{part}" for matrix in ("inner", "outer") for part in PARTS), "bias")
WAY_OUT = "run hetero-ee calibrate --sparsity predicted"


@dataclass(frozen=True, slots=True)
class PredictorRecord:
    """What the file holds beside its arrays. key: of the store; text: what was calibrated on, for people."""

    version: int
    key: str
    text: str
    rank: int
    measured: tuple[PredictorMeasurement, ...]

    @staticmethod
    def check_version(version: object) -> None:
        require_version(version, FORMAT_VERSION)


def write_predictor(
    predictor: NeuronPredictor, key: str, text: str, file: Path, files: FileSystem | None = None
) -> None:
    """Whole or not at all, replacing what was there. Raises StoreError, DiskFullError."""
    layers = enumerate(predictor.layers)
    arrays = {f"{number}/{name}": array for number, layer in layers for name, array in layer_arrays(layer).items()}
    record = PredictorRecord(FORMAT_VERSION, key, text, predictor.rank, predictor.measured)
    write_recorded(record, arrays, file, files)


def read_predictor(file: Path, spec: ModelSpec, key: str) -> NeuronPredictor | None:
    """What `file` holds, None where it is not there. Raises StoreError, in one sentence with the way out, where it is
    damaged, of another version or of other weights."""
    try:
        found = read_recorded(PredictorRecord, file, _most_bytes(spec), "a predictor of active neurons")
        if found is None:
            return None
        record, arrays = found
        if record.key != key:
            raise StoreError(
                f"the predictor of active neurons {file} is of another model or of other weights than these; {WAY_OUT} "
                "for this model."
            )
        layers = tuple(
            parsed_layer({name: arrays.pop(f"{number}/{name}", None) for name in NAMES}, spec, record.rank)
            for number in range(spec.n_layers)
        )
        if arrays:
            raise ValueError("there are other arrays")
    except ValueError as error:
        raise StoreError(f"the predictor of active neurons {file} is damaged ({error}); {WAY_OUT} again.") from error
    return NeuronPredictor(layers, record.measured)


def layer_arrays(layer: LayerPredictor) -> Arrays:
    """By NAMES."""
    arrays: Arrays = {"bias": layer.bias.numpy()}
    for name, weight in (("inner", layer.inner), ("outer", layer.outer)):
        assert weight.codebook is not None, "int4 has one"
        arrays[f"{name}.tiles"], arrays[f"{name}.scales"] = weight.tiles.numpy(), weight.scales.numpy()
        arrays[f"{name}.codebook"] = np.array([weight.exponent, *weight.codebook])
    return arrays


def parsed_layer(arrays: Mapping[str, NDArray[Any] | None], spec: ModelSpec, rank: int) -> LayerPredictor:
    """What layer_arrays was given. Raises ValueError for what no such layer has."""
    if not 0 < rank <= spec.hidden_size:
        raise ValueError(f"its rank is {rank}")
    inner = _matrix(arrays, "inner", rank, spec.hidden_size)
    outer = _matrix(arrays, "outer", spec.ffn_size, rank)
    return LayerPredictor(inner, outer, _checked(arrays, "bias", np.float32, (spec.ffn_size,)))


def _matrix(arrays: Mapping[str, NDArray[Any] | None], name: str, n_rows: int, n_columns: int) -> TileWeight:
    grid = tile_grid(n_rows, n_columns)
    tiles = _checked(arrays, f"{name}.tiles", np.uint8, (*grid, INT4_TILE_BYTES))
    scales = _checked(arrays, f"{name}.scales", np.float16, (*grid, TILE_ROWS))
    exponent, *codebook = _checked(arrays, f"{name}.codebook", np.int64, (17,)).tolist()
    is_codebook = codebook == sorted(set(codebook)) and max(map(abs, codebook)) <= FITTED_LIMIT
    if not is_codebook or not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise ValueError(f"its {name}.codebook is none")
    return TileWeight(tiles, scales, exponent, tuple(codebook), n_rows, n_columns)


def _checked(arrays: Mapping[str, NDArray[Any] | None], name: str, kind: type, shape: tuple[int, ...]) -> Tensor:
    found = arrays.get(name)
    if found is None or found.dtype != kind or found.shape != shape:
        raise ValueError(f"its {name} is missing, or has another type or shape")
    if not np.isfinite(found).all():
        raise ValueError(f"its {name} has a value that is not finite")
    return torch.from_numpy(found)


def _most_bytes(spec: ModelSpec) -> int:
    """Of a file with the largest rank."""
    shapes = (spec.hidden_size, spec.hidden_size), (spec.ffn_size, spec.hidden_size)
    n_bytes = sum(sum(region_bytes("int4", *shape)) for shape in shapes) + FLOAT_BYTES * spec.ffn_size
    return RECORD_BYTES + spec.n_layers * (n_bytes + LAYER_HEADER_BYTES)
