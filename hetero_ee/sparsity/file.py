"""Sparsity curves on disk: one recorded file beside the store whose neurons they are of, with the arrays "thresholds"
and "errors", fp32.
"""

from dataclasses import dataclass
from pathlib import Path

from hetero_ee.calibration.recorded_file import read_recorded, require_version, write_recorded
from hetero_ee.errors import StoreError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.curves import Measurement, SparsityCurves
from hetero_ee.weights.store.filesystem import FileSystem

FORMAT_VERSION = 1
MAX_BYTES = 2**20
WAY_OUT = "run hetero-ee calibrate --sparsity auto"


@dataclass(frozen=True, slots=True)
class SparsityRecord:
    """What the file holds beside its arrays. key: of the store; text: what was calibrated on, for people."""

    version: int
    key: str
    text: str
    measured: tuple[Measurement, ...]

    @staticmethod
    def check_version(version: object) -> None:
        require_version(version, FORMAT_VERSION)


def write_sparsity(curves: SparsityCurves, key: str, text: str, file: Path, files: FileSystem | None = None) -> None:
    """Whole or not at all, replacing what was there. Raises StoreError, DiskFullError."""
    record = SparsityRecord(FORMAT_VERSION, key, text, curves.measured)
    write_recorded(record, {"thresholds": curves.thresholds, "errors": curves.errors}, file, files)


def read_sparsity(file: Path, spec: ModelSpec, key: str) -> SparsityCurves | None:
    """What `file` holds, None where it is not there. Raises StoreError, in one sentence with the way out, where it is
    damaged, of another version or of other weights."""
    try:
        found = read_recorded(SparsityRecord, file, MAX_BYTES, "a calibration of sparsity")
        if found is None:
            return None
        record, arrays = found
        if set(arrays) != {"thresholds", "errors"}:
            raise ValueError("arrays are missing, or there are others")
        curves = SparsityCurves(arrays["thresholds"], arrays["errors"], record.measured)
    except ValueError as error:
        raise StoreError(f"the calibration of sparsity {file} is damaged ({error}); {WAY_OUT} again.") from error
    if record.key != key or len(curves.thresholds) != spec.n_layers:
        raise StoreError(
            f"the calibration of sparsity {file} is of another model or of other weights than these; {WAY_OUT} for "
            "this model."
        )
    return curves
