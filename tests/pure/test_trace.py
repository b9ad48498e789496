"""The trace: what viewers read, whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from hetero_ee.errors import DiskFullError, UsageError
from hetero_ee.runtime.devices.timeline import TO_GPU, Span
from hetero_ee.runtime.trace import SpanRecorder, write_trace
from tests.device_support import EmulatedMachine

SPANS = [Span("cpu", "layers.1.ffn", 0.5, 0.75), Span(TO_GPU, "layers.2.ffn", 0.0, 1e-6)]


def test_what_viewers_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, SPANS, "demo on rtx-4090-24gb, simulated")
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values())[:4] == ["CPU", "GPU", "hidden states to GPU", "hidden states to CPU"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["demo on rtx-4090-24gb, simulated"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("CPU", "layers.1.ffn", 500000, 250000),
        ("weights to GPU", "layers.2.ffn", 0, 1),
    ]
    assert {event["pid"] for event in events} == {1}
    assert list(tmp_path.iterdir()) == [file]


def test_a_time_line_can_be_written(tmp_path: Path) -> None:
    machine = EmulatedMachine()
    machine.on_cpu("rest", 1, [machine.transfer("out", "cpu", [machine.on_gpu("first")])])
    write_trace(tmp_path / "trace.json", machine.timeline.spans, "round")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["ts"] for event in events if event["ph"] == "X"] == [0, 1e6, 1.25e6]


def test_an_older_trace_stays_whole_where_the_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, SPANS, "first")
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="has no room for a trace"):
        write_trace(file, SPANS * 9, "second")
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_link_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "trace.json")
    write_trace(link, SPANS, "linked")
    assert link.is_symlink() and (tmp_path / "trace.json").is_file()


@pytest.mark.parametrize("name", ["no/such/folder/trace.json", ".", "pipe"])
def test_a_file_that_can_not_be_written_is_named(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"the trace can't be written to .*; name another"):
        write_trace(tmp_path / name, SPANS, "refused")
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_spans_that_end_later_are_asked_for_later() -> None:
    recorder, known = SpanRecorder(), []
    recorder.add_later(lambda: known[0])
    recorder.add(Span("cpu", "a", 2.0, 3.0))
    known.append(Span("gpu", "b", 1.0, 4.0))
    assert recorder.spans() == [Span("gpu", "b", 1.0, 4.0), Span("cpu", "a", 2.0, 3.0)]
