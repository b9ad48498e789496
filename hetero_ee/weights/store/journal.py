"""The journal of an unfinished store: one line per finished tensor, from which a conversion is resumed.

A line is the SHA-256 of its text, a space and the text, which is JSON. The first line says what is being converted and
how; every other line is the entry of a tensor. Everything after the first damaged line counts as not written.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetero_ee.weights.store.manifest import MAX_MANIFEST_BYTES, Entry, aligned
from hetero_ee_profiles.opened_file import open_regular
from hetero_ee_profiles.records import from_json

JOURNAL_FILE = "journal"


def journal_line(body: Mapping[str, Any] | Entry) -> bytes:
    """Format the journal's line of an identity or an entry."""
    text = json.dumps(asdict(body) if isinstance(body, Entry) else body, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"


def read_journal(file: Path, identity: Mapping[str, Any]) -> list[Entry] | None:
    """Return the journal's undamaged entries, None if the journal belongs to another conversion. Raises: OSError."""
    with open_regular(file) as opened:
        data = opened.read(MAX_MANIFEST_BYTES)
    first, *others = data.splitlines(keepends=True) or [b""]
    if first != journal_line(identity):
        return None
    entries: list[Entry] = []
    weights_end = 0
    for line in others:
        entry = _entry_in(line)
        if entry is None:
            break
        for region in entry.regions:
            if region.offset != aligned(weights_end):
                return entries
            weights_end = region.end
        entries.append(entry)
    return entries


def _entry_in(line: bytes) -> Entry | None:
    """Parse a line of the journal; None if it differs from the line that would be written for its entry."""
    try:
        entry = from_json(Entry, line.partition(b" ")[2].decode())
    except ValueError:
        return None
    return entry if line == journal_line(entry) else None
