"""Habits that users bring along: flags by their names in llama.cpp, run, pull and search, names of converted models."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine
from hetero_ee_cli.terminal.progress import _Lines
from tests.chat_support import LINES
from tests.command_line import CLOSING_LINE, N_TOKENS, PLAIN, PROMPT, Cli, refused, stores
from tests.hub_server import DEAD_ADDRESS, Fault, Hub

PAPER = ["plan", "--random-weights", "llama-2-7b", "--hardware", "rtx-4060-laptop-8gb", "-c", 512, "--json"]
SMALL = ["-t", 1, "-n", 5, "--quantizer", "rtn"]
TIMES = (
    *(
        "importing libraries",
        "load time",
        "time to first token",
        "prompt eval count",
        "prompt eval duration",
        "prompt eval rate",
    ),
    *("eval count", "eval duration", "eval rate", "total duration"),
)


# Flags.


def test_layers_as_llama_cpp_takes_them(cli: Cli) -> None:
    def plan_hash(*arguments: object) -> str:
        ended = cli(*PAPER, *arguments)
        assert ended.code == 0, ended.err
        return ended.out

    assert plan_hash("-ngl", 99) == plan_hash("-ngl", "all") == plan_hash("--n-gpu-layers=-2")
    assert plan_hash("-ngl", "all") == plan_hash("--gpu-layers", 32) != plan_hash("-ngl", 3)
    assert plan_hash("-ngl", "auto") == plan_hash("-ngl", -1) == plan_hash()
    assert plan_hash("-ot", r"layers\..*\.ffn=CPU") == plan_hash("--override-tensor", r"layers\..*\.ffn=cpu")
    assert plan_hash("--vram-margin", 1) == plan_hash() != plan_hash("--vram-margin", 3.5)


def test_where_the_prompt_stands(cli: Cli, tiny: Path, said: str) -> None:
    for arguments in (["-p", PROMPT], ["--prompt", PROMPT], [PROMPT]):
        assert cli("generate", *arguments, "-m", tiny, *PLAIN).out == said
    for arguments in (["-p", PROMPT, PROMPT], ["-p", PROMPT, "-f", "x"]):
        assert "give one prompt" in cli("generate", *arguments, "-m", tiny, *PLAIN).err


def test_lengths_and_seeds_as_llama_cpp_has_them(cli: Cli, tiny: Path) -> None:
    texts = [cli("generate", PROMPT, "-m", tiny, *PLAIN[:-2], flag, 7).out for flag in ("-n", "--predict")]
    assert texts[0] == texts[1]
    endless = cli("generate", PROMPT, "-m", tiny, *PLAIN[:-2], "-n", -1, "-c", 64, "--json")
    assert json.loads(endless.out)["finish_reason"] in ("context", "stop")
    seeds = {cli("generate", PROMPT, "-m", tiny, *PLAIN, "--temp", 1, "-s", -1).err.split("seed")[1] for _ in range(2)}
    assert len(seeds) == 2


def test_verbose_tells_times_and_rates_below_the_text(cli: Cli, tiny: Path, said: str) -> None:
    ended = cli("generate", PROMPT, "-m", tiny, *PLAIN, "-v")
    lines = ended.err.splitlines()
    assert ended.out == said and [line.partition(":")[0] for line in lines[1:]] == list(TIMES)
    shown = dict(re.split(r": +", line) for line in lines[1:])
    assert shown["eval count"] == f"{N_TOKENS} tokens" and shown["prompt eval count"] == "5 tokens"
    seconds = [float(shown[name].split()[0]) for name in ("load time", "prompt eval duration", "eval duration")]
    assert float(shown["total duration"].split()[0]) == pytest.approx(sum(seconds), abs=0.01)
    assert "time to first token" not in cli("generate", PROMPT, "-m", tiny, *PLAIN).err


def test_verbose_names_the_stages_of_a_first_start_with_their_seconds(cli: Cli, tiny: Path) -> None:
    first, second = (cli("generate", PROMPT, "-m", tiny, *SMALL, "-v").err for _ in range(2))
    for stage in ("importing libraries", "converting the weights"):
        assert re.search(rf"^{stage}: +\d+\.\d{{3}} s$", first, re.MULTILINE)
    assert "load time" in second and "converting" not in second


def test_a_pipe_gets_the_text_alone(cli: Cli, tiny: Path, said: str) -> None:
    for arguments in (["generate", PROMPT, "-m", tiny], ["run", tiny, PROMPT]):
        assert cli(*arguments, *PLAIN).out == said


@pytest.mark.sample(0)
def test_a_terminal_gets_newlines_after_the_text(tiny: Path) -> None:
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hetero_ee_cli", "generate", PROMPT, "-m", str(tiny), *PLAIN]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=True)
    shown = os.read(ours, 2**16)
    os.close(ours)
    os.close(theirs)
    assert shown.endswith(b"\r\n\r\n") and done.stderr.startswith(b"[ prompt")


def test_a_text_that_the_context_cuts_says_so(cli: Cli, own_tiny: Path) -> None:
    (own_tiny / "generation_config.json").write_text('{"eos_token_id": 1000000}')
    arguments = ["generate", PROMPT, "-m", own_tiny, "-t", 1, "--quantizer", "none", "-c", 20]
    ended = cli(*arguments)
    assert re.fullmatch(r"\(The context of 20 tokens is full; the text ends here\.\)\n" + CLOSING_LINE, ended.err)
    assert re.fullmatch(CLOSING_LINE, cli(*arguments, "-n", 3).err)


def test_a_variable_that_means_nothing_is_told_once(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_EE_THREAD", "2")
    ended = cli("generate", PROMPT, "-m", tiny, *PLAIN)
    assert ended.code == 0 and ended.err.count("HETERO_EE_THREAD. Did you mean HETERO_EE_THREADS?") == 1
    assert cli("doctor").err.count("HETERO_EE_THREAD") == 0  # it is in the table


def test_long_work_without_a_terminal_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter((0, 4, 11, 12, 25, 30, 50, 51))
    lines = _Lines(quiet=True, clock=lambda: float(next(now)))
    for n_done in (0, 10, 20, 30, 60, 100):
        lines.update("Converting", n_done, 100)
    lines.update("Converting", 0, 50)  # another one, long after
    lines.update("Converting", 25, 50)
    assert capsys.readouterr().err == "Converting: 20%\nConverting: 60%\n"


@pytest.mark.parametrize(("n_at_start", "n_all", "share"), [(0, 25, "20%"), (15, 40, "50%")])
def test_a_line_about_bytes_has_their_rate_and_the_time_left(
    n_at_start: int, n_all: int, share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was there at the start, of a conversion that was interrupted, took no time."""
    now = iter((0, 20))
    lines = _Lines(quiet=True, clock=lambda: float(next(now)))
    for n_done in (n_at_start, n_at_start + 5):
        lines.update("Converting the weights", n_done * 10**9, n_all * 10**9)
    assert capsys.readouterr().err == f"Converting the weights: {share}, 250.0 MB/s, 1 min 20 s left\n"


