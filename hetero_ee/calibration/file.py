"""A calibration on disk: a folder with calibration.json and calibration.safetensors, beside the store it belongs to.

The folder appears whole or not at all. The JSON has every metric and the checksum of the tensors' file. Nothing that is
read is trusted: versions, key, fields, ranges, checksum, names, types and shapes are checked first.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hetero_ee.calibration.activations import activation_names
from hetero_ee.calibration.tensor_files import Arrays, parsed_safetensors, read_whole, safetensors_bytes
from hetero_ee.errors import StoreError, shown
from hetero_ee.hub.json_text import parse_json
from hetero_ee.hub.regular_file import find_file, read_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.exits.calibration import (
    NO_EXIT,
    Calibration,
    CalibrationText,
    DepthMetrics,
    ExitLayerCalibration,
    ExitLayerMetrics,
)
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.features import N_FEATURES
from hetero_ee.speculation.exits.predictor import ExitPredictor
from hetero_ee.weights.store.calibration_files import JSON_FILE, REPLACED_SUFFIX, TENSORS_FILE
from hetero_ee.weights.store.filesystem import UNFINISHED_SUFFIX, FileSystem, make_folders, store_errors, write_whole
from hetero_ee_profiles.records import from_json, to_json

FORMAT_NAME = "hetero_ee calibration"
FORMAT_VERSION = 3
MAX_JSON_BYTES, MAX_JSON_VALUES = 4 * 2**20, 10**6
HEADER_BYTES = 256  # most that a tensor's name, type, shape and place take, names being as short as ours
MAX_HIDDEN = 4096  # units of a predictor
TYPES: dict[str, Any] = {"F16": np.float16, "F32": np.float32}
WAY_OUT = "run hetero-ee calibrate"


@dataclass(frozen=True, slots=True)
class ExitLayerRecord:
    """ExitLayerCalibration without its tensors."""

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
class CalibrationRecord:
    """What calibration.json holds."""

    format: str
    version: int
    key: str
    n_layers: int
    hidden_size: int
    text: CalibrationText
    exit_layers: tuple[ExitLayerRecord, ...]
    schedule: tuple[int, ...]
    depths: DepthMetrics
    tensors_sha256: str
    specee_depths: tuple[int, ...] = ()

    ADDED_FIELDS: ClassVar = ("specee_depths",)  # that a file of this version may lack

    def __post_init__(self) -> None:
        n_exit_layers = len(self.exit_layers)  # compared first: n_layers may be any number
        if n_exit_layers != self.n_layers - 1 or any(
            each.exit_layer != expected for expected, each in enumerate(self.exit_layers, 1)
        ):
            raise ValueError(f"exit layers have to be 1 to {self.n_layers - 1}")
        if len(self.depths.histogram) != self.n_layers:
            raise ValueError(f"depths.histogram has {len(self.depths.histogram)} counts for {self.n_layers} layers")
        if self.specee_depths and (
            len(self.specee_depths) != self.n_layers or min(self.specee_depths) < 0 or not sum(self.specee_depths)
        ):
            raise ValueError(f"specee_depths has to be {self.n_layers} counts, some above 0, or none")
        if self.specee_depths and not self.schedule:
            raise ValueError("specee_depths are of a schedule, and there is none")
        if list(self.schedule) != sorted(set(self.schedule)):
            raise ValueError("the exit layers of a schedule have to ascend")
        for exit_layer in self.schedule:
            if not 1 <= exit_layer < self.n_layers:
                raise ValueError(f"the schedule names exit layer {exit_layer} of {self.n_layers} layers")
        for exit_layer in self.schedule[1:]:
            if self.exit_layers[exit_layer - 1].partial_threshold is None:
                raise ValueError(f"the schedule names exit layer {exit_layer}, which has no partial predictor")


def write_calibration(calibration: Calibration, key: str, folder: Path, files: FileSystem | None = None) -> None:
    """Writes `folder` whole or not at all, replacing what was there. Raises StoreError, DiskFullError."""
    files = files or FileSystem()
    data = safetensors_bytes(_tensors_of(calibration))
    record = _record_of(calibration, key, hashlib.sha256(data).hexdigest())
    unfinished, replaced = (folder.with_name(folder.name + end) for end in (UNFINISHED_SUFFIX, REPLACED_SUFFIX))
    with store_errors(folder):
        make_folders(folder.parent, files)
        for left in (unfinished, replaced):
            if left.is_dir():
                files.remove_tree(left)
        files.create_folder(unfinished)
        try:
            for name, content in ((TENSORS_FILE, data), (JSON_FILE, to_json(record).encode())):
                write_whole(unfinished / name, content, files)
            files.sync_folder(unfinished)
            if folder.is_dir():
                files.rename(folder, replaced)
            files.rename(unfinished, folder)
        except BaseException:
            _take_back(folder, unfinished, replaced, files)
            raise
        files.sync_folder(folder.parent)
        if replaced.is_dir():
            files.remove_tree(replaced)


def read_calibration(folder: Path, spec: ModelSpec, key: str) -> Calibration | None:
    """The calibration in `folder`, None where there is none.

    Raises StoreError, in one sentence that says what to do, for one that is damaged, of another version or model.
    """
    try:
        file = find_file(folder, JSON_FILE, StoreError)
        if file is None:
            return None
        record = _parsed(read_file(file, MAX_JSON_BYTES, "a calibration", StoreError), file)
        _check_belongs(record, file, spec, key)
        tensors = _read_tensors(folder, record, _most_bytes(record, spec))
        return _calibration(record, spec, tensors)
    except ValueError as error:
        raise StoreError(f"the calibration in {folder} is damaged ({error}); {WAY_OUT} again.") from error


def _take_back(folder: Path, unfinished: Path, replaced: Path, files: FileSystem) -> None:
    """After a failure the former calibration is where it was; where the disk refuses this the first error stays."""
    try:
        if replaced.is_dir() and not folder.exists():
            files.rename(replaced, folder)
        if unfinished.is_dir():
            files.remove_tree(unfinished)
    except OSError:
        pass


def _record_of(calibration: Calibration, key: str, tensors_sha256: str) -> CalibrationRecord:
    exit_layers = (
        ExitLayerRecord(
            each.exit_layer,
            each.exit_map.rank if each.exit_map else None,
            each.threshold,
            each.partial_threshold if each.partial_predictor else None,
            each.metrics,
        )
        for each in calibration.exit_layers
    )
    return CalibrationRecord(
        format=FORMAT_NAME,
        version=FORMAT_VERSION,
        key=key,
        n_layers=calibration.n_layers,
        hidden_size=calibration.hidden_size,
        text=calibration.text,
        exit_layers=tuple(exit_layers),
        schedule=calibration.schedule,
        depths=calibration.depths,
        tensors_sha256=tensors_sha256,
        specee_depths=calibration.specee_depths,
    )


def _tensors_of(calibration: Calibration) -> Arrays:
    arrays: Arrays = {}
    for each in calibration.exit_layers:
        prefix = f"exit_layers.{each.exit_layer}"
        if each.exit_map is not None:
            for name in ("up", "bias", "down"):
                if (part := getattr(each.exit_map, name)) is not None:
                    arrays[f"{prefix}.map.{name}"] = part.numpy().astype(np.float16)
        for kind, predictor in _networks(each):
            if predictor is not None:
                for name in ("first", "first_bias", "second", "second_bias"):
                    arrays[f"{prefix}.{kind}.{name}"] = getattr(predictor, name)
    return arrays | {f"activations.{name}": array for name, array in calibration.activations.items()}


def _networks(fitted: ExitLayerCalibration) -> Iterator[tuple[str, ExitPredictor | None]]:
    yield "predictor", fitted.predictor
    yield "partial_predictor", fitted.partial_predictor
    yield "gate", fitted.gate


def _parsed(data: bytes, file: Path) -> CalibrationRecord:
    """Format and version come first: of another version nothing else can be said. Raises StoreError, ValueError."""
    body = parse_json(data, MAX_JSON_VALUES)
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise ValueError(f"{JSON_FILE} is no calibration")
    if type(body.get("version")) is not int or body["version"] != FORMAT_VERSION:
        raise StoreError(
            f"{file} has calibration format version {shown(body.get('version'))}, this engine reads version "
            f"{FORMAT_VERSION}; {WAY_OUT} again."
        )
    return from_json(CalibrationRecord, data.decode())


def _check_belongs(record: CalibrationRecord, file: Path, spec: ModelSpec, key: str) -> None:
    shapes = (record.n_layers, record.hidden_size)
    if record.key != key or shapes != (spec.n_layers, spec.hidden_size):
        raise StoreError(
            f"the calibration {file} is of another model or of other weights than these; {WAY_OUT} for this model."
        )


def _most_bytes(record: CalibrationRecord, spec: ModelSpec) -> int:
    """Of the tensors' file, by what the record says: nothing larger is read into memory."""
    predictor_bytes = 4 * (MAX_HIDDEN * (N_FEATURES + 2) + 1)
    n_bytes = 4 * sum(activation_names(spec).values())
    for each in record.exit_layers:
        rank = min(each.map_rank or 0, spec.hidden_size)
        map_bytes = 2 * spec.hidden_size * (2 * rank + 1) if rank else 0
        n_bytes += map_bytes + predictor_bytes * (2 if each.partial_threshold is None else 3)  # with a gate
    n_tensors = 15 * len(record.exit_layers) + len(activation_names(spec))  # a map has 3, a predictor or gate 4
    return n_bytes + HEADER_BYTES * (n_tensors + 1)


