"""`hetero-ee simulate`: the real text, times that say that they are not measured, and one sentence where it can't."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.decoding.simulation import of_shapes
from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.runtime.executors.dummy import DummyExecutor
from hetero_ee.runtime.trace import TITLES
from hetero_ee_profiles.records import write_record
from hetero_ee_profiles.reference import reference_profile
from tests.chat_support import LINES
from tests.command_line import PROMPT, Cli
from tests.emulation import LAPTOP, planned

SHORT = ["-n", 12, "-t", 1]
SHAPES = ["--random-weights", "tinyllama-1.1b", "--prompt-tokens", 64, "-n", 4, "--mode", "full"]
MIXED = ["-ot", r"layers\.[0-7]\..*=CUDA0", "-ot", r"layers\.(8|9)\..*=stream", "-ot", r"layers\.1\d\..*=CPU"]

pytestmark = pytest.mark.usefixtures("converted_demo")


@pytest.fixture(scope="module")
def plan_file(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the demo model with three layers on the GPU."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    planned(read_spec(demo), mode="full", gpu_layers=3, context_tokens=64).save(file)
    return file


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_the_text_is_generates(cli: Cli, mode: str) -> None:
    generated = json.loads(cli("generate", PROMPT, *SHORT, "--json").out)["text"]
    ended = cli("simulate", "-p", PROMPT, *SHORT, "--mode", mode)
    assert ended.code == 0 and ended.out.startswith(f"{generated}\n\nSIMULATED on {LAPTOP}, derived from data sheets: ")
    assert f"{mode} mode" in ended.out and ("drafts  " in ended.out) == (mode == "exact")
    assert "predicted ms" in ended.out and ("with its drafts ms" in ended.out) == (mode == "exact")  # or both are one
    document = json.loads(cli("simulate", "-p", PROMPT, *SHORT, "--mode", mode, "--json").out)
    assert document["text"] == generated and document["mode"] == mode


def test_a_model_and_a_prompt_are_given_as_to_run(cli: Cli, tmp_path: Path, demo: Path) -> None:
    sampled: list[Any] = ["--temp", 0.8, "-s", 3, *SHORT]
    template = tmp_path / "lines.jinja"
    template.write_text(LINES)
    sampled += ["--chat-template-file", template]
    said = cli("run", demo, PROMPT, *sampled).out.rstrip("\n")
    assert cli("simulate", demo, PROMPT, *sampled).out.startswith(f"{said}\n")
    unseeded = [cli("simulate", PROMPT, "-m", demo, "--temp", 0.8, *SHORT).out for _ in range(2)]
    assert unseeded[0] == unseeded[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["full", "exact", "specee"])
def test_bytes_a_token_stand_beside_the_plans(cli: Cli, mode: str) -> None:
    words = ["simulate", "-p", PROMPT, "-n", 12, "-t", 1, "--mode", mode, "-ngl", 6]
    document = json.loads(cli(*words, "--json").out)
    moved, expected = document["bytes_per_token"], document["predicted_bytes_per_token"]
    assert expected.keys() <= moved.keys() and "weights read by the CPU" in moved
    if mode == "full":
        assert moved == pytest.approx(expected)
    assert moved["weights read by the CPU"] < 2.5e6 and "(expected " in cli(*words).out.partition("bytes a token ")[2]


def test_json_says_what_it_is(cli: Cli, plan_file: Path) -> None:
    document = json.loads(cli("simulate", *SHORT, "--plan", plan_file, "--json").out)
    assert document["simulated"] is True and document["schema"] == 2
    assert (document["hardware"], document["hardware_kind"]) == (LAPTOP, "derived")
    assert (document["gpu_layers"], document["mode"], document["exit_layer"]) == (3, "full", None)
    assert document["n_generated_tokens"] == 12 and len(document["plan_hash"]) == 64
    for name in ("prompt_s", "generation_s", "predicted_prompt_s", "predicted_generation_s"):
        assert document[name] > 0
    assert document["generated_tokens_per_s"] == pytest.approx(11 / document["generation_s"])
    assert {lane["lane"] for lane in document["lanes"]} == set(TITLES)
    for lane in document["lanes"]:
        assert 0 <= lane["prompt_s"] <= document["prompt_s"] * (1 + 1e-9)
        assert 0 <= lane["generation_s"] <= document["generation_s"] * (1 + 1e-9)


def test_random_weights_give_times_alone_and_lanes_are_busy_for_a_share(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    ended = cli("simulate", *SHAPES, *MIXED, "--trace", trace)
    assert ended.code == 0 and ended.out.startswith(f"SIMULATED on {LAPTOP}, derived from data sheets: ")
    shares = re.findall(r"^(.+?) +busy +(\d+)% of the prompt, +(\d+)% of the text$", ended.out, re.MULTILINE)
    assert all(0 <= int(share) <= 100 for _, *both in shares for share in both)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = Counter(names[event["tid"]] for event in events if event["ph"] == "X")
    assert set(spans) == {title for title, *_ in shares} and {"CPU", "GPU"} <= set(spans) and len(spans) >= 4
    (process,) = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert process == f"simulated: {LAPTOP}"
    assert ": 10 layers on the GPU, full mode\n" in ended.out
    partly = cli("simulate", *SHAPES, "-ot", r"layers\.[0-4]\..*=gpu", "-ot", ".*ffn=gpu", "-ot", ".*attention=cpu")
    assert ": 5 whole layers and 17 layers' ffn on the GPU, full mode\n" in partly.out
    document = json.loads(cli("simulate", *SHAPES, *MIXED, "--json").out)
    assert document["text"] is None and document["n_prompt_tokens"] == 64 and document["n_generated_tokens"] == 4


def test_the_executor_is_closed_where_a_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, profile = known_spec("tinyllama-1.1b"), reference_profile(LAPTOP)
    closed: list[object] = []

    def fail(*_: object) -> None:
        raise UsageError("no more.")

    monkeypatch.setattr(DummyExecutor, "forward", fail)
    monkeypatch.setattr(DummyExecutor, "close", lambda runner: closed.append(runner))
    with pytest.raises(UsageError, match=r"no more\."):
        of_shapes(spec, planned(spec, mode="full", context_tokens=128), profile, 8, 4)
    assert closed


BAD: dict[str, tuple[list[Any], str]] = {
    "a prompt beyond the context": (
        ["--random-weights", "tinyllama-1.1b", "--prompt-tokens", 5000],
        "5000 tokens and 64 new ones are more than the context's 2048; shorten them or raise --ctx-size",
    ),
    "new tokens beyond the context": (
        ["--random-weights", "tinyllama-1.1b", "-n", 2000],
        "512 tokens and 2000 new ones are more than the context's 2048",
    ),
    "a real prompt beyond the context": (["-p", PROMPT * 9, "-c", 8, "-t", 1], "the context limit is 8"),
    "a prompt for random weights": ([*SHAPES, "-p", "Hi"], "set its length with --prompt-tokens"),
    "a prompt as argument for random weights": ([*SHAPES, "-m", "x", "Hi"], "set its length with --prompt-tokens"),
    "a temperature for random weights": ([*SHAPES, "--temp", 1], "choose no tokens; drop --temp, or name a model"),
    "random weights without an end": ([*SHAPES, "-n", -1], "never end a text; give its length with -n / --max-tokens"),
    "a file for random weights": ([*SHAPES, "-f", "/missing"], "set its length with --prompt-tokens"),
    "no such hardware": (["--hardware", "abacus"], "is not a shipped profile"),
    "no such file of hardware": (["--hardware", "./missing.json"], "can't be used"),
    "no such plan": (["--plan", "missing.json"], "can't be used"),
    "no such shapes": (["--random-weights", "gpt-9"], "choose one of"),
    "no such head": (["--draft-head", "/missing"], "has no config.json"),
    "a trace in no folder": ([*SHAPES, "--trace", "/missing/t.json"], "name another file"),
    "a trace that is a folder": ([*SHAPES, "--trace", "/"], "name another file"),
    "a trace that can't be written": ([*SHAPES, "--trace", "/proc/t.json"], "can't be written"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_simulated_ends_in_one_sentence(cli: Cli, name: str) -> None:
    arguments, words = BAD[name]
    ended = cli("simulate", *arguments)
    assert (ended.code, ended.out) == (2, "") and words in ended.err
    assert re.fullmatch(r"(Converting the weights, once \.\.\.\n)?hetero-ee: [^\n]+\n", ended.err)


def test_a_text_ends_where_the_context_does(cli: Cli) -> None:
    document = json.loads(cli("simulate", "-p", PROMPT, "-t", 1, "-c", 16, "-n", 500, "--mode", "full", "--json").out)
    assert document["n_prompt_tokens"] + document["n_generated_tokens"] <= 17


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vram-budget", "2"], "a plan already decides what --vram-budget would; drop --vram-budget or --plan"),
        (["--ram-budget", "2"], "drop --ram-budget or --plan"),
        (["-c", "32"], "-c / --ctx-size is 32 and the plan is for 64"),
        (["--random-weights", "llama-2-7b"], "with other shapes"),
    ],
)
def test_flags_that_a_plan_contradicts(cli: Cli, plan_file: Path, arguments: list[str], words: str) -> None:
    ended = cli("simulate", "--plan", plan_file, *arguments)
    assert (ended.code, ended.out) == (2, "") and words in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize("shapes", [False, True])
def test_a_plan_of_other_hardware(cli: Cli, tmp_path: Path, demo: Path, shapes: bool) -> None:
    spec = known_spec("tinyllama-1.1b") if shapes else read_spec(demo)
    planned(spec, mode="full", context_tokens=128, gpu_layers=3).save(tmp_path / "plan.json")
    profile = reference_profile(LAPTOP)
    write_record(replace(profile, name="no card", gpu=None, link=None), tmp_path / "hardware.json")
    options = ["--random-weights", "tinyllama-1.1b", "--prompt-tokens", 8] if shapes else ["-t", 1]
    ended = cli(
        "simulate", "--plan", tmp_path / "plan.json", "--hardware", tmp_path / "hardware.json", "-n", 4, *options
    )
    assert (ended.code, ended.out) == (2, "") and "bytes of a GPU's memory and no card has none" in ended.err
