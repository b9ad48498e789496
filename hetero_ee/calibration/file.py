"""Reads and writes calibrations: the record calibration.bin in a folder next to the model's store.

All metrics are in the record's header. Earlier versions wrote the header and the arrays as two files, calibration.json
and calibration.safetensors, which can still be read.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from hetero_ee.calibration.routes import route_shapes
from hetero_ee.errors import shown
from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.exits.calibration import (
    NO_EXIT,
    Calibration,
    CalibrationText,
    DepthMetrics,
    DraftedExitLayer,
    DraftedExits,
    DraftedMetrics,
    ExitLayerCalibration,
    ExitLayerMetrics,
)
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.features import N_FEATURES
from hetero_ee.speculation.exits.predictor import ExitPredictor
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE, RECORD_FILE, TWO_FILES, calibration_file
from hetero_ee.weights.store.filesystem import FileSystem, remove_if_there, store_errors
from hetero_ee.weights.store.record import (
    Arrays,
    Body,
    RecordArrays,
    RecordKind,
    json_body,
    load_record,
    parsed_safetensors,
    read_if_there,
)

FORMAT_NAME = "hetero_ee calibration"  # format name in calibration.json
MAX_JSON_BYTES = 4 * 2**20
HEADER_BYTES = 256  # most that describe an array in the file's header, names being as short as ours
MAX_HIDDEN = 4096  # units of a predictor
ACTIVATIONS = "activations."  # prefix of arrays that earlier versions wrote and nothing read
ROUTES = "routes."  # prefix of the names of Calibration.routes


@dataclass(frozen=True, slots=True)
class ExitLayerRecord:
    """Record of an ExitLayerCalibration: all of it except the arrays."""

    exit_layer: int
    map_rank: int | None  # None without a map, hidden_size for a full matrix
    threshold: float
    partial_threshold: float | None  # None without a partial predictor
    metrics: ExitLayerMetrics

    def __post_init__(self) -> None:
        for threshold in (self.threshold, self.partial_threshold or 0.0):
            if not 0 <= threshold <= NO_EXIT:
                raise ValueError(f"threshold is {threshold}, expected 0 to {NO_EXIT}")


@dataclass(frozen=True, slots=True)
class DraftedRecord:
    """Record of DraftedExits: all of it except the arrays."""

    draft: str
    coverage: float
    thresholds: tuple[float, ...]
    metrics: tuple[DraftedMetrics, ...]
    schedule: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, drafted: DraftedExits) -> Self:
        layers = drafted.exit_layers
        thresholds, metrics = tuple(each.threshold for each in layers), tuple(each.metrics for each in layers)
        return cls(drafted.draft, drafted.coverage, thresholds, metrics, drafted.schedule, drafted.depths)

    def check(self, n_layers: int) -> None:
        """Raises: ValueError: if the record does not belong to a model with n_layers layers."""
        if not len(self.thresholds) == len(self.metrics) == n_layers - 1:
            raise ValueError(f"drafted has {len(self.thresholds)} thresholds for {n_layers} layers")
        if not all(0 <= each <= NO_EXIT for each in self.thresholds) or not 0 <= self.coverage <= 1:
            raise ValueError("drafted has a threshold or share that is out of range")
        _check_depths("drafted.depths", self.depths, n_layers)
        _check_schedule(self.schedule, n_layers)


@dataclass(frozen=True, slots=True)
class CalibrationHeader:
    """Header of a calibration: all of it except the arrays."""

    n_layers: int
    hidden_size: int
    text: CalibrationText
    exit_layers: tuple[ExitLayerRecord, ...]
    schedule: tuple[int, ...]
    depths: DepthMetrics
    specee_depths: tuple[int, ...] = ()
    drafted: DraftedRecord | None = None

    ADDED_FIELDS: ClassVar = ("specee_depths", "drafted")  # fields that files of this version may lack

    def __post_init__(self) -> None:
        n_exit_layers = len(self.exit_layers)  # compared first: n_layers may be any number
        if n_exit_layers != self.n_layers - 1 or any(
            each.exit_layer != expected for expected, each in enumerate(self.exit_layers, 1)
        ):
            raise ValueError(f"exit layers have to be 1 to {self.n_layers - 1}")
        if len(self.depths.histogram) != self.n_layers:
            raise ValueError(f"depths.histogram has {len(self.depths.histogram)} counts for {self.n_layers} layers")
        _check_depths("specee_depths", self.specee_depths, self.n_layers)
        if self.specee_depths and not self.schedule:
            raise ValueError("specee_depths need a schedule")
        _check_schedule(self.schedule, self.n_layers)
        if self.drafted is not None:
            self.drafted.check(self.n_layers)
        for exit_layer in self.schedule[1:]:
            if self.exit_layers[exit_layer - 1].partial_threshold is None:
                raise ValueError(f"the schedule names exit layer {exit_layer}, which has no partial predictor")


def _check_depths(name: str, depths: Sequence[int], n_layers: int) -> None:
    if depths and (len(depths) != n_layers or min(depths) < 0 or not sum(depths)):
        raise ValueError(f"{name} has to be {n_layers} counts, some above 0, or none")


def _check_schedule(schedule: Sequence[int], n_layers: int) -> None:
    if list(schedule) != sorted(set(schedule)):
        raise ValueError("the exit layers of a schedule have to ascend")
    for exit_layer in schedule:
        if not 1 <= exit_layer < n_layers:
            raise ValueError(f"the schedule names exit layer {exit_layer} of {n_layers} layers")


CALIBRATION = RecordKind(CalibrationHeader, "calibration", 3, "run hetero-ee calibrate")


def write_calibration(calibration: Calibration, key: str, folder: Path, files: FileSystem | None = None) -> None:
    """Write the calibration of weights with this key to `folder`, completely or not at all, replacing an existing one.

    The existing one's certificate is removed as well. Raises: StoreError, DiskFullError.
    """
    files = files or FileSystem()
    CALIBRATION.write(folder / RECORD_FILE, key, _header(calibration), _arrays(calibration), files)
    with store_errors(folder):
        for name in (CERTIFICATE_FILE, *TWO_FILES):
            remove_if_there(folder / name, files)


def read_calibration(folder: Path, spec: ModelSpec, key: str) -> Calibration | None:
    """Return the calibration in `folder`, or None if it has none. Raises: StoreError: see RecordKind.read."""

    def make(header: CalibrationHeader, arrays: RecordArrays) -> Calibration | None:
        if (header.n_layers, header.hidden_size) != (spec.n_layers, spec.hidden_size):
            return None
        exit_layers = tuple(_exit_layer(each, spec.hidden_size, arrays) for each in header.exit_layers)
        arrays.drop(ACTIVATIONS)
        same = {each.name: getattr(header, each.name) for each in fields(header)}
        own = {"exit_layers": exit_layers, "drafted": header.drafted and _drafted(header.drafted, arrays)}
        shapes = route_shapes(spec)
        if all(arrays.shape(ROUTES + name) is None for name in shapes):  # of an earlier version
            shapes = {}
        routes = {name: arrays.take(ROUTES + name, np.float32, shape) for name, shape in shapes.items()}
        return Calibration(**same | own, routes=routes)

    file = calibration_file(folder)
    if file is None:
        return None
    load = load_record if file.name == RECORD_FILE else _load_two_files
    return CALIBRATION.read(file, key, _most_bytes(spec), make, load)


def _load_two_files(file: Path, max_bytes: int, what: str) -> tuple[Body, Arrays] | None:
    """Read calibration.json and the safetensors file next to it. Raises: StoreError, ValueError."""
    data = read_if_there(file, MAX_JSON_BYTES, what)
    if data is None:
        return None
    body = json_body(data)
    if body.pop("format", None) != FORMAT_NAME:
        raise ValueError(f"{file.name} is not a calibration")
    checksum = body.pop("tensors_sha256", None)
    if body.get("version") != CALIBRATION.version:
        return body, {}  # the caller refuses its version
    data = read_if_there(file.with_name(TWO_FILES[1]), max_bytes, what)
    if data is None or hashlib.sha256(data).hexdigest() != checksum:
        raise ValueError(f"{TWO_FILES[1]} is missing or does not match its checksum")
    return body, parsed_safetensors(data)


def _header(calibration: Calibration) -> CalibrationHeader:
    exit_layers = tuple(
        ExitLayerRecord(
            each.exit_layer,
            each.exit_map.rank if each.exit_map else None,
            each.threshold,
            each.partial_threshold if each.partial_predictor else None,
            each.metrics,
        )
        for each in calibration.exit_layers
    )
    same = {each.name: getattr(calibration, each.name) for each in fields(CalibrationHeader)}
    drafted = None if calibration.drafted is None else DraftedRecord.of(calibration.drafted)
    return CalibrationHeader(**same | {"exit_layers": exit_layers, "drafted": drafted})


def _arrays(calibration: Calibration) -> Arrays:
    arrays: Arrays = {}
    for each in calibration.exit_layers:
        prefix = f"exit_layers.{each.exit_layer}"
        for name, part in ({} if each.exit_map is None else each.exit_map.parts).items():
            arrays[f"{prefix}.map.{name}"] = part.numpy().astype(np.float16)
        for kind in ("predictor", "partial_predictor"):
            predictor: ExitPredictor | None = getattr(each, kind)
            parts = {} if predictor is None else predictor.parts
            arrays |= {f"{prefix}.{kind}.{name}": part for name, part in parts.items()}
    for number, drafted in enumerate(calibration.drafted.exit_layers if calibration.drafted else (), 1):
        prefix = f"exit_layers.{number}.drafted_predictor"
        arrays |= {f"{prefix}.{name}": part for name, part in drafted.predictor.parts.items()}
    return arrays | {ROUTES + name: array for name, array in calibration.routes.items()}


def _most_bytes(spec: ModelSpec) -> int:
    """Return the size of the largest possible calibration of this model. Larger files are not read into memory."""
    map_bytes = 2 * spec.hidden_size * (2 * spec.hidden_size + 1)
    network_bytes = 4 * (MAX_HIDDEN * (N_FEATURES + 2) + 1)
    n_arrays = 32 * spec.n_layers  # a map has up to 3, each of 4 networks 4, and there may be some of earlier versions
    array_bytes = spec.n_layers * (map_bytes + 4 * network_bytes) + 4 * sum(map(prod, route_shapes(spec).values()))
    return array_bytes + HEADER_BYTES * (n_arrays + 1) + MAX_JSON_BYTES


def _exit_layer(header: ExitLayerRecord, hidden_size: int, arrays: RecordArrays) -> ExitLayerCalibration:
    prefix, partial_threshold = f"exit_layers.{header.exit_layer}", header.partial_threshold
    arrays.drop(f"{prefix}.gate.")  # of an earlier version
    return ExitLayerCalibration(
        header.exit_layer,
        _exit_map(header, f"{prefix}.map", hidden_size, arrays),
        _predictor(f"{prefix}.predictor", arrays),
        header.threshold,
        None if partial_threshold is None else _predictor(f"{prefix}.partial_predictor", arrays),
        NO_EXIT if partial_threshold is None else partial_threshold,
        metrics=header.metrics,
    )


def _drafted(header: DraftedRecord, arrays: RecordArrays) -> DraftedExits:
    rows = enumerate(zip(header.thresholds, header.metrics, strict=True), 1)
    layers = (DraftedExitLayer(_predictor(f"exit_layers.{n}.drafted_predictor", arrays), *own) for n, own in rows)
    return DraftedExits(header.draft, header.coverage, tuple(layers), header.schedule, header.depths)


def _predictor(prefix: str, arrays: RecordArrays) -> ExitPredictor:
    """Return the predictor whose array names begin with `prefix`. Raises: ValueError: if an array is missing."""
    shape = arrays.shape(f"{prefix}.second")
    if shape is None or len(shape) != 1 or not 1 <= shape[0] <= MAX_HIDDEN:
        raise ValueError(f"{prefix}.second has shape {shown(shape)}; expected 1 to {MAX_HIDDEN} hidden units")
    shapes = {"first": (*shape, N_FEATURES), "first_bias": shape, "second": shape, "second_bias": (1,)}
    return ExitPredictor(*(arrays.take(f"{prefix}.{name}", np.float32, each) for name, each in shapes.items()))


def _exit_map(header: ExitLayerRecord, prefix: str, hidden_size: int, arrays: RecordArrays) -> ExitMap | None:
    rank = header.map_rank
    if rank is None:
        return None
    if not 1 <= rank <= hidden_size:
        raise ValueError(f"map_rank of exit layer {header.exit_layer} is {rank}, expected 1 to {hidden_size}")
    shapes = {"up": (hidden_size, rank), "bias": (hidden_size,)}
    if rank < hidden_size:
        shapes["down"] = (rank, hidden_size)
    parts = {name: arrays.take(f"{prefix}.{name}", np.float16, shape) for name, shape in shapes.items()}
    return ExitMap.of_parts({name: torch.from_numpy(part.astype(np.float32)) for name, part in parts.items()})