def _read_tensors(folder: Path, record: CalibrationRecord, max_bytes: int) -> Arrays:
    file = find_file(folder, TENSORS_FILE, StoreError)
    if file is None:
        raise ValueError(f"{TENSORS_FILE} is missing")
    data = read_whole(file, max_bytes, "a calibration of this model")
    if hashlib.sha256(data).hexdigest() != record.tensors_sha256:
        raise ValueError(f"{TENSORS_FILE} does not match its checksum")
    return parsed_safetensors(data, TYPES)


def _calibration(record: CalibrationRecord, spec: ModelSpec, tensors: Arrays) -> Calibration:
    rest = dict(tensors)
    exit_layers = tuple(_exit_layer(each, spec.hidden_size, rest) for each in record.exit_layers)
    activations = {}
    for name, n_features in activation_names(spec).items():
        activations[name] = _taken(rest, f"activations.{name}", (n_features,), np.float32)
    for name in rest:
        raise ValueError(f"tensor {shown(name)} is unknown")
    return Calibration(
        record.n_layers,
        record.hidden_size,
        record.text,
        exit_layers,
        record.schedule,
        record.depths,
        activations,
        record.specee_depths,
    )


def _exit_layer(record: ExitLayerRecord, hidden_size: int, rest: Arrays) -> ExitLayerCalibration:
    prefix, partial_threshold = f"exit_layers.{record.exit_layer}", record.partial_threshold
    return ExitLayerCalibration(
        record.exit_layer,
        _exit_map(record, f"{prefix}.map", hidden_size, rest),
        _predictor(f"{prefix}.predictor", rest),
        record.threshold,
        None if partial_threshold is None else _predictor(f"{prefix}.partial_predictor", rest),
        NO_EXIT if partial_threshold is None else partial_threshold,
        _predictor(f"{prefix}.gate", rest) if f"{prefix}.gate.second" in rest else None,
        metrics=record.metrics,
    )


