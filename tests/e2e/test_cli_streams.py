"""Standard streams that are closed, narrow or a terminal, and Ctrl-C before anything is ready: never a traceback."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bad_models import CONFIG, TOKENIZER, Spoil, content, edit_header, edit_json
from tests.chat_support import LINES
from tests.command_line import CLOSING_LINE, PLAIN, PROMPT
from tests.emulation import LAPTOP

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

NOTHING: Mapping[str, str] = {}
COMMAND = [sys.executable, "-m", "hetero_ee_cli"]
DIM_PROMPT = f"\x1b[2m{PROMPT}\x1b[0m"
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


def without(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """hetero-ee under a shell that closes a stream."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *map(str, arguments)]
    return subprocess.run(shell, input=b"".decode(), capture_output=True, text=True, timeout=60)


@pytest.mark.sample(0)
def test_a_remark_on_a_terminal_leaves_standard_output_alone(tiny: Path, said: str) -> None:
    """Standard error is a terminal and standard output a pipe; a context beyond training is remarked on."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, "generate", PROMPT, "-m", str(tiny), *map(str, PLAIN), "-c", "9999"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False)
    os.close(theirs)
    seen = os.read(ours, 65536).decode()
    os.close(ours)
    assert (ended.returncode, ended.stdout) == (0, said)
    assert "quality may degrade beyond them." in seen and ".." not in seen


@pytest.mark.sample(0)
def test_closed_streams_of_a_quick_command() -> None:
    assert without(">&-", "config", "show").returncode == 0
    ended = without("<&-", "models", "remove", "x")
    assert ended.returncode == 2 and re.fullmatch(r"hetero-ee: [^\n]+\n", ended.stderr)


@pytest.mark.sample(0)
def test_closed_standard_output(tiny: Path) -> None:
    ended = without(">&-", "generate", PROMPT, "-m", tiny, *PLAIN)
    assert (ended.returncode, ended.stdout) == (0, "") and re.fullmatch(CLOSING_LINE, ended.stderr)
    assert without(">&- 2>&-", "generate", PROMPT, "-m", tiny, *PLAIN).returncode == 0


@pytest.mark.sample(0)
def test_closed_standard_input(tiny: Path, said: str) -> None:
    assert without("<&-", "generate", PROMPT, "-m", tiny, *PLAIN).stdout == said
    ended = without("<&-", "generate", "-", "-m", tiny, *PLAIN)
    assert ended.returncode == 2 and re.fullmatch(r"hetero-ee: [^\n]+\n", ended.stderr)
    assert "Traceback" not in without("<&-", "chat", tiny, *PLAIN).stderr


@pytest.mark.sample(0)
def test_an_encoding_without_the_signs_of_a_table(tmp_path: Path) -> None:
    arguments = ["bench", "--random-weights", "tinyllama-1.1b", "-p", "1", "-n", "0", "-r", "1", "--quick", "-t", "1"]
    program = f"""
import sys
from hetero_ee_cli.commands import bench
from hetero_ee_cli.reports import bench_table
from hetero_ee_cli.app import main
row = dict(model_filename="m", model_type="m int4", model_size=1, model_n_params=1, n_threads=1, mode="full",
           test="pp1", avg_ts=1.0, stddev_ts=0.5, predicted_ts=None, acceptance=None, reading_shares=None,
           samples_ns=[1, 2])
bench._rows = lambda *_, **__: iter([row])
bench._compare_speed = lambda *_: None
bench_table.footer = lambda rows: "caf\\u00e9"
from hetero_ee_profiles.reference import reference_profile
from hetero_ee_cli.commands import profile
profile.profile_for = lambda *_, **__: reference_profile("{LAPTOP}")
sys.argv = ["hetero-ee", *{arguments!r}]
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, env=os.environ | ASCII, timeout=60)
    assert ended.returncode == 0 and ended.stderr == b""
    assert b"| pp1 | 1.00 +- 0.50 |" in ended.stdout and ended.stdout.endswith(b"caf?\n")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", PROMPT]])
