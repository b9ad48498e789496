"""hetero-ee chat on a terminal: the real command behind a pseudo-terminal, with its keys."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chat_support import LINES

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

CTRL_C, CTRL_D, TAB, UP = b"\x03", b"\x04", b"\t", b"\x1b[A"
PROMPT = "> "
CLOSING = r"\[ prompt \d+ new \+ \d+ cached tok[^\]\n]*\]"
LIMIT_S = 60


class Terminal:
    """The command, what it has shown so far, and the keys it gets."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._read_up_to = 0
        self.shown = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "hetero_ee_cli", "chat", *arguments], environment)

    def press(self, keys: bytes | str) -> None:
        """Ctrl-D must wait for a prompt: before, the system takes it for the end of a line."""
        os.write(self._terminal, keys.encode() if isinstance(keys, str) else keys)

    def enter(self, line: str) -> None:
        self.press(line + "\r")

    def press_ctrl_c_at_the_prompt(self) -> None:
        """Python warnings a signal once it waits for keys, a moment after the prompt is shown, and not before."""
        time.sleep(0.5)
        self.press(CTRL_C)

    def wait_for(self, pattern: str) -> str:
        """What is shown up to and with the next match."""
        ends_s = time.monotonic() + LIMIT_S
        while not (found := re.compile(pattern).search(self.shown, self._read_up_to)):
            assert self._read_more(ends_s - time.monotonic()), f"no {pattern!r} in {self.shown[self._read_up_to :]!r}"
        text = self.shown[self._read_up_to : found.end()]
        self._read_up_to = found.end()
        return text

    def exit_code(self) -> int:
        ends_s = time.monotonic() + LIMIT_S
        while self._read_more(ends_s - time.monotonic()):
            pass
        assert time.monotonic() < ends_s, f"it does not end: {self.shown[self._read_up_to :]!r}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self._terminal)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            return

    def _read_more(self, seconds: float) -> bool:
        if not select.select([self._terminal], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        self.shown += data.decode("utf-8", "replace")
        return bool(data)


@pytest.fixture
def arguments(own_tiny: Path) -> list[str]:
    """A model with a template; a reply to it would go on for a very long time."""
    (own_tiny / "chat_template.jinja").write_text(LINES)
    (own_tiny / "generation_config.json").write_text('{"eos_token_id": 1000000}')
    return [str(own_tiny), "-t", "1", "--quantizer", "none"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folders = {"HETERO_EE_CACHE_DIR": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    return {**os.environ, **folders, "OMP_NUM_THREADS": "1", "TERM": "dumb"}


@pytest.fixture
def terminal(arguments: list[str], environment: dict[str, str]) -> Iterator[Terminal]:
    """A chat with replies of 8 tokens, at its first prompt."""
    opened = Terminal([*arguments, "-n", "8"], environment)
    opened.wait_for(rf"Loading {re.escape(arguments[0])} \.\.\.")  # long before torch is imported
    opened.wait_for(PROMPT)
    yield opened
    opened.close()


@pytest.fixture
def endless(arguments: list[str], environment: dict[str, str]) -> Iterator[Terminal]:
    """A chat with replies that do not end, at its first prompt."""
    opened = Terminal([*arguments, "-c", str(2**24)], environment)
    opened.wait_for(PROMPT)
    yield opened
    opened.close()


def renderers(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("end", ["/exit\r", "/quit\r", CTRL_D], ids=["exit", "quit", "ctrl-d"])
@pytest.mark.sample(0)
def test_a_chat_and_its_ends(terminal: Terminal, end: str) -> None:
    assert "/help lists the commands" in terminal.shown
    terminal.enter("Hi")
    terminal.wait_for(CLOSING)
    terminal.wait_for(PROMPT)
    terminal.enter("")
    terminal.wait_for(PROMPT)
    (renderer,) = renderers(terminal.pid)
    terminal.press(end)
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.shown and not renderer.is_running()


@pytest.mark.sample(0)
def test_a_first_message_is_shown_as_if_typed(arguments: list[str], environment: dict[str, str]) -> None:
    opened = Terminal([*arguments, "-n", "8", "-p", "Hi there"], environment)
    opened.wait_for("> Hi there\r\n")
    opened.wait_for(CLOSING)
    opened.wait_for(PROMPT)
    opened.press(CTRL_D)
    assert opened.exit_code() == 0
    opened.close()


@pytest.mark.sample(0)
def test_ctrl_c_stops_the_reply_alone(endless: Terminal) -> None:
    endless.enter("Hi")
    for _ in range(2):
        endless.wait_for("\n[^\n]{40}")
        (renderer,) = renderers(endless.pid)
        endless.press(CTRL_C)
        endless.wait_for(CLOSING)
        endless.wait_for(PROMPT)
        assert renderers(endless.pid) == [renderer]
        endless.enter("And you?")
    endless.wait_for("\n[^\n]{40}")
    endless.press(CTRL_C)
    assert " 0 cached" not in endless.wait_for(CLOSING)
    endless.wait_for(PROMPT)
    endless.enter("/stats")
    assert "6 messages" in endless.wait_for("tokens in the context")
    endless.wait_for(PROMPT)
    endless.press(CTRL_D)
    assert endless.exit_code() == 0
    assert "Traceback" not in endless.shown


@pytest.mark.sample(0)
def test_ctrl_c_at_the_prompt_leaves_the_second_time(terminal: Terminal) -> None:
    terminal.press("half a mess")
    terminal.wait_for("half a mess")
    terminal.press_ctrl_c_at_the_prompt()
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for(PROMPT)
    terminal.enter("Hi")  # a message in between makes the next one the first again
    terminal.wait_for(CLOSING)
    terminal.wait_for(PROMPT)
    terminal.enter('"""')
    terminal.wait_for(r"\. ")
    terminal.press_ctrl_c_at_the_prompt()
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for(PROMPT)
    terminal.press_ctrl_c_at_the_prompt()
    assert terminal.exit_code() == 130
    assert terminal.shown.count("Ctrl-C again") == 2 and "Traceback" not in terminal.shown


@pytest.mark.sample(0)
def test_sigterm_ends_a_chat_that_waits(terminal: Terminal) -> None:
    (renderer,) = renderers(terminal.pid)
    time.sleep(0.5)  # as for Ctrl-C
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.exit_code() == 143
    renderer.wait(timeout=10)


@pytest.mark.sample(0)
def test_a_killed_chat_leaves_no_process(terminal: Terminal) -> None:
    (renderer,) = renderers(terminal.pid)
    os.kill(terminal.pid, signal.SIGKILL)
    renderer.wait(timeout=10)


@pytest.mark.sample(0)
def test_what_is_wrong_is_a_line_and_the_chat_goes_on(terminal: Terminal) -> None:
    for keys, sentence in (
        ("/rgen", "there is no command '/rgen'; /help lists them"),
        ("/regen", "there is no reply yet"),
        ("the " * 700, "the context limit is 600"),
        (b"ab\xff", "that line is not UTF-8 text"),
    ):
        terminal.press(keys)
        terminal.press("\r")
        terminal.wait_for(re.escape(sentence))
        terminal.wait_for(PROMPT)
    terminal.enter("Hi")
    terminal.wait_for(CLOSING)
    terminal.wait_for(PROMPT)
    terminal.press(CTRL_D)
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.shown


@pytest.mark.sample(0)
def test_messages_of_several_lines(terminal: Terminal) -> None:
    for text in ('"""\rHi\rthere\r"""\r', "Hi\\\rthere\r"):
        terminal.press(text)
        terminal.wait_for(r"\. ")
        terminal.wait_for(CLOSING)
        terminal.wait_for(PROMPT)
    terminal.enter("/stats")
    assert "4 messages" in terminal.wait_for("tokens in the context")


@pytest.mark.sample(0)
def test_history_and_completion(arguments: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("readline", reason="this Python has no readline")
    for number in range(2):
        terminal = Terminal([*arguments, "-n", "3"], environment)
        terminal.wait_for(PROMPT)
        if number == 0:
            terminal.enter("a message to remember")
        else:
            terminal.press(UP * 2 + b"\r")
            terminal.wait_for("a message to remember")
        terminal.wait_for(CLOSING)
        terminal.wait_for(PROMPT)
        terminal.press(b"/st" + TAB + b"\r")
        terminal.wait_for("tokens in the context")
        os.kill(terminal.pid, signal.SIGKILL)  # what was entered is kept all the same
        terminal.close()
    (history,) = (tmp_path / "state").rglob("chat_history")
    assert history.read_text().splitlines() == ["a message to remember", "/stats", "a message to remember", "/stats"]
    assert history.stat().st_mode & 0o777 == 0o600


@pytest.mark.sample(0)
def test_the_history_is_bounded_and_no_condition(
    arguments: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("readline", reason="this Python has no readline")
    file = tmp_path / "state" / "hetero_ee" / "chat_history"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"line {number}\n" for number in range(1500)))
    file.chmod(0o644)
    terminal = Terminal([*arguments, "-n", "3"], environment)
    terminal.wait_for(PROMPT)
    terminal.enter("/clear")
    terminal.wait_for(PROMPT)
    terminal.press(CTRL_D)
    assert terminal.exit_code() == 0
    terminal.close()
    kept = file.read_text().splitlines()
    assert len(kept) == 1000 and kept[-2:] == ["line 1499", "/clear"]
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    file.mkdir(mode=0o755)
    terminal = Terminal([*arguments, "-n", "3"], environment)
    terminal.wait_for(PROMPT)
    terminal.enter("Hi")
    terminal.wait_for(CLOSING)
    terminal.wait_for(PROMPT)
    terminal.press(CTRL_D)
    assert terminal.exit_code() == 0
    terminal.close()
    assert file.stat().st_mode & 0o777 == 0o755  # what is no file is left alone


@pytest.mark.sample(0)
def test_standard_output_is_the_replies_even_where_a_terminal_types(
    arguments: list[str], environment: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hetero_ee_cli", "chat", *arguments, "-n", "8"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=theirs, stdout=pipe, stderr=pipe, env=environment) as process:
        os.close(theirs)
        os.write(ours, b"Hi\nAnd you?\n/exit\n")
        out, err = process.communicate(timeout=LIMIT_S)
        os.close(ours)
    assert process.returncode == 0
    assert err.count(PROMPT.encode()) == 3 and len(re.findall(CLOSING, err.decode())) == 2
    piped = subprocess.run(command, input=b"Hi\nAnd you?\n", capture_output=True, env=environment, check=True)
    assert out == piped.stdout and b"\x1b" not in out
