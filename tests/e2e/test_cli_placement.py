"""Flags of where and how a model runs, on `hetero-ee generate` and `chat`: what they change, and what they refuse."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine
from hetero_ee.decoding.result import FinishReason, GenerationResult
from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import ExitRates, ExitStatistics, Statistics
from hetero_ee.profiling.kept import keep_profile
from hetero_ee.profiling.machine_profile import known_profile, versions
from hetero_ee_cli.reports.run_report import slowness
from hetero_ee_profiles.hardware import MEASURED, HardwareProfile
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.machine import this_machine
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import CLOSING_LINE, PROMPT, Cli, refused

ARGUMENTS = [PROMPT, "-t", 1, "-n", 24]
EXACT = r"exact \(draft head, up to (\d+) tokens\): ([\d.]+) tok/pass, (\d+)% accepted, depth 12\.0 of 12 \| peak"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own, where this machine's profile is kept and looked for."""
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HETERO_EE_PROFILE", "auto")
    return tmp_path / "data"


@pytest.fixture(scope="session")
def metrics() -> HardwareProfile:
    """A profile with this machine's name on it, without a GPU and for one thread: nothing was measured."""
    profile = reference_profile("rtx-4060-laptop-8gb")
    machine = this_machine(this_host(), versions())
    cpu = (replace(profile.cpu[0], threads=1),)
    return replace(profile, kind=MEASURED, machine=machine, cpu=cpu, gpu=None, link=None)


@pytest.fixture
def kept(data: Path, converted_demo: None, demo: Path, metrics: HardwareProfile) -> Path:
    """The file where such a profile is kept for the demo model, which lies converted in the cache."""
    return keep_profile(data, metrics, read_spec(demo), quick=True)


@pytest.fixture(scope="session")
def story(demo: Path) -> str:
    """What the demo model tells."""
    with Engine.from_pretrained(demo, threads=1) as engine:
        return engine.generate(PROMPT, max_new_tokens=24).text


@pytest.mark.usefixtures("converted_demo")
def test_the_first_start_measures_and_plans_and_the_next_knows(cli: Cli, data: Path, story: str) -> None:
    first = cli("generate", *ARGUMENTS, "--json")
    document = json.loads(first.out)
    assert document["text"] == story and len(document["plan_hash"]) == 64
    assert "Measuring this machine for about 5 seconds" in first.err
    again = cli("generate", *ARGUMENTS)
    assert again.out == story and "Measuring" not in again.err and "(expected " in again.err


