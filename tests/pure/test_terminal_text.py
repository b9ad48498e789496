"""What a terminal is spared: control characters, however they are written, and not the colours of our own."""

import io
import sys
import traceback

import pytest

from hetero_ee_cli.terminal.output import complain, say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.streams import TerminalText, filter_terminals, styled

CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
OVERRIDE = "\N{RIGHT-TO-LEFT OVERRIDE}"


class Screen(io.BytesIO):
    """Bytes that say they are a terminal's."""

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self.getvalue().decode()


def both_streams(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Makes them this terminal; within a test, since pytest changes them before it."""
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(screen, "utf-8", "replace", write_through=True))
    filter_terminals()
    return screen


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_no_control_character_but_newline_and_tab(monkeypatch: pytest.MonkeyPatch, control: str) -> None:
    screen = both_streams(monkeypatch)
    print(f"a\n\tb{control}c", flush=True)
    sys.stdout.writelines(["d", control, "e\n"])
    shown = "" if control == "\r" else "\ufffd"
    assert screen.text() == f"a\n\tb{shown}c\nd{shown}e\n"


def test_a_sequence_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_streams(monkeypatch)
    for piece in CLIPBOARD:
        sys.stdout.write(piece)
        sys.stdout.flush()
    assert screen.text() == "\ufffd]52;c;cm0gLXJm\ufffd"


def test_text_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_streams(monkeypatch)
    text = "Gr\u00fc\u00dfe, \u05e9\u05dc\u05d5\u05dd \U0001f468\u200d\U0001f469 \u00a0\u202e\n"
    assert sys.stdout.write(text) == len(text)
    sys.stdout.write("\ud800")
    sys.stdout.flush()
    assert screen.text() == f"{text}?"


def test_a_traceback_has_a_message_too(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_streams(monkeypatch)
    traceback.print_exception(ValueError(CLIPBOARD))
    assert screen.text() == "ValueError: \ufffd]52;c;cm0gLXJm\ufffd\n"


def test_colours_and_bars_pass_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_streams(monkeypatch)
    bar = "\r\x1b[2K\x1b[1A\x1b[?25l\x1b[1;38;5;197mhalf\x1b[0m\x1b[?25h"
    print(f"{bar}{CLIPBOARD}\x1b[2J\x1b[6n\x1bc", end="", file=styled(sys.stdout), flush=True)
    assert screen.text() == f"{bar}\ufffd]52;c;cm0gLXJm\ufffd\ufffd[2J\ufffd[6n\ufffdc"


def test_names_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_streams(monkeypatch)
    name = f"a{OVERRIDE}b\x1b[31m"
    complain(name)
    say(f"{name}\n{name}")
    with stage_progress() as progress:
        progress(f"{name} is late", 0, 0)
        progress(f"{name} [/] is read", 1, 2)
        print(f"beside the bar: {CLIPBOARD}", file=sys.stderr)
        progress(f"{name} [/] is read", 2, 2)
    shown = screen.text()
    assert shown.count("a\\u202eb\\x1b[31m") >= 5 and "[/] is read" in shown and "beside the bar" in shown
    assert OVERRIDE not in shown and "\x07" not in shown and "\x1b]" not in shown and "b\x1b[31m" not in shown
    assert "\x1b[?25l" in shown  # the bar is one


def test_what_is_no_terminal_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, "utf-8"))
    filter_terminals()
    print("".join(CONTROLS), end="", flush=True)
    assert not isinstance(sys.stdout, TerminalText) and pipe.getvalue().decode() == "".join(CONTROLS)
