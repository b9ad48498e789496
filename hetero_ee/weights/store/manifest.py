"""Describes the position and checksum of every tensor in weights.bin. See docs/FORMAT.md."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetero_ee.errors import DamagedStoreError, StoreError, shown
from hetero_ee.hub.json_text import parse_json
from hetero_ee.hub.model_files import SMALL_FILES
from hetero_ee.hub.regular_file import find_file, read_file
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import MAX_EXPONENT, MIN_EXPONENT
from hetero_ee.weights.rows import LARGEST_ENTRY, row_sizes
from hetero_ee.weights.store.names import MANIFEST_FILE
from hetero_ee.weights.weight import LINEAR_CODEBOOK
from hetero_ee_profiles.records import STRICT, from_values

WEIGHTS_FILE = "weights.bin"
FORMAT_NAME = "hetero_ee store"
FORMAT_VERSION = 2
ZEROS_VERSION = 3  # version of stores with zero points, which older engines refuse; other stores keep their version
ALIGNMENT_BYTES = 4096  # a page, so that a mapping can be read and advised region by region
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_MANIFEST_VALUES = 2 * 10**6
ROWS = "int4 rows"
FIRST_ROWS_VERSION = 4  # of stores whose FFNs are entirely in rows, for the same reason
WIDE_VERSION = 5  # of stores with 5- or 6-bit tiles
VERSIONS = (FORMAT_VERSION, ZEROS_VERSION, FIRST_ROWS_VERSION, WIDE_VERSION)
LAYOUTS = (*layout.TILE_BYTES, ROWS, "fp32")
END = "\n}"
CHECKSUM_NAME = "sha256"
CHECKSUM_FIELD = f',\n "{CHECKSUM_NAME}": "'  # how the last field begins; it holds the checksum of everything before it


@dataclass(frozen=True, slots=True)
class Region:
    """A range of bytes in weights.bin with its checksum."""

    part: str  # "tiles", "scales" or "values"
    offset: int
    n_bytes: int
    sha256: str

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """Description of one tensor. Raises ValueError if its fields contradict each other."""

    name: str
    layout: str  # "fp32", row by row; all other LAYOUTS have tiles or codes, and fp16 scales at scales_offset
    shape: tuple[int, ...]
    offset: int
    scales_offset: int
    exponent: int
    codebook: tuple[int, ...] | None
    sha256: str  # of the tiles, codes or values
    scales_sha256: str  # empty for fp32

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"tensor {self.name!r:.80} has an impossible {problem}")

    @property
    def data_bytes(self) -> int:
        return region_sizes(self.layout, self.shape)[0]

    @property
    def scales_bytes(self) -> int:
        return sum(region_sizes(self.layout, self.shape)[1:])

    @property
    def regions(self) -> list[Region]:
        """The tensor's regions, in file order."""
        if self.layout == "fp32":
            return [Region("values", self.offset, self.data_bytes, self.sha256)]
        return [
            Region("tiles", self.offset, self.data_bytes, self.sha256),
            Region("scales", self.scales_offset, self.scales_bytes, self.scales_sha256),
        ]

    def _problem(self) -> str | None:
        """Return the name of a field that contradicts the others, None if none does."""
        if self.layout not in LAYOUTS:
            return "layout"
        is_fp32 = self.layout == "fp32"
        if len(self.shape) not in ((1, 2) if is_fp32 else (2,)) or min(self.shape) < 1:
            return "shape"
        if self.layout == ROWS and not _is_codebook(self.codebook, LARGEST_ENTRY):
            return "codebook"
        if not _is_codebook(self.codebook) if self.layout in ("int4", ROWS) else self.codebook != _implied(self.layout):
            return "codebook"
        if not MIN_EXPONENT <= self.exponent <= MAX_EXPONENT or (is_fp32 and self.exponent != 0):
            return "exponent"
        if is_fp32 and self.scales_offset != 0:
            return "scales_offset"
        if not _is_checksum(self.sha256):
            return "sha256"
        if not (self.scales_sha256 == "" if is_fp32 else _is_checksum(self.scales_sha256)):
            return "scales_sha256"
        return None


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """Description of a copied model file. Raises ValueError for an impossible name, size or checksum."""

    name: str
    n_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.name not in SMALL_FILES or self.n_bytes < 0 or not _is_checksum(self.sha256):
            raise ValueError(f"file {self.name!r:.80} has an impossible name, size or checksum")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of manifest.json. Raises ValueError if a name is repeated or regions leave gaps."""

    format: str = field(default=FORMAT_NAME, kw_only=True)
    version: int = field(default=FORMAT_VERSION, kw_only=True)  # the lowest that has all layouts of the entries
    quantizer: str
    vocabulary_quantizer: str
    source: dict  # type: ignore[type-arg]  # what the store was made from, for people
    files: tuple[CopiedFile, ...]
    weights_bytes: int
    entries: tuple[Entry, ...]  # in the order of weights.bin

    def __post_init__(self) -> None:
        named: tuple[tuple[str, Sequence[CopiedFile | Entry]], ...] = (("file", self.files), ("tensor", self.entries))
        for kind, records in named:
            for name, count in Counter(record.name for record in records).items():
                if count > 1:
                    raise ValueError(f"{kind} {name!r:.80} is there {count} times")
        if self.version != version_of(self.entries):
            raise ValueError(f"version {self.version} does not fit the layouts of the tensors")
        end = 0
        for entry in self.entries:
            for region in entry.regions:
                if region.offset != aligned(end):
                    raise ValueError(f"the offset of tensor {entry.name!r:.80} is impossible")
                end = region.end
        if self.weights_bytes != end:
            at = shown(end)
            raise ValueError(f"weights_bytes is {shown(self.weights_bytes)}, but the last tensor ends at byte {at}")

    @property
    def neuron_major(self) -> bool:
        """Whether FFN weights are stored neuron by neuron, except for the first matrix."""
        return any(entry.layout == ROWS for entry in self.entries)

    @property
    def first_in_rows(self) -> bool:
        """Whether all FFN weights are stored neuron by neuron."""
        return _first_in_rows(self.entries)

    def to_json(self) -> bytes:
        """Return the manifest as the bytes of its file. The last field is the checksum of everything before it."""
        text = json.dumps(asdict(self), indent=1).removesuffix(END).encode()
        return text + _checksum_field(text)


def region_sizes(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of bytes of each region of a tensor stored in layout `kind`, in file order."""
    if kind == "fp32":
        return (4 * math.prod(shape),)
    if kind == ROWS:
        return row_sizes(*shape)
    return layout.region_bytes(kind, *shape)


