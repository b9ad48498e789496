"""The command that `hetero-ee plan` prints, given to each command that runs a plan: the same plan hash."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.plan import Plan
from hetero_ee.profiling.kept import keep_profile
from hetero_ee.profiling.machine_profile import versions
from hetero_ee_profiles.hardware import MEASURED
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.machine import this_machine
from hetero_ee_profiles.records import from_json
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import PROMPT, Cli
from tests.shipped import MACHINES, SHAPES

CARD = ["--hardware", "rtx-4060-laptop-8gb"]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own."""
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HETERO_EE_PROFILE", "auto")
    return tmp_path / "data"


def told(cli: Cli, *arguments: object) -> tuple[list[str], list[str], str]:
    """The command that `plan` prints and the options that pin the plan, and the beginning of the plan's hash."""
    shown = cli("plan", *arguments).out
    words = shlex.split(shown.splitlines()[-1])
    (made,) = re.findall(r"^hash +([0-9a-f]{16})$", shown, re.MULTILINE)
    assert words[0] == "hetero-ee"
    return words, words[words.index("-c") :], made


def hash_of(document: dict[str, Any]) -> str:
    return str(document["plan_hash"])[:16]


def planned(cli: Cli, *arguments: object) -> str:
    """The hash of the plan that `plan` makes, printed as JSON."""
    return from_json(Plan, cli("plan", *arguments, "--json").out).sha256[:16]


@pytest.mark.parametrize("card", MACHINES)
@pytest.mark.parametrize("model", SHAPES)
def test_models_on_cards(cli: Cli, model: str, card: str) -> None:
    subject = ["--random-weights", model, "--hardware", card]
    words, pins, made = told(cli, *subject)
    assert words[1:6] == ["simulate", *subject]
    assert planned(cli, *subject, *pins) == made
    simulated = cli(*words[1:], "--prompt-tokens", 1, "-n", 1, "--json")
    assert hash_of(json.loads(simulated.out)) == made


@pytest.mark.parametrize("card", MACHINES)
@pytest.mark.sample(0)
def test_a_model_that_is_not_there_yet(cli: Cli, tmp_path: Path, card: str) -> None:
    """By its config.json alone, in a folder whose name a shell would take apart."""
    folder = tmp_path / "it's a model"
    folder.mkdir()
    config = {
        **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    }
    (folder / "config.json").write_text(json.dumps(config))
    words, pins, made = told(cli, folder, "--hardware", card)
    assert words[1:5] == ["generate", PROMPT, "-m", str(folder)]
    assert planned(cli, folder, "--hardware", card, *pins) == made


@pytest.mark.usefixtures("converted_demo")
@pytest.mark.parametrize("limits", [[], ["--vram-budget", "0.14", "-c", "128"], ["--mode", "full", "-ngl", "2"]])
@pytest.mark.sample(1)
def test_the_demo_model_on_an_emulated_card(cli: Cli, limits: list[Any]) -> None:
    words, pins, made = told(cli, *CARD, *limits)
    assert words[1:3] == ["generate", PROMPT]
    assert planned(cli, *CARD, *pins) == made
    assert hash_of(json.loads(cli("simulate", *CARD, *pins, "-n", 4, "--json").out)) == made


@pytest.mark.usefixtures("converted_demo")
@pytest.mark.parametrize(
    "limits", [[], ["-c", 200, "--kv-type", "fp16"], ["--mode", "exact", "--draft-tokens", 3, "--ram-budget", 0.7]]
)
@pytest.mark.sample(0)
def test_the_demo_model_on_this_cpu(cli: Cli, data: Path, demo: Path, limits: list[Any]) -> None:
    profile = reference_profile("rtx-4060-laptop-8gb")
    machine = this_machine(this_host(), versions())
    cpu = tuple(replace(profile.cpu[0], threads=n) for n in sorted({1, machine.n_cores}))
    mine = replace(profile, kind=MEASURED, machine=machine, cpu=cpu, gpu=None, link=None)
    keep_profile(data, mine, read_spec(demo), quick=False)
    words, pins, made = told(cli, "-t", 1, *limits)
    assert hash_of(json.loads(cli(*words[1:], "-n", 4, "--json").out)) == made
    (row,) = json.loads(cli("bench", *pins, "-p", 0, "-n", 2, "-r", 1, "--json").out)
    assert hash_of(row) == made
    chatted = cli("chat", *pins, stdin=b"/exit\n")
    assert chatted.code == 0, chatted.err


def test_bench_refuses_tests_longer_than_its_context(cli: Cli) -> None:
    ended = cli("bench", "--random-weights", "tinyllama-1.1b", "-c", 16, "-p", 512, "-n", 0)
    assert ended.code == 2 and "-c / --ctx-size is 16 and the tests need 512" in ended.err


def test_a_plan_file_is_explained_by_itself(cli: Cli, tmp_path: Path) -> None:
    made = cli("plan", "--random-weights", "llama-2-7b", *CARD, "--json").out
    file = tmp_path / "plan.json"
    file.write_text(made)
    shown = cli("plan", "--plan", file)
    assert shown.code == 0 and shown.out.startswith("llama-2-7b (LlamaForCausalLM), 32 layers")
    direct = cli("plan", "--random-weights", "llama-2-7b", *CARD).out
    assert direct.startswith(shown.out.rstrip()) and "what if" in direct
    assert cli("plan", "--plan", file, "--json").out == made