@pytest.mark.usefixtures("converted_demo")
def test_nothing_is_measured_or_planned_where_the_setting_says_off(
    cli: Cli, data: Path, story: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_EE_PROFILE", "off")
    ended = cli("generate", *ARGUMENTS, "--json")
    document = json.loads(ended.out)
    assert (document["text"], document["mode"], document["plan_hash"]) == (story, "full", None)
    assert ended.err == "" or "Measuring" not in ended.err
    assert not data.exists()
    refusal = cli("generate", *ARGUMENTS, "--mode", "exact")
    assert refusal.code == 2 and "--mode needs a plan, and profile is off" in refusal.err


def test_a_kept_profile_makes_a_plan_that_may_be_exact(cli: Cli, kept: Path, story: str) -> None:
    ended = cli("generate", *ARGUMENTS)
    assert (ended.code, ended.out) == (0, story)
    assert re.fullmatch(CLOSING_LINE, ended.err) and re.search(EXACT, ended.err) and "(expected " in ended.err


def test_full_mode_says_so_and_why(
    cli: Cli, kept: Path, demo: Path, metrics: HardwareProfile, tmp_path: Path, story: str
) -> None:
    asked = cli("generate", *ARGUMENTS, "--mode", "full")
    assert asked.out == story and " | full | peak" in asked.err
    spec = read_spec(demo)
    bad = ExitStatistics("bad exits", spec.n_layers, {4: ExitRates(0.8, 0.1)})
    plan(spec, metrics, Limits(threads=1), Statistics(bad)).save(tmp_path / "plan.json")
    declined = cli("generate", *ARGUMENTS, "--stats", "--plan", tmp_path / "plan.json")
    assert declined.out == story
    (percent,) = re.findall(r" \| full \(exact declined: (-\d+%) expected\) \| peak", declined.err)
    sentence = "Exact mode was declined: with bad exits it would reach [0-9.]+ tokens/s at best, "
    assert re.search(f"^{sentence}{percent} against full mode", declined.err, re.MULTILINE)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sampling", [[], ["--temp", 0.9, "-s", 7]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [2, 5])
def test_exact_text_is_full_text(cli: Cli, kept: Path, sampling: list[Any], length: int) -> None:
    full = cli("generate", *ARGUMENTS, *sampling, "--mode", "full")
    for flag in ("--draft-length", "--draft-tokens"):
        exact = cli("generate", *ARGUMENTS, *sampling, "--mode", "exact", flag, length)
        assert (exact.code, exact.out) == (0, full.out)
        found = re.search(EXACT, exact.err)
        assert found and int(found[1]) == length and 1 <= float(found[2]) <= length and int(found[3]) <= 100


def test_json_says_how_the_text_was_decoded(cli: Cli, kept: Path) -> None:
    document = json.loads(cli("generate", *ARGUMENTS, "--json", "--mode", "exact", "--draft-length", 3).out)
    drafts = document["drafts"]
    assert (document["mode"], document["exit_layer"], document["draft_length"]) == ("exact", 0, 3)
    assert document["gpu_layers"] == 0 and re.fullmatch("[0-9a-f]{64}", document["plan_hash"])
    assert (
        drafts["n_tokens"] == 23
        and drafts["n_accepted"] <= drafts["n_drafted"] == drafts["n_verified"] - drafts["n_steps"]
    )
    assert drafts["acceptance"] == drafts["n_accepted"] / drafts["n_drafted"]
    full = json.loads(cli("generate", *ARGUMENTS, "--json", "--mode", "full").out)
    assert (full["mode"], full["exit_layer"], full["drafts"]) == ("full", None, None)
    assert full["token_ids"] == document["token_ids"] and full["plan_hash"] != document["plan_hash"]


def test_stats_count_what_the_json_counts(cli: Cli, kept: Path) -> None:
    arguments = [*ARGUMENTS, "--mode", "exact", "--draft-length", 3]
    drafts = json.loads(cli("generate", *arguments, "--json").out)["drafts"]
    assert drafts["prompt_s"].keys() == {"n-grams", "draft head"} and drafts["prompt_s"]["draft head"] > 0
    err = cli("generate", *arguments, "--stats").err
    assert re.search(
        r"^time +prompt [\d.]+ s \(\d+%; n-grams [\d.]+ s; draft head [\d.]+ s\), text [\d.]+ s \(\d+%\)$", err, re.M
    )
    assert re.search(r"^ +CPU +busy +\d+% of the prompt, +\d+% of the text$", err, re.M)
    for each in drafts["origins"]:
        assert f"by {each['origin']}: {each['n_drafted']} drafted, {each['n_accepted']} accepted, " in err
    for title, counts in (("drafted", drafts["drafted_runs"]), ("accepted", drafts["accepted_runs"])):
        rows = re.findall(rf"^{title} per step +(\d+) +(\d+)( #+)?$", err, re.M)
        assert [(int(n), int(count), bool(bar)) for n, count, bar in rows] == [
            (n, count, count > 0) for n, count in enumerate(counts)
        ]
    assert re.search(r"^known after layer +12 +23 #+$", err, re.M)


def test_stats_without_a_plan_split_the_time(cli: Cli, data: Path, tiny: Path) -> None:
    err = cli("generate", *ARGUMENTS, "-m", tiny, "--quantizer", "none", "--stats").err
    assert re.search(r"\ntime +prompt [\d.]+ s \(\d+%\), text [\d.]+ s \(\d+%\)\n\Z", err)


def test_a_trace_shows_what_ran(cli: Cli, kept: Path, tmp_path: Path, story: str) -> None:
    file = tmp_path / "trace.json"
    ended = cli("generate", *ARGUMENTS, "--trace", file)
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert ended.out == story and {event["cat"] for event in events} == {"cpu"}
    assert any("layers.0" in event["name"] for event in events) and all(event["dur"] >= 0 for event in events)


def test_a_plan_can_be_run_from_its_file(cli: Cli, kept: Path, demo: Path, tmp_path: Path, story: str) -> None:
    profile = known_profile(read_spec(demo), 1, data_folder=kept.parent.parent, cache_folder=tmp_path / "cache")
    assert profile is not None
    limits = Limits(mode="exact", draft_length=4)
    with Engine.from_pretrained(demo, threads=1, profile=profile, limits=limits) as engine:
        assert engine.plan is not None
        engine.plan.save(tmp_path / "plan.json")
        sha256 = engine.plan.sha256
    document = json.loads(cli("generate", *ARGUMENTS, "--plan", tmp_path / "plan.json", "--json").out)
    assert (document["text"], document["plan_hash"], document["draft_length"]) == (story, sha256, 4)


def test_keys_and_values_are_stored_as_asked(kept: Path, demo: Path, metrics: HardwareProfile) -> None:
    sizes = {}
    for kind in ("fp32", "int8"):
        with Engine.from_pretrained(
            demo, threads=1, profile=metrics, limits=Limits(kv_type=kind, mode="full")
        ) as engine:
            tokens = engine.stream(PROMPT)
            next(tokens)
            sizes[kind] = engine.memory()["KV cache"]
    assert 0 < sizes["int8"] < sizes["fp32"] / 2


@pytest.mark.usefixtures("converted_demo")
def test_a_flag_measures_a_machine_that_was_never_measured(cli: Cli, data: Path) -> None:
    ended = cli("generate", *ARGUMENTS, "--mode", "exact")
    assert ended.code == 0 and re.search(r"exact \(.+, up to \d+ tokens\)", ended.err)
    assert ended.err.index("Measuring this machine for about 5 seconds") < ended.err.index("[ prompt")


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", ["garbage", "of another machine", "of other threads", "a folder"])
def test_a_kept_profile_that_does_not_fit_is_not_used(
    cli: Cli,
    kept: Path,
    demo: Path,
    metrics: HardwareProfile,
    story: str,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_measured = 0

    def measured(*_: object) -> HardwareProfile:
        nonlocal n_measured
        n_measured += 1
        return metrics

    monkeypatch.setattr("hetero_ee.profiling.automatic.profile_here", measured)
    spec = read_spec(demo)
    if damage == "garbage":
        kept.write_text("{")
    elif damage == "of another machine":
        other = keep_profile(
            kept.parent.parent, replace(metrics, machine=replace(metrics.machine, n_cores=77)), spec, quick=True
        )
        other.replace(kept)
    elif damage == "of other threads":
        keep_profile(kept.parent.parent, replace(metrics, cpu=(replace(metrics.cpu[0], threads=2),)), spec, quick=True)
    else:
        kept.unlink()
        kept.mkdir()
    document = json.loads(cli("generate", *ARGUMENTS, "--json").out)
    assert document["text"] == story and document["plan_hash"] and n_measured == 1


@pytest.mark.usefixtures("converted_demo")
def test_a_plan_that_nobody_asked_for_never_fails(
    cli: Cli, data: Path, demo: Path, metrics: HardwareProfile, story: str
) -> None:
    cpu = (replace(metrics.cpu[0], free_bytes=1),)
    keep_profile(data, replace(metrics, cpu=cpu), read_spec(demo), quick=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero_ee.profiling.machine_profile._with_free_ram", lambda profile, free_bytes: profile)
        ended = cli("generate", *ARGUMENTS)
    assert (ended.code, ended.out) == (0, story)
    assert "No plan could be made or opened, so the CPU runs everything: " in ended.err


def test_finding_a_kept_profile_takes_no_time(kept: Path, demo: Path, tmp_path: Path) -> None:
    def found() -> float:
        start_s = time.perf_counter()
        profile = known_profile(spec, 1, data_folder=kept.parent.parent, cache_folder=tmp_path / "cache")
        assert profile is not None and profile.cpu[0].free_bytes > 0
        return time.perf_counter() - start_s

    spec = read_spec(demo)
    assert min(found() for _ in range(5)) < 0.1


def test_chat_drafts_and_says_so(cli: Cli, kept: Path, demo: Path, tmp_path: Path) -> None:
    stdin = b"Once upon a time\nThen a big dog came.\n"
    full = cli("chat", "-t", 1, "-n", 16, "--mode", "full", stdin=stdin)
    exact = cli("chat", "-t", 1, "-n", 16, "--mode", "exact", "--stats", "--trace", tmp_path / "c.json", stdin=stdin)
    assert full.code == exact.code == 0 and exact.out == full.out
    assert len(re.findall(EXACT, exact.err)) == 2 and full.err.count(" | full | peak") == 2
    assert exact.err.count("\nknown after layer  12     15 ") == 2  # of each reply by itself
    assert json.loads((tmp_path / "c.json").read_text())["traceEvents"]


BAD: dict[str, tuple[list[Any], str]] = {
    "mode": (["--mode", "magic"], "expected one of full, exact"),
    "kv type": (["--kv-type", "int3"], "expected one of fp32"),
    "draft length": (["--draft-length", "0"], "expected a whole number from 1 to 16"),
    "draft tokens": (["--draft-tokens", "17"], "expected a whole number from 1 to 16"),
    "layers": (["--gpu-layers", "-3"], "--gpu-layers is '-3'; expected a number of layers, all or auto"),
    "override": (["-ot", "ffn"], "has no '='"),
    "budget": (["--vram-budget", "-1"], "expected GiB from 0"),
    "no such budget": (["--vram-budget", "nan"], "expected GiB from 0"),
    "margin": (["--vram-margin", "-5"], "--vram-margin is -5; expected GiB from 0 to 1048576."),
    "budget in bytes": (["--vram-budget", "1e9"], "--vram-budget is 1000000000; expected GiB from 0 to 1048576."),
    "plan": (["--plan", "/dev/null"], "can't be used"),
    "missing plan": (["--plan", "missing.json"], "can't be used"),
    "draft head": (["--draft-head", "/dev"], "has no config.json"),
    "trace": (["--trace", "/"], "name another file"),
    "trace in no folder": (["--trace", "/missing/t.json"], "name another file"),
    "plan and mode": (["--plan", "p.json", "--mode", "full"], "drop --mode or --plan"),
    "plan and length": (["--plan", "p.json", "--draft-tokens", "3"], "drop --draft-length or --plan"),
}


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("name", BAD)
def test_bad_wishes_are_refused_before_anything_is_loaded(
    cli: Cli, data: Path, cache: Path, command: str, name: str
) -> None:
    arguments, words = BAD[name]
    ended = cli(command, *([PROMPT] if command == "generate" else []), *arguments)
    assert refused(ended, cache) == 2 and words in ended.err
    assert not data.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vram-budget", "4"], "has no GPU; drop --vram-budget, or plan"),
        (["-ot", "layers.0.ffn=gpu"], "no GPU"),
    ],
)
def test_wishes_for_a_gpu_that_is_not_there(cli: Cli, kept: Path, arguments: list[str], words: str) -> None:
    ended = cli("generate", *ARGUMENTS, *arguments)
    assert (ended.code, ended.out) == (2, "") and words in ended.err and ended.err.count("\n") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", ["3", "all"])
def test_layers_for_a_gpu_that_is_not_there_run_on_the_cpu(cli: Cli, kept: Path, story: str, layers: str) -> None:
    """As in llama.cpp."""
    ended = cli("generate", *ARGUMENTS, "-ngl", layers)
    assert (ended.code, ended.out) == (0, story)
    assert ended.err.count("There is no GPU, so all layers run on the CPU.\n") == 1
    assert "no GPU" not in cli("generate", *ARGUMENTS, "-ngl", 0).err


def test_what_one_token_does_not_measure_is_not_told(cli: Cli, kept: Path) -> None:
    for mode, words in (("full", "full"), ("exact", r"exact \(draft head, up to \d+ tokens\): nothing to draft")):
        ended = cli("generate", *ARGUMENTS[:-1], 1, "--mode", mode)
        assert re.search(rf" \| gen 1 tok \| {words} \| peak memory", ended.err), ended.err


def test_a_model_whose_drafts_nobody_measured_can_not_be_exact(
    cli: Cli, data: Path, tiny: Path, metrics: HardwareProfile
) -> None:
    keep_profile(data, metrics, read_spec(tiny), quick=True)
    ended = cli("generate", *ARGUMENTS, "-m", tiny, "--mode", "exact")
    assert ended.code == 2 and "hetero-ee calibrate" in ended.err.splitlines()[-1]
    assert " | full | peak" in cli("generate", *ARGUMENTS, "-m", tiny).err


@pytest.mark.sample(0)
def test_ctrl_c_in_exact_mode_ends_with_what_there_is(kept: Path, tmp_path: Path) -> None:
    arguments = ["generate", PROMPT, "-t", "1", "-n", "1000", "--mode", "exact", "--stop", "never said", "--stats"]
    command = [sys.executable, "-m", "hetero_ee_cli", *arguments, "--trace", str(tmp_path / "t.json")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout is not None
        begun = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130)  # it may have ended just then
    assert begun + rest and b"| exact (draft head" in err and b"known after layer" in err and b"Traceback" not in err
    assert (tmp_path / "t.json").is_file()


@pytest.mark.sample(0)
def test_a_pipe_that_closes_ends_exact_mode_quietly(kept: Path) -> None:
    command = f"{sys.executable} -m hetero_ee_cli generate '{PROMPT}' -t 1 -n 300 --mode exact | head -c 5"
    ended = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, check=False)
    assert len(ended.stdout) == 5 and b"Traceback" not in ended.stderr and ended.returncode in (0, 141)


@pytest.mark.parametrize(
    ("rate", "seconds", "expected", "uses_gpu", "words"),
    [
        (4.0, 5.0, 10.0, False, "another program may be busy. Close it"),
        (4.0, 5.0, 10.0, True, "driver may have moved some of its memory to system RAM. Lower --vram-budget"),
        (6.0, 5.0, 10.0, True, None),
        (4.0, 0.5, 10.0, True, None),
        (4.0, 5.0, None, True, None),
    ],
)
def test_a_speed_far_below_the_prediction_is_told(
    rate: float, seconds: float, expected: float | None, uses_gpu: bool, words: str | None
) -> None:
    n_tokens = round(rate * seconds) + 1
    result = GenerationResult("x", tuple(range(n_tokens)), FinishReason.LENGTH, 5, 0.1, seconds)
    told = slowness(result, expected, uses_gpu)
    assert not told if words is None else len(told) == 1 and words in told[0] and "\n" not in told[0]
