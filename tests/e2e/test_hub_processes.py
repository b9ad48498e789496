"""`hetero-ee generate` with a Hugging Face id, as a process: what it prints, its exit codes, and signals."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.command_line import CLOSING_LINE, PLAIN, PROMPT, Cli, refused
from tests.hub_model import ID, SINGLE, files_of, in_shards, resolve
from tests.hub_server import DEAD_ADDRESS, Fault, Hub, digest

Start = Callable[..., "subprocess.Popen[str]"]
DOWNLOADING = f"Downloading {ID}, once ...\n"


@pytest.fixture
def start(hub_server: Hub, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a process that asks the Hub on this machine."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HF_ENDPOINT": hub_server.address,
        "HF_HOME": str(hub_cache.parent),
        "NO_PROXY": "127.0.0.1,localhost",
        "HETERO_EE_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)

    def started(*arguments: object, program: Sequence[str] = ("-m", "hetero_ee_cli")) -> "subprocess.Popen[str]":
        command = [sys.executable, *program, "generate", PROMPT, "-m", ID, *PLAIN, *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return started


def left_in(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.suffix == ".incomplete"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.sample(0)
def test_the_first_run_downloads_and_the_second_needs_no_network(
    start: Start, hub_server: Hub, tiny: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.publish(ID, tiny)
    with start() as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, said)
    assert err.startswith(DOWNLOADING) and re.fullmatch(CLOSING_LINE, err.removeprefix(DOWNLOADING))
    hub_server.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with start() as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, said) and re.fullmatch(CLOSING_LINE, err)
    assert hub_server.log == []


def test_without_the_hub_it_says_so_and_goes_on(
    cli: Cli, hub: Hub, tiny: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.publish(ID, tiny)
    resolve()
    monkeypatch.setattr(constants, "ENDPOINT", DEAD_ADDRESS)
    ended = cli("generate", PROMPT, "-m", ID, *PLAIN)
    assert (ended.code, ended.out) == (0, said)
    assert ended.err.startswith(f"localhost:9 cannot be reached; using {ID} from the cache.\n[ prompt")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["-m", "org/missing"], 1, "has no model org/missing, or it is private"),
        (["-m", ID, "--revision", "v2"], 1, f"{ID} has no revision v2"),
        (["-m", ID, "--revision", "../v2"], 2, "revision is '../v2'"),
        (["-m", "a/b..c", "--offline"], 2, "it is not a Hugging Face id either"),
        (["-m", ID, "--offline"], 1, "is not in the cache"),
        (["-m", ID, "--temp", "-1"], 2, "--temp is -1"),
        (["-m", ID], 28, "has 0 MiB free"),
    ],
    ids=["no model", "no revision", "impossible revision", "no id", "offline", "another option", "full disk"],
)
def test_a_refusal_is_one_line_and_a_code(
    cli: Cli,
    hub: Hub,
    tiny: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    usage = shutil.disk_usage(cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    hub.publish(ID, tiny)
    ended = cli("generate", PROMPT, *PLAIN, *arguments)
    assert refused(ended, cache) == code
    assert sentence in ended.err
    assert hub.fetched() <= {"config.json"}


@pytest.mark.few(1)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.sample(0)
def test_a_signal_ends_a_download_and_the_next_run_goes_on(
    start: Start, hub: Hub, hub_cache: Path, tiny: Path, sent: signal.Signals, code: int
) -> None:
    files = in_shards(files_of(tiny))
    hub.publish(ID, files)
    whole = "model-00001-of-00003.safetensors"
    slow = [content for name, content in files.items() if name.endswith(".safetensors") and name != whole]
    hub.faults += [Fault(digest(SINGLE, content), pause_s=0.5) for content in slow]
    with start() as process:
        wait_for(lambda: len(left_in(hub_cache)) == 2 and len(list(hub_cache.rglob(whole))) == 1)
        process.send_signal(sent)
        began_s = time.monotonic()
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - began_s < 5  # the rest would take 50 s
    assert (process.returncode, out, err) == (code, "", DOWNLOADING)
    assert left_in(hub_cache) == []
    hub.faults.clear()
    hub.log.clear()
    assert files_of(resolve()) == files
    assert hub.fetched() == {name for name in files if name.endswith(".safetensors")} - {whole}


@pytest.mark.sample(0)
def test_two_at_once_download_it_once(start: Start, hub_server: Hub, hub_cache: Path, tiny: Path, said: str) -> None:
    hub_server.publish(ID, tiny)
    hub_server.faults.append(Fault("/large/", pause_s=0.03))
    with start() as first, start() as second:
        for process in (first, second):
            out, _ = process.communicate(timeout=240)
            assert (process.returncode, out) == (0, said)
    assert len(hub_server.ranges()) == 1
    assert left_in(hub_cache) == []
