"""Spoiled models, and what has to happen to each: one typed error of one line, soon, and nothing left behind."""

import json
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, HeteroError

ROOT = Path(__file__).parents[1]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_SECONDS = 2.0  # of processor time; a busy machine must not fail the test
ALARM_SECONDS = 20  # by the clock: whoever waits for a pipe uses no processor
MAX_LENGTH = 1000  # of an error

Spoil = Callable[[Path], Any]
Bad = tuple[Spoil, type[HeteroError], str]  # what is done to a good model's folder, the error, and some of its words


def check_refusal(folder: Path, cache: Path, error: type[HeteroError], words: str, quantizer: str = "rtn") -> None:
    """Opens the model in `folder`, which must be refused as the words say, exactly by that class of error."""
    start = time.process_time()
    with _alarm(), pytest.raises(HeteroError) as caught:
        Engine.from_pretrained(folder, quantizer=quantizer, threads=1).close()
    seconds, message = time.process_time() - start, str(caught.value)
    assert type(caught.value) is error, message
    assert words in message, message
    assert message.isprintable() and message.endswith(".") and len(message) < MAX_LENGTH, message
    assert seconds < MAX_SECONDS, f"{seconds:.1f} s: {message}"
    assert leftovers(cache) == []


def leftovers(cache: Path) -> list[str]:
    """What is in a cache beside compiled kernels, empty folders and locks."""
    found = (path for path in cache.rglob("*") if "kernels" not in path.parts and path.is_file())
    return [str(path) for path in found if path.suffix != ".lock"]


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError(f"still busy after {ALARM_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(ALARM_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def content(name: str, data: bytes) -> Spoil:
    """Puts `data` in place of the file `name`."""
    return lambda folder: (folder / name).write_bytes(data)


def sparse(name: str, n_bytes: int, start: bytes = b"") -> Spoil:
    """Puts a file of that size there, which takes no room on the disk."""

    def write(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.write(start)
            file.truncate(n_bytes)

    return write


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file, however wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def read_safetensors(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a good file."""
    data = file.read_bytes()
    end = 8 + int(struct.unpack("<Q", data[:8])[0])
    return json.loads(data[8:end]), data[end:]


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Changes the parsed header of the model's weights, and leaves the tensors as they are."""

    def write(folder: Path) -> None:
        header, data = read_safetensors(folder / SINGLE)
        change(header)
        (folder / SINGLE).write_bytes(safetensors(header, data))

    return write


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Changes a parsed JSON file."""

    def write(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return write


def also(*spoils: Spoil) -> Spoil:
    """One after the other."""

    def spoil(folder: Path) -> None:
        for each in spoils:
            each(folder)

    return spoil
