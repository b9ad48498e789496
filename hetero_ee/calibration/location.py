"""Where the calibration of an opened store is looked for: beside the store, then in the checkpoint it was made from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetero_ee.calibration.file import read_calibration
from hetero_ee.calibration.key import checkpoint_key, store_key
from hetero_ee.errors import StoreError
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.calibration_files import JSON_FILE, calibration_folder
from hetero_ee.weights.store.manifest import read_manifest

SHIPPED_FOLDER = "calibration"  # in a checkpoint's folder


@dataclass(frozen=True, slots=True)
class CalibrationPlace:
    """checkpoint, quantization: what the store was made from, and how; None where a store was opened as it is."""

    spec: ModelSpec
    store: Path
    checkpoint: Path | None = None
    quantization: Quantization | None = None

    @property
    def folder(self) -> Path:
        """Where the calibration of this store is written."""
        return calibration_folder(self.store)

    @property
    def key(self) -> str:
        """Of this store. Raises StoreError."""
        return store_key(read_manifest(self.store))

    def find(self) -> Calibration | None:
        """The store's own calibration, else the one its checkpoint ships with, else None.

        Raises StoreError for one that is damaged, or of other weights.
        """
        if find_file(self.folder, JSON_FILE, StoreError):
            return read_calibration(self.folder, self.spec, self.key)
        if self.checkpoint is None or self.quantization is None:
            return None
        shipped = self.checkpoint / SHIPPED_FOLDER
        if not find_file(shipped, JSON_FILE, StoreError):
            return None
        return read_calibration(shipped, self.spec, checkpoint_key(self.checkpoint, self.quantization))

    def find_or_warn(self, warn: Callable[[str], None]) -> Calibration | None:
        """The same; one that can't be used is left out with a warning."""
        try:
            return self.find()
        except StoreError as error:
            warn(str(error))
            return None