def _predictor(prefix: str, rest: Arrays) -> ExitPredictor:
    """Of the arrays whose names begin so, taken out of `rest`. Raises ValueError."""
    second = rest.get(f"{prefix}.second")
    n_hidden = 0 if second is None else second.size
    if not 1 <= n_hidden <= MAX_HIDDEN:
        raise ValueError(f"{prefix}.second is missing, or has {n_hidden} hidden units; expected 1 to {MAX_HIDDEN}")
    shapes = {"first": (n_hidden, N_FEATURES), "first_bias": (n_hidden,), "second": (n_hidden,), "second_bias": (1,)}
    return ExitPredictor(*(_taken(rest, f"{prefix}.{name}", shape, np.float32) for name, shape in shapes.items()))


def _exit_map(record: ExitLayerRecord, prefix: str, hidden_size: int, rest: Arrays) -> ExitMap | None:
    rank = record.map_rank
    if rank is None:
        return None
    if not 1 <= rank <= hidden_size:
        raise ValueError(f"map_rank of exit layer {record.exit_layer} is {rank}, expected 1 to {hidden_size}")
    shapes = {"up": (hidden_size, rank), "bias": (hidden_size,)}
    if rank < hidden_size:
        shapes["down"] = (rank, hidden_size)
    parts = {name: _taken(rest, f"{prefix}.{name}", shape, np.float16) for name, shape in shapes.items()}
    tensors = {name: torch.from_numpy(part.astype(np.float32)) for name, part in parts.items()}
    return ExitMap(tensors.get("down"), tensors["up"], tensors["bias"])


def _taken(rest: Arrays, name: str, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    """The array, taken out of `rest`, of this shape and type, and finite. Raises ValueError."""
    found = rest.pop(name, None)
    if found is None or found.shape != shape or found.dtype != kind or not np.isfinite(found).all():
        raise ValueError(f"tensor {shown(name)} is missing, not finite or not of shape {shape}")
    return found
