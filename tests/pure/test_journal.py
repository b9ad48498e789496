"""The journal of an unfinished store: what it still tells after any damage is what was written."""

import hashlib
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hetero_ee.weights.store.journal import journal_line, read_journal
from hetero_ee.weights.store.manifest import Entry, read_manifest
from tests.format_store import write_store

IDENTITY = {"source_key": "0123456789abcdef", "tensors": [["a", 1]]}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Entry, ...]:
    return read_manifest(write_store(tmp_path_factory.mktemp("store"))).entries


def read(tmp_path: Path, data: bytes) -> tuple[Entry, ...] | None:
    file = tmp_path / "journal"
    file.write_bytes(data)
    entries = read_journal(file, IDENTITY)
    return None if entries is None else tuple(entries)


def test_what_is_written_is_what_is_read(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    lines = [journal_line(IDENTITY), *map(journal_line, entries)]
    for n_lines in range(1, len(lines) + 1):
        assert read(tmp_path, b"".join(lines[:n_lines])) == entries[: n_lines - 1]


def test_another_conversion_s_journal_is_none(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    for first in (b"", b"\n", journal_line({}), journal_line(entries[0]), journal_line(IDENTITY)[:-1]):
        assert read(tmp_path, first + b"".join(map(journal_line, entries))) is None


def test_every_altered_bit_and_every_cut_ends_what_is_believed(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    lines = [journal_line(IDENTITY), *map(journal_line, entries)]
    data, choose = b"".join(lines), random.Random(0)
    for place in range(len(lines[0]), len(data)):
        n_right = sum(place >= len(b"".join(lines[: n + 2])) for n in range(len(entries)))
        altered = bytes([data[place] ^ 1 << choose.randrange(8)])
        for damaged in (data[:place], data[:place] + altered + data[place + 1 :], data[:place] + bytes(99)):
            assert read(tmp_path, damaged) == entries[:n_right]


def test_entries_that_do_not_follow_each_other_are_not_believed(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    first, second, third = entries
    moved = replace(second, scales_offset=second.scales_offset + 4096)
    for listed in ([second], [first, first], [first, third], [first, moved, third], [third, second, first]):
        believed = read(tmp_path, b"".join(map(journal_line, [IDENTITY, *listed])))
        assert believed == (entries[:1] if listed[0] is first else ())


def test_lines_that_are_right_but_not_of_entries_are_not_believed(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    for body in ({}, {"name": "a"}, IDENTITY):
        assert read(tmp_path, journal_line(IDENTITY) + journal_line(body) + journal_line(entries[0])) == ()


def test_a_line_that_says_the_same_in_other_words_is_not_believed(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    text = json.dumps(asdict(entries[0]))  # fields in another order
    line = f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()
    assert read(tmp_path, journal_line(IDENTITY) + line) == ()
