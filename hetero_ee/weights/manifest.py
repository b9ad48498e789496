"""The store's manifest: what lies where in weights.bin. Read with suspicion, written in one way. See docs/FORMAT.md."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_ee.errors import StoreError
from hetero_ee.models.blocks import TensorRole, TensorSpec
from hetero_ee.weights import tiles as layout

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.bin"
FORMAT_NAME = "hetero_ee store"
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 4096  # a page: regions start on one, so that a mapping can be read and advised region by region
MAX_MANIFEST_BYTES = 64 * 2**20
SCALE_BYTES = 2


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
    def end(self) -> int:
        return self.offset + self.data_bytes if self.layout == "fp32" else self.scales_offset + self.scales_bytes


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


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`, every number checked. Raises StoreError."""
    file = folder / MANIFEST_FILE
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise StoreError(f"{file} has {file.stat().st_size} bytes, more than {MAX_MANIFEST_BYTES}; convert again.")
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{file} can't be read ({error}); delete {folder} and convert again.") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise StoreError(f"{file} is not the manifest of a hetero_ee store.")
    if body.get("version") != FORMAT_VERSION:
        raise StoreError(
            f"{folder} has store format version {body.get('version')!r}, this engine reads version {FORMAT_VERSION}; "
            "delete it and convert the model again."
        )
    if body.get("sha256") != _checksum({key: value for key, value in body.items() if key != "sha256"}):
        raise StoreError(f"{file} does not match its own checksum; delete {folder} and convert again.")
    try:
        manifest = _manifest_from(body)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{file} is malformed ({type(error).__name__}: {error}); convert again.") from error
    _check_file(folder, manifest)
    return manifest


def _manifest_from(body: Mapping[str, Any]) -> Manifest:
    entries = tuple(_entry_from(values) for values in body["entries"])
    return Manifest(
        quantizer=str(body["quantizer"]),
        vocabulary_quantizer=str(body["vocabulary_quantizer"]),
        source=dict(body["source"]),
        weights_bytes=int(body["weights_bytes"]),
        weights_sha256=str(body["weights_sha256"]),
        entries=entries,
    )


def _entry_from(values: Mapping[str, Any]) -> Entry:
    codebook = values["codebook"]
    entry = Entry(
        name=str(values["name"]),
        layout=str(values["layout"]),
        shape=tuple(int(size) for size in values["shape"]),
        offset=int(values["offset"]),
        scales_offset=int(values["scales_offset"]),
        exponent=int(values["exponent"]),
        codebook=None if codebook is None else tuple(int(value) for value in codebook),
    )
    if entry.layout not in ("int4", "int8", "fp32") or (entry.layout == "int4") != (codebook is not None):
        raise ValueError(f"layout {entry.layout!r} of {entry.name}")
    if entry.codebook is not None and (len(entry.codebook) != 16 or not all(-128 <= v <= 127 for v in entry.codebook)):
        raise ValueError(f"codebook of {entry.name}")
    if min(entry.shape) < 1 or len(entry.shape) > 2 or abs(entry.exponent) > 200:
        raise ValueError(f"shape {entry.shape} or exponent {entry.exponent} of {entry.name}")
    return entry


def _check_file(folder: Path, manifest: Manifest) -> None:
    """Regions must lie inside weights.bin, aligned, in order and without overlap; the file must have its size."""
    file = folder / WEIGHTS_FILE
    size = file.stat().st_size if file.is_file() else 0
    if size != manifest.weights_bytes:
        raise StoreError(f"{file} has {size} bytes, its manifest says {manifest.weights_bytes}; convert again.")
    end = 0
    for entry in manifest.entries:
        starts = (entry.offset,) if entry.layout == "fp32" else (entry.offset, entry.scales_offset)
        if entry.offset < end or entry.end > size or any(start % ALIGNMENT_BYTES for start in starts):
            raise StoreError(f"{folder}: the place of tensor {entry.name} is impossible; convert again.")
        if entry.layout != "fp32" and entry.scales_offset < entry.offset + entry.data_bytes:
            raise StoreError(f"{folder}: the scales of tensor {entry.name} overlap its tiles; convert again.")
        end = entry.end


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
