"""Checks the cache folder: its disk, compiled kernels and converted models."""

import os
from collections.abc import Iterator
from pathlib import Path

from hetero_ee.runtime.kernel_cache import KernelCache, kernel_cache_folder
from hetero_ee.weights.store.names import MANIFEST_FILE, PARTIAL_SUFFIX, REMOVED_SUFFIX, STORES_FOLDER
from hetero_ee_cli.checks.finding import Finding, fail, gib, ok, warn
from hetero_ee_profiles.host.disk import disk_info, try_disk
from hetero_ee_profiles.host.host import Host

LOW_DISK_BYTES = 2**31
CHOOSE_ANOTHER = "Set HETERO_EE_CACHE_DIR to a folder on another disk."


def cache_disk(host: Host, cache: Path) -> Finding:
    """Check the disk of the cache folder by writing, mapping and locking a file there."""
    try:
        disk = disk_info(host, cache)
        try_disk(cache)
    except OSError as error:
        return fail(f"{cache} can't be used ({error.strerror or error})", CHOOSE_ANOTHER)
    text = f"{cache}: {gib(disk.free_bytes)} of {gib(disk.total_bytes)} free, {disk.kind or 'unknown file system'}"
    if disk.is_memory:
        return warn(f"{text}, which is in RAM", f"Models would take up RAM twice. {CHOOSE_ANOTHER}")
    if disk.free_bytes < LOW_DISK_BYTES:
        return warn(text, f"A model with 7 billion weights needs 4 GiB. {CHOOSE_ANOTHER}")
    if disk.is_network:
        return warn(f"{text}, a network disk", f"Weights are read from there again and again. {CHOOSE_ANOTHER}")
    return ok(f"{text}; locks and mmap work")


def kernel_cache(cache: Path) -> Finding:
    folder = kernel_cache_folder(cache)
    if KernelCache(folder).is_filled():
        return ok("filled")
    return ok("not complete; the first run takes some seconds longer, to compile the missing kernels")


def stores(cache: Path) -> Finding:
    """Count the stores in the cache folder without opening them."""
    folders = [entry for entry in _entries(cache / STORES_FOLDER) if entry.is_dir(follow_symlinks=False)]
    folders = [folder for folder in folders if not folder.name.endswith(REMOVED_SUFFIX)]
    n_bytes = sum(entry.stat().st_size for folder in folders for entry in _entries(Path(folder.path)))
    whole = (folder for folder in folders if not folder.name.endswith(PARTIAL_SUFFIX))
    n_whole = sum(Path(folder.path, MANIFEST_FILE).is_file() for folder in whole)
    unfinished = f", {len(folders) - n_whole} unfinished" if len(folders) > n_whole else ""
    return ok(f"{n_whole} converted {'model' if n_whole == 1 else 'models'}{unfinished}, {gib(n_bytes)}")


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return
