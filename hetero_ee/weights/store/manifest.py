"""The store's manifest: what lies where in weights.bin. Read with suspicion, written in one way. See docs/FORMAT.md."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from hetero_ee.errors import DamagedStoreError, StoreError, shown
from hetero_ee.hub.json_text import parse_json
from hetero_ee.hub.model_files import SMALL_FILES
from hetero_ee.hub.regular_file import find_file, read_file
from hetero_ee.models.blocks import TensorRole, TensorSpec
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.weight import MAX_EXPONENT, MIN_EXPONENT

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.bin"
FORMAT_NAME = "hetero_ee store"
FORMAT_VERSION = 2
ALIGNMENT_BYTES = 4096  # a page: regions start on one, so that a mapping can be read and advised region by region
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_MANIFEST_VALUES = 2 * 10**6
SCALE_BYTES = 2
LAYOUTS = ("int4", "int8", "fp32")
CHECKSUM_FIELD = ',\n "sha256": "'  # what the manifest's last field begins with; the checksum is that of all before it

T = TypeVar("T")
R = TypeVar("R", "CopiedFile", "Entry")


@dataclass(frozen=True, slots=True)
class Region:
    """A run of bytes in weights.bin. part: "tiles", "scales" or "values"."""

    part: str
    offset: int
    n_bytes: int
    sha256: str

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.n_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: `layout` is "int4", "int8" (tiles, and fp16 scales at scales_offset) or "fp32" (row by row).

    sha256: of the tiles or values; scales_sha256: of the scales, empty for fp32.
    """

    name: str
    layout: str
    shape: tuple[int, ...]
    offset: int
    scales_offset: int
    exponent: int
    codebook: tuple[int, ...] | None
    sha256: str
    scales_sha256: str

    @property
    def data_bytes(self) -> int:
        if self.layout == "fp32":
            return 4 * TensorSpec(self.name, TensorRole.VECTOR, self.shape).n_elements
        return self.n_tiles * (layout.INT4_TILE_BYTES if self.layout == "int4" else layout.INT8_TILE_BYTES)

    @property
    def scales_bytes(self) -> int:
        return 0 if self.layout == "fp32" else self.n_tiles * layout.TILE_ROWS * SCALE_BYTES

    @property
    def n_tiles(self) -> int:
        n_rows, n_columns = layout.padded_shape(*self.shape)
        return (n_rows // layout.TILE_ROWS) * (n_columns // layout.TILE_COLUMNS)

    @property
    def regions(self) -> list[Region]:
        """In the order of the file."""
        if self.layout == "fp32":
            return [Region("values", self.offset, self.data_bytes, self.sha256)]
        return [
            Region("tiles", self.offset, self.data_bytes, self.sha256),
            Region("scales", self.scales_offset, self.scales_bytes, self.scales_sha256),
        ]


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """One of the model's small files in the store."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """entries: in the order of the file. source: what the store was made from, for people."""

    quantizer: str
    vocabulary_quantizer: str
    source: dict[str, Any]
    files: tuple[CopiedFile, ...]
    weights_bytes: int
    entries: tuple[Entry, ...]

    def to_json(self) -> bytes:
        """The file's bytes; its last field is the checksum of everything before."""
        body = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(self)}
        text = json.dumps(body, indent=1).removesuffix("\n}").encode()
        return text + _checksum_field(text)


def aligned(offset: int) -> int:
    """The first place at or after `offset` where a region may start."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`, every number checked, and weights.bin of its size. Raises StoreError."""
    manifest = parsed_manifest(folder)
    check_size(folder, manifest)
    return manifest


def check_size(folder: Path, manifest: Manifest) -> None:
    """Raises StoreError unless weights.bin has the size that the manifest says."""
    file = find_file(folder, WEIGHTS_FILE, StoreError)
    if file is None:
        raise DamagedStoreError(f"{folder / WEIGHTS_FILE} is missing; delete {folder} and convert again.")
    size = file.stat().st_size
    if size != manifest.weights_bytes:
        raise DamagedStoreError(
            f"{file} has {size} bytes, its manifest says {manifest.weights_bytes}; delete {folder} and convert again."
        )


def parsed_manifest(folder: Path) -> Manifest:
    """The same, without a look at any other file."""
    try:
        body, data = _parsed(folder)
        _check_header(folder, body, data)
        manifest = _manifest_from(body)
        _check_places(manifest)
    except (ValueError, RecursionError) as error:
        raise DamagedStoreError(
            f"{folder / MANIFEST_FILE} can't be read ({error}); delete {folder} and convert again."
        ) from error
    return manifest


def stored_version(folder: Path) -> int | None:
    """The format version that a manifest claims to have, None where it can't be read."""
    try:
        body = _parsed(folder)[0]
    except (StoreError, ValueError):
        return None
    version = body.get("version") if isinstance(body, dict) and body.get("format") == FORMAT_NAME else None
    return version if type(version) is int else None


def _parsed(folder: Path) -> tuple[Any, bytes]:
    """The JSON of the manifest, and its bytes. Raises StoreError, ValueError."""
    file = find_file(folder, MANIFEST_FILE, StoreError)
    if file is None:
        raise DamagedStoreError(f"{folder / MANIFEST_FILE} is missing; delete {folder} and convert again.")
    data = read_file(file, MAX_MANIFEST_BYTES, "a manifest", StoreError)
    return parse_json(data, MAX_MANIFEST_VALUES), data


