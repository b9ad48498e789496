"""hetero-ee as a process: its streams, its exit codes, and signals at bad moments."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from hetero_ee import Engine, GeneratedToken
from tests.command_line import CLOSING_LINE, PLAIN, PROMPT, Cli, stores


@contextmanager
def started(cache: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """`hetero-ee generate` as a process of its own, ended at the latest with the block."""
    environment = os.environ | {"HETERO_EE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hetero_ee_cli", "generate", "-t", "1", *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout and process.stderr
    return process.stdout, process.stderr


@pytest.fixture
def endless(own_tiny: Path) -> list[object]:
    """Arguments with which the model does not stop for a very long time."""
    (own_tiny / "generation_config.json").write_text('{"eos_token_id": 1000000}')
    config = own_tiny / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2**24}))
    return [PROMPT, "-m", own_tiny, "--quantizer", "none", "-c", 2**24]


def test_standard_output_is_the_text_and_nothing_else(tiny: Path, tmp_path: Path, said: str) -> None:
    with started(tmp_path / "cache", PROMPT, "-m", tiny, *PLAIN) as process:
        out, err = process.communicate()
    assert process.returncode == 0
    assert out == said.encode()
    assert re.fullmatch(CLOSING_LINE, err.decode())
    assert b"\x1b" not in out + err
    assert not (tmp_path / "cache").exists()


def test_help_comes_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hetero_ee_cli", "generate", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    for option in ("--model", "--file", "--max-new-tokens", "--temp", "--seed", "--stop", "--ctx-size", "--json"):
        assert option in ended.stdout
    imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in ended.stderr.splitlines()}
    assert "hetero_ee_cli" in imported
    assert not imported & {"torch", "transformers", "numpy", "safetensors", "rich"}
    assert "\x1b" not in ended.stdout


def test_text_streams_and_ctrl_c_keeps_what_was_said(endless: list[object], tmp_path: Path, said: str) -> None:
    with started(tmp_path / "cache", *endless) as process:
        out, _ = pipes(process)
        first = b""
        while len(first) < 100:
            first += (piece := os.read(out.fileno(), 4096))
            assert piece, "the process ended by itself"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=20)
    assert process.returncode == 130
    text = (first + rest).decode()
    assert text.startswith(said[:50])
    closing = re.fullmatch(CLOSING_LINE, err.decode())
    assert closing and int(closing[2]) >= 5


def test_ctrl_c_with_json_still_gives_the_document(
    cli: Cli, endless: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Engine.stream

    def stream(*arguments: Any, **changes: Any) -> Iterator[GeneratedToken]:
        for n_tokens, token in enumerate(real(*arguments, **changes)):
            if n_tokens == 7:
                os.kill(os.getpid(), signal.SIGINT)
            yield token

    monkeypatch.setattr(Engine, "stream", stream)
    monkeypatch.setattr("hetero_ee_cli.app.leave", sys.exit)
    ended = cli("generate", "-t", 1, *endless, "--json")
    document = json.loads(ended.out)
    assert (ended.code, document["finish_reason"], document["n_generated_tokens"]) == (130, "interrupted", 7)
    assert re.fullmatch(CLOSING_LINE, ended.err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["config", "show"], ["--help"], pytest.param(["generate", PROMPT, "-m", None, *PLAIN], marks=pytest.mark.full)],
)
def test_a_full_disk_under_standard_output_is_said_in_a_line(arguments: list[str | None], tiny: Path) -> None:
    command = [sys.executable, "-m", "hetero_ee_cli", *(argument or str(tiny) for argument in arguments)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 28
    assert re.fullmatch(r"hetero-ee: the output can't be written: the disk is full [^\n]+\n", ended.stderr)


@pytest.mark.sample(0)
def test_a_reader_that_goes_away_ends_it_quietly(endless: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "cache", *endless) as process:
        out, err = pipes(process)
        assert len(out.read(5)) == 5
        out.close()
        message = err.read()
        assert process.wait(timeout=20) == 141
    assert message == b""


@pytest.mark.few(1)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.sample(0)
def test_a_signal_in_a_conversion_says_that_it_can_be_gone_on_with(
    demo: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    cache = tmp_path / "cache"
    with started(cache, PROMPT, "-m", demo, "--quantizer", "search") as process:
        _, err = pipes(process)
        assert err.readline().startswith(b"Converting")
        assert stores(cache)
        process.send_signal(sent)
        out, rest = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, b"")
    (partial,) = stores(cache)
    store = partial.with_suffix("")
    assert rest == f"hetero-ee: the conversion to {store} has stopped; run it again to resume it.\n".encode()


@pytest.mark.few(1)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.sample(0)
def test_a_signal_in_the_compilation_keeps_the_store(
    tiny: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    cache = tmp_path / "cache"
    with started(cache, PROMPT, "-m", tiny, "--quantizer", "rtn") as process:
        _, err = pipes(process)
        assert err.readline() == b"Converting the weights, once ...\n"
        assert err.readline() == b"Compiling the CPU kernels, once ...\n"
        process.send_signal(sent)
        out, rest = process.communicate(timeout=30)
    assert (process.returncode, out, rest) == (code, b"", b"")
    (store,) = stores(cache)
    assert (store / "manifest.json").is_file()


@pytest.mark.parametrize(("sent", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_during_imports_ends_the_process_at_once(sent: str, code: int) -> None:
    program = f"""
import os, signal
from hetero_ee_cli.terminal.signals import ending_at_once
before = signal.getsignal(signal.{sent})
with ending_at_once():
    pass
assert signal.getsignal(signal.{sent}) == before
with ending_at_once():
    os.kill(os.getpid(), signal.{sent})
    import time; time.sleep(30)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=25)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"", b"")


def test_the_garbage_collector_scans_imports_only_at_exit() -> None:
    program = """
import gc
from hetero_ee_cli.terminal.signals import ending_at_once
with ending_at_once():
    assert not gc.isenabled()
    imported = [[] for _ in range(10)]
assert gc.isenabled() and not any(each is imported for each in gc.get_objects())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=25).returncode == 0
