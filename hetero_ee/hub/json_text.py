"""Parse untrusted JSON in bounded memory, and recognize other content in its place."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OBJECT_COST = 4  # an object needs about four times the memory of a list or string
_BEGINNINGS = (
    (b"version https://git-lfs", "is a Git LFS pointer in place of the file itself; run `git lfs pull` in that folder"),
    (b"<", "is a web page in place of the file; download it again"),
    (b"GGUF", "is a GGUF file; give that file itself as the model"),
    (
        b"PK\x03\x04",
        "is a zip archive, perhaps a pickle of torch.save, which is never opened; convert it to safetensors",
    ),
    (b"\x80", "is a pickle, which can run code when opened and is never read; convert it to safetensors"),
    (b"\x89HDF", "is an HDF5 file; give the original checkpoint in safetensors"),
    (b"\x1f\x8b", "is compressed; unpack it with gunzip"),
    (b"\xff\xfe", "is UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text; save it as UTF-8"),
    (b"\xef\xbb\xbf", "begins with a byte order mark; save it as UTF-8 without one"),
    (bytes(16), "begins with zeros, as an unfinished download does; get the file again"),
)


def parse_json(data: bytes, max_values: int, **hooks: Any) -> Any:
    """Parse UTF-8 JSON with at most about `max_values` values, where an object counts as four.

    Each value needs up to 60 bytes of memory in addition to its text.

    Raises:
        ValueError: with a one-line message.
    """
    n_values = OBJECT_COST * data.count(b"{") + data.count(b"[") + data.count(b",")
    if n_values > max_values:
        raise ValueError(f"its JSON has {n_values} values, expected at most {max_values}")
    try:
        with _collector_paused():
            return json.loads(data.decode(), **hooks)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def depth_exceeds(value: Any, limit: int) -> bool:
    """Return whether lists and objects are nested more than `limit` levels deep."""
    level = [value]
    for _ in range(limit):
        level = [child for parent in level if isinstance(parent, dict | list) for child in _children(parent)]
    return any(isinstance(child, dict | list) for child in level)


def not_json(data: bytes, error: ValueError) -> str:
    """Return why `data` could not be parsed, as the end of a sentence about its file."""
    return stand_in(data[:64]) or f"is not valid JSON ({error}); get the file again"


def stand_in(start: bytes) -> str | None:
    """Describe an unusable file by its first bytes, and say what to do; None if they are not recognized."""
    if not start:
        return "is empty; get the file again"
    return next((what for beginning, what in _BEGINNINGS if start.lstrip(b" \t\r\n").startswith(beginning)), None)


def _children(parent: Any) -> list[Any]:
    return list(parent.values()) if isinstance(parent, dict) else parent


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which would triple the parsing time by scanning objects that all stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
