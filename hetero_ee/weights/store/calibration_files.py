"""What calibrating leaves beside a store, by name, and how that goes with the store: nothing here looks into it."""

import os
from pathlib import Path

from hetero_ee.errors import StoreError
from hetero_ee.weights.store.filesystem import UNFINISHED_SUFFIX, FileSystem, holds_only, store_errors, store_lock

FOLDER_SUFFIX, REPLACED_SUFFIX = ".calibration", ".old"
PARTIAL_SUFFIX = ".partial"  # of the file of a calibration that was broken off
CERTIFICATE_PARTIAL_SUFFIX = ".certificate" + PARTIAL_SUFFIX
SPARSITY_SUFFIX = ".sparsity"  # of the file with what is known of the store's neurons
PREDICTOR_SUFFIX = ".predictor"  # of the file with what says which of them may be active
ORDER_SUFFIX = ".order"  # of the file with how often they are active
JSON_FILE, TENSORS_FILE, CERTIFICATE_FILE = "calibration.json", "calibration.safetensors", "certificate.bin"


def calibration_folder(store: Path) -> Path:
    """Where the calibration of the store in `store` lies, or would lie."""
    return store.with_name(store.name + FOLDER_SUFFIX)


def sparsity_file(store: Path) -> Path:
    """Where the sparsity curves of the store in `store` lie, or would lie."""
    return store.with_name(store.name + FOLDER_SUFFIX + SPARSITY_SUFFIX)


def predictor_file(store: Path) -> Path:
    """Where the predictor of the active neurons of the store in `store` lies, or would lie."""
    return store.with_name(store.name + FOLDER_SUFFIX + PREDICTOR_SUFFIX)


def order_file(store: Path) -> Path:
    """Where the order of the neurons of the store in `store` lies, or would lie."""
    return store.with_name(store.name + FOLDER_SUFFIX + ORDER_SUFFIX)


def has_calibration(store: Path) -> bool:
    """Whether a calibration lies beside the store, whatever is in it."""
    try:
        return (calibration_folder(store) / JSON_FILE).is_file()
    except OSError:  # nobody may look into it
        return False


def is_calibrations(path: Path) -> bool:
    """Whether a folder's name is that of a calibration, and not of a store."""
    return path.name.endswith(tuple(FOLDER_SUFFIX + end for end in ("", UNFINISHED_SUFFIX, REPLACED_SUFFIX)))


def remove_calibration(store: Path, files: FileSystem) -> None:
    """Removes the store's calibration with its certificate, and what was left of broken off ones, if anything is there.

    Its lock file stays, as a store's does: another process may wait at it.
    Raises StoreError, and removes nothing, where a folder holds more than that or one is being written.
    """
    folder = calibration_folder(store)
    folders = [folder.with_name(folder.name + end) for end in ("", UNFINISHED_SUFFIX, REPLACED_SUFFIX)]
    of_neurons = [end + more for end in (SPARSITY_SUFFIX, PREDICTOR_SUFFIX) for more in ("", PARTIAL_SUFFIX)]
    names = [folder.name + end for end in (PARTIAL_SUFFIX, CERTIFICATE_PARTIAL_SUFFIX, ORDER_SUFFIX, *of_neurons)]
    singles = [folder.with_name(name + end) for name in names for end in ("", UNFINISHED_SUFFIX)]
    certificates = CERTIFICATE_FILE, CERTIFICATE_FILE + UNFINISHED_SUFFIX
    if not any(map(os.path.lexists, [*folders, *singles])):
        return

    def refuse() -> None:
        raise StoreError(f"{store.name} is being calibrated by another process; end that first.")

    with store_lock(folder, files, refuse), store_errors(folder):
        folders, singles = (list(filter(os.path.lexists, found)) for found in (folders, singles))
        for found in folders:
            if not holds_only(found, (JSON_FILE, TENSORS_FILE, *certificates)):
                raise StoreError(f"{found} holds more than a calibration; remove it by hand.")
        for found in singles:
            files.remove_file(found)
        for found in folders:
            if (found / JSON_FILE).exists():  # first: without it there is no calibration, however far this gets
                files.remove_file(found / JSON_FILE)
            files.remove_tree(found)
