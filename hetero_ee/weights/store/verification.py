"""Verifies a store: reads every byte and reports each difference from what was written."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hetero_ee.config import Progress
from hetero_ee.errors import HeteroError, StoreError, shown
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.model_files import SMALL_FILES
from hetero_ee.hub.regular_file import reason_of
from hetero_ee.weights.store.checksums import first_set_byte, sha256_of
from hetero_ee.weights.store.manifest import WEIGHTS_FILE, Entry, Manifest, Region, check_size, parsed_manifest
from hetero_ee.weights.store.names import MANIFEST_FILE
from hetero_ee.weights.store.reader import copy_problem, mapped_weights
from hetero_ee_profiles.opened_file import open_regular

VERIFYING = "Verifying"
FP16_EXPONENT = np.uint16(0x7C00)  # all of these bits set: Inf or NaN


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect of one of the store's files."""

    file: str
    part: str | None  # the tensor and its region, if only these are affected
    offset: int | None  # position of the damaged part or byte in the file
    what: str

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.file}{at}: {f'{self.part} ' if self.part else ''}{self.what}"


def verify(folder: Path, progress: Progress | None = None) -> tuple[Finding, ...]:
    """Return every defect of the store, none if it is intact. Uses bounded memory and writes nothing."""
    try:
        return _findings(folder, progress)
    except OSError as error:
        file = Path(error.filename or folder).name
        return (Finding(file, None, None, f"can't be read ({reason_of(error)})"),)


def _findings(folder: Path, progress: Progress | None) -> tuple[Finding, ...]:
    if not folder.is_dir():
        return (Finding(folder.name, None, None, "is not a folder"),)
    try:
        manifest = parsed_manifest(folder)
    except HeteroError as error:
        return (Finding(MANIFEST_FILE, None, None, f"is not usable: {error}"),)
    findings = [*_surplus(folder), *_copies(folder, manifest), *_weights(folder, manifest, progress)]
    if not findings:
        try:
            check_size(folder, manifest)
            mapped_weights(folder, manifest, read_spec(folder))
        except HeteroError as error:
            findings.append(Finding(MANIFEST_FILE, None, None, f"describes weights that can't be opened: {error}"))
    return tuple(findings)


def _surplus(folder: Path) -> Iterator[Finding]:
    for name in sorted(file.name for file in folder.iterdir()):
        if name not in (MANIFEST_FILE, WEIGHTS_FILE, *SMALL_FILES):
            yield Finding(shown(name), None, None, "does not belong to a store")


def _copies(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    known = {file.name: file for file in manifest.files}
    for name in SMALL_FILES:
        try:
            problem = copy_problem(folder / name, known.get(name))
        except StoreError as error:
            problem = f"can't be read ({error})"
        if problem:
            yield Finding(name, None, None, problem)


def _weights(folder: Path, manifest: Manifest, progress: Progress | None) -> Iterator[Finding]:
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        yield Finding(WEIGHTS_FILE, None, None, "is missing")
        return
    size = file.stat().st_size
    if size != manifest.weights_bytes:
        what = f"has {size} bytes, its manifest says {manifest.weights_bytes}"
        yield Finding(WEIGHTS_FILE, None, min(size, manifest.weights_bytes), what)
    with open_regular(file, buffering=0) as opened:
        end = 0
        for entry in manifest.entries:
            for region in entry.regions:
                yield from _region(opened, end, entry, region)
                end = region.end
            if progress:
                progress(VERIFYING, end, manifest.weights_bytes)


def _region(file: BinaryIO, end: int, entry: Entry, region: Region) -> Iterator[Finding]:
    """Check the padding between `end`, where the previous region ends, and the region, then the region itself."""
    part = f"{shown(entry.name)} {region.part}"
    n_infinite = 0

    def count_infinite(piece: memoryview) -> None:
        nonlocal n_infinite
        bits = np.frombuffer(piece[: len(piece) // 2 * 2], np.uint16)
        n_infinite += int(((bits & FP16_EXPONENT) == FP16_EXPONENT).sum())

    try:
        set_byte = first_set_byte(file, end, region.offset)
        checksum = sha256_of(file, region.offset, region.n_bytes, count_infinite if region.part == "scales" else None)
    except OSError as error:
        yield Finding(WEIGHTS_FILE, part, region.offset, f"can't be read ({error})")
        return
    if set_byte is not None:
        yield Finding(WEIGHTS_FILE, part, set_byte, "has a byte before it that is not 0")
    if checksum != region.sha256:
        yield Finding(WEIGHTS_FILE, part, region.offset, "does not match its checksum")
    elif n_infinite:
        yield Finding(WEIGHTS_FILE, part, region.offset, f"holds {n_infinite} numbers that are not finite")
