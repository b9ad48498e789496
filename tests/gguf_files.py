"""GGUF files by hand, good and bad: every field can be given another value than the one that would be right."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

TYPES = {"u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q")}
F32, F16, Q4_0 = 0, 1, 2
DATA_TYPES = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18)}  # weights and bytes of a block


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(key: str | bytes, value: Any) -> bytes:
    """A metadata entry: ("u32", 3) for a number, a str, a list of str or of float, or bytes for type and value."""
    if isinstance(value, bytes):
        return text(key) + value
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        kind, body = (8, b"".join(map(text, value))) if value and isinstance(value[0], str) else (6, b"")
        if kind == 6:
            body = struct.pack(f"<{len(value)}f", *value)
        return text(key) + struct.pack("<IIQ", 9, kind, len(value)) + body
    kind_name, number = value
    kind, letter = TYPES[kind_name]
    return text(key) + struct.pack(f"<I{letter}", kind, number)


def described(
    name: str | bytes, sizes: Sequence[int], kind: int, offset: int, n_dimensions: int | None = None
) -> bytes:
    """A tensor's description; sizes innermost first, as the file has them."""
    count = len(sizes) if n_dimensions is None else n_dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[bytes],
    tensors: Sequence[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these parts."""
    entries = [entry(*pair) for pair in metadata.items()] if isinstance(metadata, Mapping) else list(metadata)
    counts = (len(tensors) if n_tensors is None else n_tensors, len(entries) if n_entries is None else n_entries)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
