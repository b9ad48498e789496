"""Text from a file or from standard input, bounded and checked."""

import sys
from pathlib import Path

MAX_TEXT_BYTES = 64 * 2**20


def read_text(what: str, file: Path | None) -> str:
    """The file's text, or standard input's where there is none. what: its name in a message. Raises UsageError."""
    from hetero_ee.errors import UsageError

    source = file or "standard input"
    try:
        data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1) if file is None else _read_file(file)
    except OSError as error:
        raise UsageError(f"the {what} from {source} can't be read ({error.strerror}).") from error
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"the {what} from {source} has more than {MAX_TEXT_BYTES // 2**20} MiB.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} from {source} is not UTF-8 text at byte {error.start}.") from error


def _read_file(file: Path) -> bytes:
    with file.open("rb") as source:
        return source.read(MAX_TEXT_BYTES + 1)
