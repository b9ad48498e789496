"""Finds the calibration of a store: next to the store, or else in the checkpoint that the store was made from.

A calibration's key is a checksum of the weights and of everything that determines their meaning.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from hetero_ee.calibration.certificate_file import read_certificate
from hetero_ee.calibration.file import read_calibration
from hetero_ee.errors import CheckpointError, StoreError
from hetero_ee.hub.config_file import read_config_file
from hetero_ee.hub.regular_file import find_file, reason_of
from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import Certificate
from hetero_ee.weights.checkpoint import weight_files
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE, calibration_file, calibration_folder
from hetero_ee.weights.store.conversion import cached_store
from hetero_ee.weights.store.manifest import FORMAT_VERSION, Manifest, read_manifest
from hetero_ee.weights.store.reader import is_store
from hetero_ee_profiles.opened_file import open_regular

SHIPPED_FOLDER = "calibration"  # in a checkpoint's folder


@dataclass(frozen=True, slots=True)
class CalibrationPlace:
    """Folders where the calibration of an opened store can be."""

    spec: ModelSpec
    store: Path
    checkpoint: Path | None = None  # source of the store; None for a store opened directly
    quantization: Quantization | None = None  # by which it was made

    @classmethod
    def of_model(
        cls,
        spec: ModelSpec,
        folder: Path,
        cache: Path,
        quantizer: str | None = None,
        *,
        neuron_major: bool = False,
        first_in_rows: bool = False,
    ) -> Self:
        """Return the place for the store in `folder`, or for the store in `cache` of the checkpoint in `folder`.

        Raises: HeteroError: if the folder is neither.
        """
        if is_store(folder):
            return cls(spec, folder)
        laid_out = {"neuron_major": neuron_major, "first_in_rows": first_in_rows}
        quantization = Quantization.of_model(folder, quantizer, **laid_out)
        return cls(spec, cached_store(folder, quantization, cache), folder, quantization)

    @property
    def folder(self) -> Path:
        return calibration_folder(self.store)

    @property
    def key(self) -> str:
        """Key of the store. Raises: StoreError: if its manifest can't be read."""
        return store_key(read_manifest(self.store))

    def find(self) -> Calibration | None:
        """Return the calibration of the store, else of its checkpoint, else None.

        Raises: StoreError: if it is damaged, or belongs to other weights.
        """
        where = self.where()
        return None if where is None else read_calibration(where, self._spec_in(where), self._key_in(where))

    def certificate(self, calibration: Calibration) -> Certificate | None:
        """Return the certificate of the calibration that `find` returns, from the store or else from its checkpoint.

        Raises: StoreError: if it is damaged, or belongs to other weights or exits.
        """
        folders = dict.fromkeys(each for each in (self.folder, self.where()) if each is not None)
        where = next((each for each in folders if find_file(each, CERTIFICATE_FILE, StoreError)), None)
        return None if where is None else read_certificate(where, calibration, self._key_in(where))

    def _spec_in(self, folder: Path) -> ModelSpec:
        """Return the spec with the FFN layout of the folder's calibration, without a predictor of active neurons."""
        is_own = folder == self.folder or self.quantization is None
        like = read_manifest(self.store) if is_own else self.quantization
        assert like is not None
        neuron_major, first_in_rows = like.neuron_major, like.first_in_rows
        return replace(self.spec, neuron_major=neuron_major, first_in_rows=first_in_rows, predictor_rank=0)

    def _key_in(self, folder: Path) -> str:
        if folder == self.folder or self.checkpoint is None or self.quantization is None:
            return self.key
        return checkpoint_key(self.checkpoint, self.quantization)

    def where(self) -> Path | None:
        """Return the folder of the calibration that `find` returns, or None. Raises: StoreError."""
        shipped = [] if self.checkpoint is None or self.quantization is None else [self.checkpoint / SHIPPED_FOLDER]
        return next((each for each in (self.folder, *shipped) if calibration_file(each)), None)

    def find_or_warn(self, warn: Callable[[str], None]) -> Calibration | None:
        """Return the calibration that `find` returns. If it can't be used, warn and return None."""
        try:
            return self.find()
        except StoreError as error:
            warn(str(error))
            return None


def store_key(manifest: Manifest) -> str:
    """Return a store's key: a hash of its manifest without the source, so that equal weights have equal keys."""
    values = asdict(manifest)
    del values["source"]
    return _digest(["store", FORMAT_VERSION, values])


def checkpoint_key(folder: Path, quantization: Quantization) -> str:
    """Return the key of all stores that this quantization makes of the checkpoint in `folder`. Reads all weight files.

    Calibrations inside a checkpoint use this key, because processors without AVX2 round a few codes of a store
    differently.

    Raises: CheckpointError: if a weight file can't be read.
    """
    sums = {}
    for file in weight_files(folder):
        try:
            with open_regular(file) as opened:
                sums[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file} can't be read ({reason_of(error)}).") from error
    return _digest(["checkpoint", quantization.version, quantization.identity, read_config_file(folder), sums])


def _digest(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