def version_of(entries: Iterable[Entry]) -> int:
    """Return the format version that a store with these tensors needs."""
    entries = list(entries)
    if any(entry.layout in layout.ENTRY_OFFSETS for entry in entries):
        return WIDE_VERSION
    if _first_in_rows(entries):
        return FIRST_ROWS_VERSION
    return ZEROS_VERSION if any(entry.layout == layout.ZEROS for entry in entries) else FORMAT_VERSION


def _first_in_rows(entries: Iterable[Entry]) -> bool:
    of_ffns = {entry.layout for entry in entries if ".ffn." in entry.name}
    return ROWS in of_ffns and of_ffns <= {ROWS, "fp32"}


def matrix_bits(manifest: Manifest) -> float | None:
    """Return the average bits per weight of the matrices, scales and padding included, None if there are none."""
    matrices = [entry for entry in manifest.entries if entry.layout != "fp32"]
    n_weights = sum(math.prod(entry.shape) for entry in matrices)
    return 8 * sum(entry.data_bytes + entry.scales_bytes for entry in matrices) / n_weights if n_weights else None


def aligned(offset: int) -> int:
    """Round an offset up to the next one at which a region may start."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the store in `folder`, and the size of weights.bin. Raises: StoreError."""
    manifest = parsed_manifest(folder)
    check_size(folder, manifest)
    return manifest


def check_size(folder: Path, manifest: Manifest) -> None:
    """Check that weights.bin has the size in the manifest. Raises: StoreError."""
    file = find_file(folder, WEIGHTS_FILE, StoreError)
    if file is None:
        raise DamagedStoreError(f"{folder / WEIGHTS_FILE} is missing; delete {folder} and convert again.")
    size = file.stat().st_size
    if size != manifest.weights_bytes:
        raise DamagedStoreError(
            f"{file} has {size} bytes, its manifest says {manifest.weights_bytes}; delete {folder} and convert again."
        )


def parsed_manifest(folder: Path) -> Manifest:
    """Read and check the manifest in `folder`, but no other file. Raises: StoreError."""
    try:
        body, data = _parsed(folder)
        _check_whole(folder, body, data)
        del body[CHECKSUM_NAME]
        return from_values(Manifest, body)
    except (ValueError, RecursionError) as error:
        raise DamagedStoreError(
            f"{folder / MANIFEST_FILE} can't be read ({error}); delete {folder} and convert again."
        ) from error


def stored_version(folder: Path) -> int | None:
    """Return the format version that a manifest claims, None if it can't be read."""
    try:
        body = _parsed(folder)[0]
    except (StoreError, ValueError):
        return None
    version = body.get("version") if isinstance(body, dict) and body.get("format") == FORMAT_NAME else None
    return version if type(version) is int else None


def _parsed(folder: Path) -> tuple[Any, bytes]:
    """Return the manifest's JSON and its bytes. Raises: StoreError, ValueError."""
    file = find_file(folder, MANIFEST_FILE, StoreError)
    if file is None:
        raise DamagedStoreError(f"{folder / MANIFEST_FILE} is missing; delete {folder} and convert again.")
    data = read_file(file, MAX_MANIFEST_BYTES, "a manifest", StoreError)
    return parse_json(data, MAX_MANIFEST_VALUES, **STRICT), data


def _check_whole(folder: Path, body: Any, data: bytes) -> None:
    """Check the format, then the version and last the checksum, since other versions may differ in anything else.

    Raises: DamagedStoreError.
    """
    file = folder / MANIFEST_FILE
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise DamagedStoreError(f"{file} is not the manifest of a hetero_ee store.")
    version = body.get("version")
    if type(version) is not int or version not in VERSIONS:
        raise DamagedStoreError(
            f"{folder} has store format version {version!r:.20}, this engine reads {', '.join(map(str, VERSIONS))}; "
            "delete it and convert the model again."
        )
    text, _, _ = data.rpartition(CHECKSUM_FIELD.encode())
    if data != text + _checksum_field(text):
        raise DamagedStoreError(f"{file} does not match its own checksum; delete {folder} and convert again.")


def _implied(kind: str) -> tuple[int, ...] | None:
    """Return the codebook that the layout implies, None if it has no fixed one."""
    return LINEAR_CODEBOOK if kind == layout.ZEROS else None


def _is_codebook(values: tuple[int, ...] | None, largest: int = 127) -> bool:
    """Return whether these are 16 ascending values from -largest (-128 if `largest` is 127) to `largest`."""
    if values is None or len(values) != 16 or values != tuple(sorted(set(values))):
        return False
    return values[0] >= (-128 if largest == 127 else -largest) and values[-1] <= largest


def _is_checksum(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _checksum_field(text: bytes) -> bytes:
    return f'{CHECKSUM_FIELD}{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()