def _check_header(folder: Path, body: Any, data: bytes) -> None:
    """Format and version come first: of a manifest in another version nothing else can be said."""
    file = folder / MANIFEST_FILE
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise DamagedStoreError(f"{file} is not the manifest of a hetero_ee store.")
    version = body.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise DamagedStoreError(
            f"{folder} has store format version {version!r:.20}, this engine reads version {FORMAT_VERSION}; "
            "delete it and convert the model again."
        )
    text, _, _ = data.rpartition(CHECKSUM_FIELD.encode())
    if data != text + _checksum_field(text):
        raise DamagedStoreError(f"{file} does not match its own checksum; delete {folder} and convert again.")


def _manifest_from(body: Mapping[str, Any]) -> Manifest:
    check_fields(body, {"format", "version", "sha256", *(field.name for field in fields(Manifest))})
    return Manifest(
        quantizer=_typed(body, "quantizer", str),
        vocabulary_quantizer=_typed(body, "vocabulary_quantizer", str),
        source=_typed(body, "source", dict),
        files=_unique("file", [_copied_file_from(values) for values in _typed(body, "files", list)]),
        weights_bytes=_typed(body, "weights_bytes", int),
        entries=_unique("tensor", [entry_from(values) for values in _typed(body, "entries", list)]),
    )


def _unique(kind: str, found: list[R]) -> tuple[R, ...]:
    for name, count in Counter(record.name for record in found).items():
        if count > 1:
            raise ValueError(f"{kind} {name!r:.80} is there {count} times")
    return tuple(found)


def _copied_file_from(values: Any) -> CopiedFile:
    if not isinstance(values, dict):
        raise ValueError(f"a file is {values!r:.40}, expected an object")
    check_fields(values, {field.name for field in fields(CopiedFile)})
    file = CopiedFile(_typed(values, "name", str), _typed(values, "n_bytes", int), _typed(values, "sha256", str))
    if file.name not in SMALL_FILES or file.n_bytes < 0 or not _is_checksum(file.sha256):
        raise ValueError(f"file {file.name!r:.80} has an impossible name, size or checksum")
    return file


def entry_from(values: Any) -> Entry:
    """The tensor that a parsed JSON object describes. Raises ValueError."""
    if not isinstance(values, dict):
        raise ValueError(f"an entry is {values!r:.40}, expected an object")
    check_fields(values, {field.name for field in fields(Entry)})
    entry = Entry(
        name=_typed(values, "name", str),
        layout=_typed(values, "layout", str),
        shape=_integers(values, "shape"),
        offset=_typed(values, "offset", int),
        scales_offset=_typed(values, "scales_offset", int),
        exponent=_typed(values, "exponent", int),
        codebook=None if values["codebook"] is None else _integers(values, "codebook"),
        sha256=_typed(values, "sha256", str),
        scales_sha256=_typed(values, "scales_sha256", str),
    )
    problem = _problem(entry)
    if problem:
        raise ValueError(f"tensor {entry.name!r:.80} has an impossible {problem}")
    return entry


def _problem(entry: Entry) -> str | None:
    """What of the entry contradicts itself, None where nothing does."""
    if entry.layout not in LAYOUTS:
        return "layout"
    n_dimensions = (1, 2) if entry.layout == "fp32" else (2,)
    if len(entry.shape) not in n_dimensions or min(entry.shape) < 1:
        return "shape"
    if not _is_codebook(entry.codebook) if entry.layout == "int4" else entry.codebook is not None:
        return "codebook"
    if not MIN_EXPONENT <= entry.exponent <= MAX_EXPONENT or (entry.layout == "fp32" and entry.exponent != 0):
        return "exponent"
    if entry.layout == "fp32" and entry.scales_offset != 0:
        return "scales_offset"
    if not _is_checksum(entry.sha256):
        return "sha256"
    if not (entry.scales_sha256 == "" if entry.layout == "fp32" else _is_checksum(entry.scales_sha256)):
        return "scales_sha256"
    return None


def _is_codebook(values: tuple[int, ...] | None) -> bool:
    """16 int8 values, strictly ascending."""
    if values is None or len(values) != 16 or values != tuple(sorted(set(values))):
        return False
    return values[0] >= -128 and values[-1] <= 127


def _is_checksum(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def check_fields(values: Mapping[str, Any], expected: set[str]) -> None:
    """A field too many is refused like one too few: what this version does not know it must not skip."""
    for name in sorted(expected ^ values.keys()):
        raise ValueError(f"field {name!r:.40} is {'missing' if name in expected else 'unknown'}")


def _typed(values: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """values[name], which must have exactly this type: a bool is no int here, nor is 4.0."""
    value = values[name]
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.40}, expected {kind.__name__}")
    return value


def _integers(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    found = _typed(values, name, list)
    if not all(type(value) is int for value in found):
        raise ValueError(f"{name} is {found!r:.40}, expected whole numbers")
    return tuple(found)


def _check_places(manifest: Manifest) -> None:
    """Regions must be aligned, in order and without overlap; the file must end with the last of them."""
    end = 0
    for entry in manifest.entries:
        for region in entry.regions:
            if region.offset != aligned(end):
                raise ValueError(f"the place of tensor {entry.name!r:.80} is impossible")
            end = region.end
    if manifest.weights_bytes != end:
        raise ValueError(
            f"weights_bytes is {shown(manifest.weights_bytes)}, but the last tensor ends at byte {shown(end)}"
        )


def _checksum_field(text: bytes) -> bytes:
    return f'{CHECKSUM_FIELD}{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()
