"""Name the files of calibrations and records next to a store, and remove them with it. Never reads them."""

import os
from pathlib import Path

from hetero_ee.errors import StoreError
from hetero_ee.hub.regular_file import find_file
from hetero_ee.weights.store.filesystem import (
    UNFINISHED_SUFFIX,
    FileSystem,
    holds_only,
    remove_if_there,
    store_errors,
    store_lock,
)

FOLDER_SUFFIX, REPLACED_SUFFIX = ".calibration", ".old"
PARTIAL_SUFFIX = ".partial"  # of the file of an interrupted calibration
CERTIFICATE_PARTIAL_SUFFIX = ".certificate" + PARTIAL_SUFFIX
SPARSITY_SUFFIX = ".sparsity"  # of the file with what is known of the store's neurons
PREDICTOR_SUFFIX = ".predictor"  # of the file with what says which of them may be active
ORDER_SUFFIX = ".order"  # of the file with how often they are active
RECORD_FILE, CERTIFICATE_FILE = "calibration.bin", "certificate.bin"
TWO_FILES = "calibration.json", "calibration.safetensors"  # of a calibration that an earlier version has written


def calibration_folder(store: Path) -> Path:
    """Return the path of the store's calibration, whether or not it exists."""
    return store.with_name(store.name + FOLDER_SUFFIX)


def neuron_file(store: Path, suffix: str) -> Path:
    """Return the path of one of the store's records of neurons, whether or not it exists."""
    return store.with_name(store.name + FOLDER_SUFFIX + suffix)


def calibration_file(folder: Path) -> Path | None:
    """Return the calibration's file in `folder`, None if there isn't one. Raises: StoreError: if it isn't readable."""
    found = (find_file(folder, name, StoreError) for name in (RECORD_FILE, TWO_FILES[0]))
    return next((file for file in found if file is not None), None)


def has_calibration(store: Path) -> bool:
    """Return whether a calibration exists next to the store, readable or not."""
    try:
        return calibration_file(calibration_folder(store)) is not None
    except StoreError:  # it can't be looked into
        return False


def is_calibrations(path: Path) -> bool:
    """Return whether the folder's name is that of a calibration, not of a store."""
    return path.name.endswith(tuple(FOLDER_SUFFIX + end for end in ("", UNFINISHED_SUFFIX, REPLACED_SUFFIX)))


def remove_calibration(store: Path, files: FileSystem) -> None:
    """Remove every record of the store, and what interrupted calibrations have left.

    The lock file stays, as a store's does, because another process may wait for it. Raises: StoreError: nothing is
    removed, because a folder holds other files or a calibration is being written.
    """
    folder = calibration_folder(store)
    folders = [folder.with_name(folder.name + end) for end in ("", UNFINISHED_SUFFIX, REPLACED_SUFFIX)]
    of_neurons = [end + more for end in (SPARSITY_SUFFIX, PREDICTOR_SUFFIX) for more in ("", PARTIAL_SUFFIX)]
    names = [folder.name + end for end in (PARTIAL_SUFFIX, CERTIFICATE_PARTIAL_SUFFIX, ORDER_SUFFIX, *of_neurons)]
    singles = [folder.with_name(name + end) for name in names for end in ("", UNFINISHED_SUFFIX)]
    records = [name + end for name in (RECORD_FILE, CERTIFICATE_FILE) for end in ("", UNFINISHED_SUFFIX)]
    if not any(map(os.path.lexists, [*folders, *singles])):
        return

    def refuse() -> None:
        raise StoreError(f"{store.name} is being calibrated by another process; end that first.")

    with store_lock(folder, files, refuse), store_errors(folder):
        folders, singles = (list(filter(os.path.lexists, found)) for found in (folders, singles))
        for found in folders:
            if not holds_only(found, (*TWO_FILES, *records)):
                raise StoreError(f"{found} holds more than a calibration; remove it by hand.")
        for found in singles:
            files.remove_file(found)
        for found in folders:
            for name in (
                RECORD_FILE,
                TWO_FILES[0],
            ):  # removed first: without them there is no calibration
                remove_if_there(found / name, files)
            files.remove_tree(found)
