"""Reads text from a file or standard input, with a limit on its size, and checks it."""

import sys
from pathlib import Path

from hetero_ee.errors import UsageError

MAX_TEXT_BYTES = 64 * 2**20


def read_text(what: str, file: Path | None) -> str:
    """Return the text in the file, or from standard input if the file is None. Messages call it `what`."""
    name = f"the {what} from {file or 'standard input'}"
    try:
        if file is None:
            return decoded(sys.stdin.buffer.read(MAX_TEXT_BYTES + 1), name, MAX_TEXT_BYTES)
        with file.open("rb") as source:
            return decoded(source.read(MAX_TEXT_BYTES + 1), name, MAX_TEXT_BYTES)
    except OSError as error:
        raise UsageError(f"{name} can't be read ({error.strerror}).") from error


def decoded(data: bytes, name: str, max_bytes: int) -> str:
    """Decode UTF-8. Messages call the data `name`."""
    if len(data) > max_bytes:
        raise UsageError(f"{name} has more than {max_bytes // 2**20} MiB.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text at byte {error.start}.") from error
