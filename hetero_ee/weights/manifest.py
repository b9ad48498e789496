"""The store's manifest: what lies where in weights.bin. Read with suspicion, written in one way. See docs/FORMAT.md."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from hetero_ee.errors import StoreError
from hetero_ee.models.blocks import TensorRole, TensorSpec
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.weight import MAX_EXPONENT, MIN_EXPONENT

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.bin"
FORMAT_NAME = "hetero_ee store"
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 4096  # a page: regions start on one, so that a mapping can be read and advised region by region
MAX_MANIFEST_BYTES = 64 * 2**20
SCALE_BYTES = 2
LAYOUTS = ("int4", "int8", "fp32")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: `layout` is "int4", "int8" (tiles, and fp16 scales at scales_offset) or "fp32" (row by row)."""

    name: str
    layout: str
    shape: tuple[int, ...]
    offset: int
    scales_offset: int
    exponent: int
    codebook: tuple[int, ...] | None

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
    def regions(self) -> list[tuple[int, int]]:
        """First byte and size of each region, in the order of the file."""
        data = (self.offset, self.data_bytes)
        return [data] if self.layout == "fp32" else [data, (self.scales_offset, self.scales_bytes)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """entries: in the order of the file. source: what the store was made from, for people and for the cache key."""

    quantizer: str
    vocabulary_quantizer: str
    source: dict[str, Any]
    weights_bytes: int
    weights_sha256: str
    entries: tuple[Entry, ...]

    def to_json(self) -> bytes:
        """The file's bytes; its last field is the checksum of everything before."""
        body = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(self)}
        body["sha256"] = _checksum(body)
        return (json.dumps(body, indent=1) + "\n").encode()


def aligned(offset: int) -> int:
    """The first place at or after `offset` where a region may start."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`, every number checked. Raises StoreError."""
    file = folder / MANIFEST_FILE
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise StoreError(
                f"{file} has {file.stat().st_size} bytes, more than {MAX_MANIFEST_BYTES}; "
                f"delete {folder} and convert again."
            )
        body = json.loads(file.read_text(encoding="utf-8"))
        _check_header(folder, body)
        manifest = _manifest_from(body)
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{file} can't be read ({error}); delete {folder} and convert again.") from error
    _check_file(folder, manifest)
    return manifest


def _check_header(folder: Path, body: Any) -> None:
    """Format and version come first: of a manifest in another version nothing else can be said."""
    file = folder / MANIFEST_FILE
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise StoreError(f"{file} is not the manifest of a hetero_ee store.")
    version = body.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise StoreError(
            f"{folder} has store format version {version!r:.20}, this engine reads version {FORMAT_VERSION}; "
            "delete it and convert the model again."
        )
    if body.get("sha256") != _checksum({key: value for key, value in body.items() if key != "sha256"}):
        raise StoreError(f"{file} does not match its own checksum; delete {folder} and convert again.")


def _manifest_from(body: Mapping[str, Any]) -> Manifest:
    _check_names(body, {"format", "version", "sha256", *(field.name for field in fields(Manifest))})
    entries = tuple(_entry_from(values) for values in _typed(body, "entries", list))
    for name, count in Counter(entry.name for entry in entries).items():
        if count > 1:
            raise ValueError(f"tensor {name!r:.80} is there {count} times")
    return Manifest(
        quantizer=_typed(body, "quantizer", str),
        vocabulary_quantizer=_typed(body, "vocabulary_quantizer", str),
        source=_typed(body, "source", dict),
        weights_bytes=_typed(body, "weights_bytes", int),
        weights_sha256=_typed(body, "weights_sha256", str),
        entries=entries,
    )


def _entry_from(values: Any) -> Entry:
    if not isinstance(values, dict):
        raise ValueError(f"an entry is {values!r:.40}, expected an object")
    _check_names(values, {field.name for field in fields(Entry)})
    entry = Entry(
        name=_typed(values, "name", str),
        layout=_typed(values, "layout", str),
        shape=_integers(values, "shape"),
        offset=_typed(values, "offset", int),
        scales_offset=_typed(values, "scales_offset", int),
        exponent=_typed(values, "exponent", int),
        codebook=None if values["codebook"] is None else _integers(values, "codebook"),
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
    return None


def _is_codebook(values: tuple[int, ...] | None) -> bool:
    """16 int8 values, strictly ascending."""
    if values is None or len(values) != 16 or values != tuple(sorted(set(values))):
        return False
    return values[0] >= -128 and values[-1] <= 127


def _check_names(values: Mapping[str, Any], expected: set[str]) -> None:
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


def _check_file(folder: Path, manifest: Manifest) -> None:
    """Regions must lie inside weights.bin, aligned, in order and without overlap; the file must have its size."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise StoreError(f"{file} is missing; delete {folder} and convert again.")
    size = file.stat().st_size
    if size != manifest.weights_bytes:
        raise StoreError(
            f"{file} has {size} bytes, its manifest says {manifest.weights_bytes!r:.20}; "
            f"delete {folder} and convert again."
        )
    end = 0
    for entry in manifest.entries:
        for start, n_bytes in entry.regions:
            if start < end or start % ALIGNMENT_BYTES or start + n_bytes > size:
                raise StoreError(
                    f"{folder}: the place of tensor {entry.name!r:.80} is impossible; "
                    "delete that folder and convert again."
                )
            end = start + n_bytes


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
