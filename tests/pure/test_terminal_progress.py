"""Progress where the caller gave nothing to tell it to."""

import sys

import pytest

from hetero_ee.config.terminal_progress import TerminalProgress, chosen_progress
from hetero_ee.errors import UsageError


def test_bars_are_drawn_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert chosen_progress(None) is None and chosen_progress(False) is None  # a pipe or a log
    assert isinstance(chosen_progress(True), TerminalProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(chosen_progress(None), TerminalProgress) and chosen_progress(False) is None
    monkeypatch.setattr(sys, "stderr", None)  # as of a program without a console
    assert chosen_progress(None) is None
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert isinstance(chosen_progress(None), TerminalProgress)  # a notebook
    assert chosen_progress(print) is print
    for nonsense in ("yes", 1, []):
        with pytest.raises(UsageError, match=r"progress is .*expected a function, True, False or None"):
            chosen_progress(nonsense)  # type: ignore[arg-type]


def test_a_stage_is_a_bar_and_a_remark_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TerminalProgress()
    assert capsys.readouterr() == ("", "")
    for _ in range(2):  # a stage may come again, as reading a prompt does
        progress("Converting the weights", 0, 4)
        progress("Converting the weights", 4, 4)
        out, err = capsys.readouterr()
        assert out == "" and "Converting the weights: " in err and err.endswith(" \r")
    progress("The GPU is left out.", 0, 0)
    progress("The GPU is left out", 0, 0)
    assert capsys.readouterr() == ("", "The GPU is left out.\n" * 2)
