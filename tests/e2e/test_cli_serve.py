"""`hetero-ee serve` as a process, and what it refuses before it opens a model."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from hetero_ee import HeteroError, UsageError
from hetero_ee_cli.app import app
from hetero_ee_cli.commands import serve
from tests.command_line import Cli
from tests.server_support import ENDLESS


@pytest.mark.parametrize(
    ("number", "log"), [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow)]
)
@pytest.mark.sample(0)
def test_a_signal_ends_it_and_its_streams(tiny: Path, empty_cache: Path, number: signal.Signals, log: bool) -> None:
    words = ["serve", str(tiny), "--port", "0", "--quantizer", "none", "-t", "1", "--alias", "me", "--temp", "0"]
    command = [sys.executable, "-m", "hetero_ee_cli", *words, *([] if log else ["--no-access-log"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stderr.readline()
        try:
            found = re.fullmatch(r"me is served at (http://127\.0\.0\.1:\d+); chat page: \1/; Ctrl-C ends it\.\n", line)
            assert found, line + process.stderr.read()
            body = ENDLESS | {"prompt": "Tom", "max_tokens": 550, "stream": True}
            with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, timeout=30) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(number)
                assert any("shutting down" in each for each in lines)
            assert process.wait(15) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        finally:
            process.kill()
        line = r"[\d-]+ [\d:]+ POST /v1/completions 200 \d+\.\d{3} s, \d+ \+ \d+ tokens\n"
        assert process.stdout.read() == "" and re.fullmatch(line if log else "", process.stderr.read())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "give an --api-key, or --insecure"),
        (["--port", "99999"], "port is 99999"),
        (["--parallel", "0"], "--parallel is 0"),
        (["--api-key", "a", "--api-key-file", __file__], "give one key"),
        (["--api-key-file", "not there"], "API key from not there can't be read"),
        (["--cors-origin", "*"], "--cors-origin is"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--temp", "-1"], "-1"),
    ],
)
def test_what_makes_no_sense_is_refused(empty_cache: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        app(["serve", *words], standalone_mode=False)
    assert not empty_cache.exists()


def test_a_port_that_is_taken_is_named(empty_cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"can't listen on 127.0.0.1:{port} .*choose another --port"):
            app(["serve", "--port", str(port)], standalone_mode=False)


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.setattr(serve, "EXTRA", ("no_such_package",))
    with pytest.raises(HeteroError, match=r"^serve needs no_such_package, .* pip install 'hetero-ee\[server\]'\.$"):
        app(["serve"], standalone_mode=False)


@pytest.mark.parametrize(("words", "n_sequences"), [([], 5), (["--parallel", "2"], 3)])
def test_the_plan_counts_all_slots(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], n_sequences: int
) -> None:
    """And the extra one of short prompts."""
    opened: list[dict[str, object]] = []

    def refuse(options: dict[str, object], *_: object) -> None:
        opened.append(options)
        raise HeteroError("no more than that.")

    monkeypatch.setattr(serve, "open_engine", refuse)
    cli("serve", tiny, "--port", 0, *words)
    assert [each["n_sequences"] for each in opened] == [n_sequences]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_what_is_loaded(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    def refuse(*_: object) -> None:
        raise HeteroError("no more than that.")

    monkeypatch.setattr("hetero_ee_cli.terminal.output.is_terminal", lambda: is_terminal)
    monkeypatch.setattr(serve, "open_engine", refuse)
    ended = cli("serve", tiny, "--port", 0)
    line = f"Loading {tiny} ...\n" if is_terminal else ""
    assert ended.err == f"{line}hetero-ee: no more than that.\n"
