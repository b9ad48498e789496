"""Sparsity curves on disk: a record next to the store, with the arrays "thresholds" and "errors", fp32."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.curves import Measurement, SparsityCurves
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.record import RecordArrays, RecordKind

MAX_BYTES = 2**20
WAY_OUT = "run hetero-ee calibrate --sparsity auto"


@dataclass(frozen=True, slots=True)
class SparsityHeader:
    """Sparsity curves without their arrays. text: what was calibrated on, for people."""

    text: str
    measured: tuple[Measurement, ...]


SPARSITY = RecordKind(SparsityHeader, "calibration of sparsity", 1, WAY_OUT)


def write_sparsity(curves: SparsityCurves, key: str, text: str, file: Path, files: FileSystem | None = None) -> None:
    """Write the curves of the weights `key`, completely or not at all. Raises: StoreError, DiskFullError."""
    arrays = {"thresholds": curves.thresholds, "errors": curves.errors}
    SPARSITY.write(file, key, SparsityHeader(text, curves.measured), arrays, files)


def read_sparsity(file: Path, spec: ModelSpec, key: str) -> SparsityCurves | None:
    """Return the curves in `file`, None if it does not exist. Raises: StoreError: see RecordKind.read."""

    def make(header: SparsityHeader, arrays: RecordArrays) -> SparsityCurves | None:
        thresholds, errors = (arrays.take(name, np.float32) for name in ("thresholds", "errors"))
        curves = SparsityCurves(thresholds, errors, header.measured)
        return curves if len(thresholds) == spec.n_layers else None

    return SPARSITY.read(file, key, MAX_BYTES, make)