# Names of converted models.


@pytest.fixture
def store(cli: Cli, tiny: Path, cache: Path) -> Path:
    """The tiny model, converted into the cache."""
    ended = cli("pull", tiny, "-t", 1, "--quantizer", "rtn")
    (made,) = stores(cache)
    assert (ended.code, ended.out) == (0, f"{made}\n")
    return made


def test_a_listed_name_works_wherever_a_model_is_asked_for(cli: Cli, store: Path) -> None:
    text = cli("generate", PROMPT, "-m", store, *SMALL).out
    for name in (store.name, "tiny", "tiny-r"):
        assert cli("generate", PROMPT, "-m", name, *SMALL).out == text
    for arguments in (["plan", "--hardware", "rtx-4060-laptop-8gb"], ["pull"], ["simulate", "-n", 2, "-t", 1]):
        assert cli(*arguments, "tiny").code == cli(*arguments, "--model", "tiny").code == 0
    with Engine.from_pretrained("tiny", threads=1) as engine:
        assert engine.generate(PROMPT, max_new_tokens=5).text == text


def test_a_folder_goes_before_a_listed_name_and_that_before_an_id(
    cli: Cli, store: Path, own_tiny: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("tiny", own_tiny)
    assert cli("pull", "tiny").out == f"{store}\n" and not hub.log
    monkeypatch.chdir(own_tiny.parent)
    (own_tiny / "config.json").write_text("{")
    assert "not valid JSON" in cli("pull", "tiny").err


def test_a_name_that_nothing_has(cli: Cli, store: Path, hub: Hub, cache: Path) -> None:
    ended = cli("generate", PROMPT, "-m", "tniy-rtn", *SMALL)
    assert ended.code == 1 and f"Did you mean {store.name}, which hetero-ee models lists?" in ended.err
    assert "Did you mean" not in cli("generate", PROMPT, "-m", "other", *SMALL).err
    (store.parent / f"{store.name}2").symlink_to(store)
    assert "is the beginning of 2 stores' names" in cli("generate", PROMPT, "-m", "tiny", *SMALL).err


# run, pull, search.


@pytest.fixture
def talker(own_tiny: Path) -> Path:
    """A model with a chat template."""
    (own_tiny / "chat_template.jinja").write_text(LINES)
    return own_tiny


def test_run_chats_where_there_is_a_template(cli: Cli, talker: Path) -> None:
    piped = cli("run", talker, *PLAIN, stdin=b"Hi\n")
    assert piped.code == 0 and "cached tok" in piped.err
    assert cli("chat", talker, *PLAIN, stdin=b"Hi\n").out == piped.out
    for arguments in ([talker, "Hi"], [talker, "-p", "Hi"], ["-m", talker, "Hi"], [talker, "-"]):
        assert cli("run", *arguments, *PLAIN, stdin=b"Hi").out == piped.out
    two = cli("chat", talker, *PLAIN, "-p", "Hi", stdin=b"And you?\n").out
    assert two == cli("chat", talker, *PLAIN, stdin=b"Hi\nAnd you?\n").out != piped.out


def test_run_continues_a_text_where_there_is_none(cli: Cli, tiny: Path, said: str, tmp_path: Path) -> None:
    assert cli("run", tiny, PROMPT, *PLAIN).out == said
    assert cli("run", tiny, *PLAIN, stdin=PROMPT.encode()).out == said
    template = tmp_path / "lines.jinja"
    template.write_text(LINES)
    assert "cached tok" in cli("run", tiny, "Hi", *PLAIN, "--chat-template-file", template).err


def test_pull_fetches_and_converts_and_runs_nothing(cli: Cli, tiny: Path, hub: Hub, cache: Path) -> None:
    hub.publish("some-org/Tiny", tiny)
    ended = cli("pull", "some-org/Tiny", "-t", 1)
    (made,) = stores(cache)
    assert (ended.code, ended.out) == (0, f"{made}\n") and "Measuring" not in ended.err
    hub.log.clear()
    assert cli("pull", "some-org_Tiny").out == ended.out and not hub.log


def listed(name: str, architecture: str = "Qwen3ForCausalLM", **more: Any) -> dict[str, Any]:
    total = {"parameters": {"BF16": 4 * 10**9}, "total": 4 * 10**9}
    config = {"architectures": [architecture]} | more.pop("config", {})
    return {"id": name, "modelId": name, "downloads": 12345, "config": config, "safetensors": total} | more


@pytest.fixture
def shelf(hub: Hub) -> Iterator[Hub]:
    """A Hub with something to be found."""
    hub.listed = [
        listed("Qwen/Qwen3-4B"),
        listed("Qwen/Qwen3-4B-HQQ", config={"quantization_config": {"quant_method": "hqq"}}),
        listed("other/Qwen3-Mamba", "MambaForCausalLM"),
        listed("meta/Llama-qwen3", "LlamaForCausalLM", gated="manual", safetensors=None),
        listed("else/Mistral", "MistralForCausalLM"),
    ]
    yield hub


def test_search_lists_what_can_be_run(cli: Cli, shelf: Hub) -> None:
    ended = cli("search", "qwen3")
    head, *rows = ended.out.splitlines()
    assert ended.code == 0 and head.split("  ")[0] == "model"
    assert [row.split() for row in rows] == [
        ["Qwen/Qwen3-4B", "4.00", "B", "2.1", "GiB", "12,345", "open"],
        ["meta/Llama-qwen3", "?", "?", "12,345", "gated"],
    ]
    document = json.loads(cli("search", "qwen3", "--limit", 1, "--json").out)
    assert [model["name"] for model in document["models"]] == ["Qwen/Qwen3-4B"]
    nothing = cli("search", "xyz")
    assert (nothing.code, nothing.out) == (0, "") and nothing.err.startswith("0 models")


def test_a_search_without_a_hub_ends_in_a_sentence(
    cli: Cli, shelf: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.faults.append(Fault("/api/models", status=404, times=1))
    assert refused(cli("search", "qwen3"), cache) == 1
    shelf.faults.append(Fault("/api/models", corrupt=True, times=1))
    assert refused(cli("search", "qwen3"), cache) == 1
    assert "offline" in cli("search", "qwen3", "--offline").err
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", DEAD_ADDRESS)
    ended = cli("search", "qwen3")
    assert refused(ended, cache) == 1 and "localhost:9 cannot be reached" in ended.err
