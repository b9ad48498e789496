"""The journal of an unfinished store: what was written so far, a line each, from which a conversion is resumed.

A line is the SHA-256 of its text, a blank and the text, JSON. The first line says what is being converted and how; each
other one is the entry of a tensor. Whatever follows the first line that is torn or altered counts as never written.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_ee.weights.store.manifest import MAX_MANIFEST_BYTES, Entry, aligned
from hetero_ee_profiles.records import from_json

JOURNAL_FILE = "journal"


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal still tells."""

    entries: tuple[Entry, ...]
    ends: tuple[int, ...]  # where the identity's line ends in the journal, and then each entry's


def journal_line(body: Mapping[str, Any] | Entry) -> bytes:
    """The line of an identity or an entry."""
    text = json.dumps(asdict(body) if isinstance(body, Entry) else body, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"


def read_journal(file: Path, identity: Mapping[str, Any]) -> Journal | None:
    """What the journal still tells; None where it is missing or belongs to another conversion. Raises OSError."""
    with file.open("rb") as opened:
        data = opened.read(MAX_MANIFEST_BYTES)
    first, *others = data.splitlines(keepends=True) or [b""]
    if first != journal_line(identity):
        return None
    entries: list[Entry] = []
    ends, weights_end = [len(first)], 0
    for line in others:
        entry = _entry_in(line)
        if entry is None:
            break
        for region in entry.regions:
            if region.offset != aligned(weights_end):
                return Journal(tuple(entries), tuple(ends))
            weights_end = region.end
        entries.append(entry)
        ends.append(ends[-1] + len(line))
    return Journal(tuple(entries), tuple(ends))


def _entry_in(line: bytes) -> Entry | None:
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != hashlib.sha256(text).hexdigest().encode():
        return None
    try:
        return from_json(Entry, text.decode())
    except ValueError:  # whole, but not of our making
        return None
