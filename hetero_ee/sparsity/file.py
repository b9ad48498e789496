"""Sparsity curves on disk: one file beside the store whose neurons they are of.

32 bytes of SHA-256, then the safetensors file that they are the checksum of: "record", JSON; "thresholds" and "errors",
fp32. Nothing that is read is trusted.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_ee.calibration.tensor_files import Arrays, checksummed, parsed_checksummed, read_whole
from hetero_ee.errors import StoreError
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.sparsity.curves import Measurement, SparsityCurves
from hetero_ee.weights.store.filesystem import FileSystem, replace_file, store_errors
from hetero_ee_profiles.records import from_json, to_json

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
        if version != FORMAT_VERSION:
            raise ValueError(f"it has format version {version!r}, this engine reads {FORMAT_VERSION}")


def write_sparsity(curves: SparsityCurves, key: str, text: str, file: Path, files: FileSystem | None = None) -> None:
    """Whole or not at all, replacing what was there. Raises StoreError, DiskFullError."""
    record = to_json(SparsityRecord(FORMAT_VERSION, key, text, curves.measured))
    arrays: Arrays = {
        "record": np.frombuffer(record.encode(), np.uint8),
        "thresholds": curves.thresholds,
        "errors": curves.errors,
    }
    with store_errors(file):
        replace_file(file, checksummed(arrays), files or FileSystem())


def read_sparsity(file: Path, spec: ModelSpec, key: str) -> SparsityCurves | None:
    """What `file` holds, None where it is not there. Raises StoreError, in one sentence with the way out, where it is
    damaged, of another version or of other weights."""
    found = find_file(file.parent, file.name, StoreError)
    if found is None:
        return None
    try:
        arrays = parsed_checksummed(read_whole(found, MAX_BYTES, "a calibration of sparsity"))
        if set(arrays) != {"record", "thresholds", "errors"}:
            raise ValueError("arrays are missing, or there are others")
        if arrays["record"].dtype != np.uint8:
            raise ValueError("its record is of another type")
        record = from_json(SparsityRecord, arrays["record"].tobytes().decode())
        curves = SparsityCurves(arrays["thresholds"], arrays["errors"], record.measured)
    except ValueError as error:
        raise StoreError(f"the calibration of sparsity {file} is damaged ({error}); {WAY_OUT} again.") from error
    if record.key != key or len(curves.thresholds) != spec.n_layers:
        raise StoreError(
            f"the calibration of sparsity {file} is of another model or of other weights than these; {WAY_OUT} for "
            "this model."
        )
    return curves
