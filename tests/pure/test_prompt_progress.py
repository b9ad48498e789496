"""A long prompt's line on a terminal: by a scripted clock, as a terminal shows it."""

import io
import os
import re
import subprocess
import sys
import time

import pytest

from hetero_ee.config import READING
from hetero_ee_cli.terminal.progress import PhaseClock, stage_progress
from hetero_ee_cli.terminal.prompt_progress import DRAWN_EVERY_S, PromptProgress, duration
from tests.pure.test_terminal_text import Screen, both_streams

ERASED = re.compile(r"\r +\r\Z")  # spaces over the line
LIMIT_S = 30
# A prompt of 4 chunks, which take so many seconds each, on a terminal of standard error.
PROGRAM = """
import sys, time
from hetero_ee.config import READING
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.streams import filter_terminals
filter_terminals()
with stage_progress() as progress:
    for n_done in range(0, 401, 100):
        progress(READING, n_done, 400)
        time.sleep(float(sys.argv[1]))
print("text;", "rich" in sys.modules, file=sys.stderr)
"""


def seen_by_a_terminal(chunk_s: float) -> str:
    """What PROGRAM writes to one."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(chunk_s)], stderr=theirs)
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:  # Linux's way to say that the other end is closed
            assert child.wait(LIMIT_S) == 0
        return shown.decode()
    finally:
        os.close(ours)


class Reading:
    """A prompt of 3,000 tokens by a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.screen: Screen = both_streams(monkeypatch)
        self.progress = PromptProgress(lambda: self.now_s)

    def told(self, at_s: float, n_done: int, n_all: int = 3000) -> str:
        """What is shown from then on."""
        self.now_s = 100.0 + at_s
        self.progress.update(n_done, n_all)
        return self.progress.line()

    def waited_for(self, pattern: str) -> bool:
        """Whether the terminal shows it within a while."""
        ends_s = time.monotonic() + LIMIT_S
        while not (found := re.search(pattern, self.screen.text())) and time.monotonic() < ends_s:
            time.sleep(0.01)
        return found is not None


def test_a_short_prompt_writes_nothing_to_a_terminal() -> None:
    assert seen_by_a_terminal(0.01) == "text; False\r\n"


def test_a_long_prompt_writes_a_line_to_a_terminal_and_takes_it_away() -> None:
    shown = seen_by_a_terminal(0.6)
    assert re.fullmatch(
        r"(\rReading the prompt: [123]00 of 400 tokens, \d+ tokens/s, \d s left *)+\r +\rtext; False\r\n", shown
    )


def test_without_another_thread_a_prompt_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    reading = Reading(monkeypatch)
    monkeypatch.setattr("threading.Thread.start", refused)
    for at_s, n_done in ((0.0, 0), (5.0, 1500), (9.0, 3000)):
        reading.told(at_s, n_done)
    assert reading.screen.text() == ""


def test_a_prompt_of_less_than_a_second_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    for at_s, n_done in ((0.0, 0), (0.5, 1500), (0.9, 2900)):
        assert reading.told(at_s, n_done) == ""
    time.sleep(2 * DRAWN_EVERY_S)
    reading.told(0.95, 3000)
    assert reading.screen.text() == ""


def test_tokens_per_second_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    assert reading.told(0.0, 0) == ""
    reading.now_s += 1.5
    assert reading.progress.line() == "Reading the prompt: 0 of 3,000 tokens"  # its first chunk takes so long
    assert reading.told(2.0, 500) == "Reading the prompt: 500 of 3,000 tokens, 250 tokens/s, 10 s left"
    reading.now_s += 4.0
    assert reading.progress.line() == "Reading the prompt: 500 of 3,000 tokens, 250 tokens/s, 6 s left"
    # The latest chunk says how long the rest takes, all of them how fast it was.
    assert reading.told(7.0, 1000) == "Reading the prompt: 1,000 of 3,000 tokens, 143 tokens/s, 20 s left"
    assert reading.told(1007.0, 1500) == "Reading the prompt: 1,500 of 3,000 tokens, 1.5 tokens/s, 50 min 00 s left"
    reading.now_s += 10**6
    assert reading.progress.line().endswith("1 s left")
    assert reading.waited_for("1,500 of 3,000 tokens, 1.5 tokens/s, 1 s left$")
    reading.told(2000.0, 3000)
    assert ERASED.search(reading.screen.text())


def test_the_next_prompt_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    reading.told(0.0, 0)
    reading.told(2.0, 500)
    reading.told(12.0, 3000)
    assert reading.told(20.0, 0, 600) == ""
    assert reading.told(22.0, 300, 600) == "Reading the prompt: 300 of 600 tokens, 150 tokens/s, 2 s left"
    assert reading.waited_for("300 of 600")
    reading.progress.close()  # as where the command ends before the prompt does
    assert ERASED.search(reading.screen.text())
    assert reading.told(30.0, 0, 600) == ""
    reading.progress.close()


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 60, 3599, 3600, 7325)] == [
        *("0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 02 min")
    ]


def test_a_pipe_is_told_nothing_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with stage_progress() as progress:
        for n_done in (0, 500, 3000):
            progress(READING, n_done, 3000)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_remark_within_a_prompt_takes_the_line_away_and_keeps_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    monkeypatch.setattr("hetero_ee_cli.terminal.progress.PromptProgress", lambda: reading.progress)
    with stage_progress() as progress:
        for stage, n_done in ((READING, 0), (READING, 1000), ("Planned again", 0), (READING, 2000)):
            reading.now_s += 10.0
            progress(stage, n_done, 4000 if stage == READING else 0)
            assert n_done == 0 or reading.waited_for(f"{n_done:,} of 4,000")
        assert reading.progress.line() == "Reading the prompt: 2,000 of 4,000 tokens, 67 tokens/s, 40 s left"
        progress(READING, 4000, 4000)
    shown = reading.screen.text()
    assert re.search(r"s left\r +\r[^ ]*Planned again\.\n", shown) and "\ufffd" not in shown and ERASED.search(shown)


def test_stages_are_timed_from_their_first_report_to_their_latest() -> None:
    now_s, passed = iter([1.0, 1.5, 2.0, 4.0]), list[tuple[str, int, int]]()
    phases = PhaseClock(lambda *report: passed.append(report), lambda: next(now_s))
    reports = [("A", 0, 2), ("B", 0, 1), (READING, 0, 9), ("a remark", 0, 0), ("A", 2, 2), ("B", 1, 1)]
    for report in reports:
        phases(*report)
    assert passed == reports and phases.seconds == {"A": 1.0, "B": 2.5}
