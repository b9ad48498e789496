"""A long prompt's line on a terminal: by a scripted clock, as a terminal shows it."""

import io
import sys

import pytest

from hetero_ee.config import READING
from hetero_ee_cli.terminal.progress import _Bars, stage_progress
from hetero_ee_cli.terminal.prompt_progress import PromptProgress, _duration
from tests.pure.test_terminal_text import Screen, both_streams

ERASED = "\x1b[1A\x1b[2K"  # up to the line, which is cleared


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


def test_a_prompt_of_less_than_a_second_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    for at_s, n_done in ((0.0, 0), (0.5, 1500), (0.9, 2900)):
        assert reading.told(at_s, n_done) == ""
    reading.told(0.95, 3000)
    assert READING not in reading.screen.text()


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
    shown = reading.screen.text()
    assert "500 of 3,000 tokens, 250 tokens/s, 10 s left" in shown and ERASED not in shown
    reading.told(2000.0, 3000)
    assert reading.screen.text().endswith(ERASED)


def test_the_next_prompt_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    reading.told(0.0, 0)
    reading.told(2.0, 500)
    reading.told(12.0, 3000)
    assert reading.told(20.0, 0, 600) == ""
    assert reading.told(22.0, 300, 600) == "Reading the prompt: 300 of 600 tokens, 150 tokens/s, 2 s left"
    reading.progress.close()  # as where the command ends before the prompt does
    assert reading.screen.text().endswith(ERASED)
    assert reading.told(30.0, 0, 600) == ""
    reading.progress.close()


def test_durations() -> None:
    assert [_duration(seconds) for seconds in (0.4, 59.4, 60, 3599, 3600, 7325)] == [
        *("0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 02 min")
    ]


def test_a_pipe_is_told_nothing_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with stage_progress() as progress:
        for n_done in (0, 500, 3000):
            progress(READING, n_done, 3000)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_is_told_and_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_streams(monkeypatch)
    monkeypatch.setattr("hetero_ee_cli.terminal.prompt_progress.SHOWN_AFTER_S", 0.0)
    with stage_progress() as progress:
        progress(READING, 0, 3000)
        progress(READING, 500, 3000)
    assert "of 3,000 tokens" in screen.text() and screen.text().endswith(ERASED)


def test_a_remark_within_a_prompt_takes_the_line_away_and_keeps_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, bars, now_s = both_streams(monkeypatch), _Bars(), [0.0]
    bars._prompt = PromptProgress(lambda: now_s[0])
    for stage, n_done in ((READING, 0), (READING, 1000), ("Planned again", 0), (READING, 2000)):
        now_s[0] += 10.0
        bars.update(stage, n_done, 4000 if stage == READING else 0)
    assert bars._prompt.line() == "Reading the prompt: 2,000 of 4,000 tokens, 67 tokens/s, 40 s left"
    bars.update(READING, 4000, 4000)
    bars.close()
    assert "Planned again.\n" in screen.text()
    assert "\ufffd" not in screen.text() and screen.text().endswith(ERASED)