@pytest.mark.sample(1)
def test_ctrl_c_while_the_command_line_is_imported(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hetero_ee_cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr
        for line in process.stderr:
            if b"typer.models" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"") and b"Traceback" not in err


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [["chat"], ["bench"], ["profile"]])
@pytest.mark.sample(0)
def test_ctrl_c_while_torch_imports_numpy(arguments: list[str], tmp_path: Path) -> None:
    """torch forgets an exception that is raised meanwhile."""
    program = f"""
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "numpy.linalg":
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
from hetero_ee_cli.__main__ import main
sys.argv = ["hetero-ee", *{arguments!r}]
main()
"""
    places = {"HETERO_EE_CACHE_DIR": str(tmp_path), "HETERO_EE_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, input=b"Hi", capture_output=True, env=os.environ | places, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def on_terminal(
    *arguments: object, stdin: bytes | None = None, stdout: int | None = None, environment: Mapping[str, str] = NOTHING
) -> tuple[int, str]:
    """hetero-ee on a terminal: its code, and what the terminal shows. stdin, stdout: instead of the terminal."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, *map(str, arguments)]
    known = {**os.environ, "TERM": "xterm"} | dict(environment)
    known.pop("NO_COLOR", None) if "NO_COLOR" not in environment else None
    output = theirs if stdout is None else stdout
    keys = theirs if stdin is None else subprocess.PIPE
    with subprocess.Popen(command, stdin=keys, stdout=output, stderr=theirs, env=known) as process:
        os.close(theirs)
        if process.stdin:
            process.stdin.write(stdin or b"")
            process.stdin.close()
        shown = b""
        while True:
            try:
                shown += (piece := os.read(ours, 65536))
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not piece:
                break
    os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")


@pytest.mark.sample(0)
def test_a_terminal_shows_the_prompt_dim_before_the_text(tiny: Path, said: str, tmp_path: Path) -> None:
    arguments = ["generate", PROMPT, "-m", tiny, *PLAIN]
    code, shown = on_terminal(*arguments)
    assert code == 0 and f"{DIM_PROMPT}{said}\n" in shown
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert f"{PROMPT}{said}\n" in on_terminal(*arguments, environment=plain)[1]
    with (tmp_path / "text").open("wb") as file:
        code, shown = on_terminal(*arguments, stdout=file.fileno())
    assert code == 0 and PROMPT not in shown and (tmp_path / "text").read_text() == said


# Texts and names that would command a terminal.

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
CONTROLS = f"{CLIPBOARD}\x1b[31m\x9b2J\x7f\b"
SEEN = "\ufffd]52;c;cm0gLXJm\ufffd\ufffd[31m\ufffd2J\ufffd\ufffd"
NAMED = f"evil{CLIPBOARD}\x9b2J\u202egnp"
OURS = re.compile(r"\x1b\[(?:[\d;]*[AKm]|\?25[hl])|\r|\x1b\[\?2004[hl]")  # colours, bars and readline


@pytest.fixture(scope="session")
def commanding(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text is full of control characters, and whose folder's name has some."""
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("models") / NAMED))
    replaced = {"type": "Replace", "pattern": {"String": "e"}, "content": f"e{CONTROLS}"}
    edit_json(TOKENIZER, lambda values: spoil_decoder(values, replaced))(folder)
    (folder / "chat_template.jinja").write_text(LINES)
    return folder


def spoil_decoder(values: dict[str, Any], replaced: dict[str, Any]) -> None:
    values["decoder"] = {"type": "Sequence", "decoders": [values["decoder"], {"type": "Fuse"}, replaced]}


def unsafe(shown: str) -> list[str]:
    """What a terminal would obey and is not ours."""
    return [c for c in OURS.sub("", shown) if unicodedata.category(c) == "Cc" and c not in "\n\t"]


@pytest.mark.few(2)
@pytest.mark.parametrize("command", ["generate", "run", "chat"])
@pytest.mark.sample(0)
def test_generated_text_does_not_command_a_terminal(commanding: Path, command: str) -> None:
    words = ["generate", PROMPT, "-m", commanding] if command == "generate" else [command, commanding]
    stdin = None if command == "generate" else f"{PROMPT}\n".encode()
    code, shown = on_terminal(*words, *PLAIN, stdin=stdin)
    assert code == 0 and SEEN in shown and not unsafe(shown) and "\x1b[31m" not in shown
    piped = subprocess.run([*COMMAND, *map(str, [*words, *PLAIN])], input=stdin, capture_output=True, timeout=60)
    assert piped.returncode == 0 and CONTROLS.encode() in piped.stdout and unsafe(piped.stderr.decode()) == []


def wrong_template(folder: Path) -> None:
    message = CONTROLS.encode("unicode_escape").decode()
    (folder / "chat_template.jinja").write_text("{{ raise_exception('" + message + "') }}")


FAILURES: dict[str, tuple[Spoil, list[str]]] = {
    "a path": (lambda folder: (folder / CONFIG).unlink(), ["generate", PROMPT, "-m"]),
    "a tensor": (edit_header(lambda header: header.update({NAMED: header.pop("model.norm.weight")})), ["run"]),
    "an architecture": (edit_json(CONFIG, lambda values: values.update(architectures=[NAMED])), ["plan"]),
    "a template": (wrong_template, ["chat"]),
    "a field": (content("special_tokens_map.json", json.dumps({NAMED: 1}).encode()), ["generate", PROMPT, "-m"]),
    "a bench": (lambda folder: (folder / CONFIG).write_text("{"), ["bench", "-m"]),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.sample(0)
def test_names_in_errors_do_not_command_a_terminal(commanding: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(commanding, tmp_path / NAMED))
    spoil, words = FAILURES[name]
    spoil(folder)
    code, shown = on_terminal(*words, folder, stdin=f"{PROMPT}\n".encode())
    assert code in (1, 2) and "hetero-ee: " in shown and not unsafe(shown)
    assert "\u202e" not in shown and CLIPBOARD not in shown


@pytest.mark.few(3)
@pytest.mark.parametrize("command", [["models"], ["doctor"], ["config", "show"], ["convert", "{}"], ["plan", "{}"]])
@pytest.mark.sample(1)
def test_names_in_reports_do_not_command_a_terminal(
    commanding: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars, colours and tables with a cache and a model of such names."""
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", str(tmp_path / NAMED))
    code, shown = on_terminal(*(word.format(commanding) for word in command), stdin=b"")
    assert code in (0, 1, 2) and shown and "Traceback" not in shown and not unsafe(shown) and "\u202e" not in shown
