"""`hetero-ee plan`, `profile` and `bench` as users run them: what they print, keep and refuse."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.models.known_shapes import PARAMETERS, known_shapes
from hetero_ee_cli.reports.bench_table import footer
from hetero_ee_profiles.hardware import HardwareProfile, MatmulTime
from hetero_ee_profiles.host.process import physical_core_count, processor_count
from hetero_ee_profiles.records import from_json, read_record, to_json, write_record
from hetero_ee_profiles.reference import reference_names, reference_profile
from tests.command_line import Cli
from tests.emulation import LAPTOP
from tests.shipped import MACHINES

PAPER = ["--hardware", "rtx-4060-laptop-8gb", "--random-weights", "llama-2-7b"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own."""
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_plan_on_paper_says_that_nothing_was_measured(cli: Cli, data: Path) -> None:
    ended = cli("plan", *PAPER, "--vram-budget", 3)
    assert (ended.code, ended.err) == (0, "")
    assert "DERIVED from data sheets" in ended.out and not data.exists()
    lines = dict(re.findall(r"^(attention|ffn) +([GCsd]+)$", ended.out, re.MULTILINE))
    assert len(lines["attention"]) == len(lines["ffn"]) == 32 and {"G", "C"} <= set("".join(lines.values()))
    (alone, planned, gain) = re.findall(
        r"^compared +the CPU alone +([\d.]+) tokens/s\n +this plan, full mode +([\d.]+) tokens/s +([+]\d+)% against",
        ended.out,
        re.MULTILINE,
    )[0]
    assert float(planned) / float(alone) - 1 == pytest.approx(int(gain) / 100, abs=0.006)
    assert re.search(r"^per layer +CPU [\d.]+ ms, GPU [\d.]+ ms, streamed [\d.]+ ms$", ended.out, re.MULTILINE)
    assert re.search(r"time to first token \(512-token prompt\): [\d.]+ s$", ended.out, re.MULTILINE)
    assert re.search(
        r"^The VRAM budget is full: [\d.]+ MiB are left, and layers\.\d+\.(attention|ffn)", ended.out, re.M
    )


def test_a_name_or_a_configuration_is_enough(cli: Cli, data: Path, tmp_path: Path) -> None:
    """Of a model with known shapes, with nothing downloaded; and for the slots of a server."""
    expected = cli("plan", *PAPER).out
    machine, name = PAPER[:2], PAPER[3]
    assert expected and cli("plan", name, *machine).out == cli("plan", "-m", name, *machine).out == expected
    shape = {key: value for key, value in known_shapes()[name].items() if key != PARAMETERS}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    alone = cli("plan", file, *machine).out
    assert alone.splitlines()[1:-1] == expected.splitlines()[1:-1]
    assert "hetero-ee generate 'Once upon a time' -m " in alone.splitlines()[-1]
    slots = cli("plan", file, *machine, "-np", 8)
    assert slots.out.splitlines()[-1].startswith("hetero-ee serve -np 8 -m ")
    assert json.loads(cli("plan", "qwen3.6-27b", *machine, "-np", 8, "--json").out)["n_sequences"] == 9
    assert "-np / --parallel is 0" in cli("plan", name, "-np", 0).err


def test_a_name_is_planned_with_the_mtp_layer_of_its_checkpoint(cli: Cli, data: Path) -> None:
    """As its files would be; the plan's last line makes it again, since random weights draft nothing useful."""
    first = cli("plan", "--random-weights", "qwen3.5-9b", "--hardware", "rtx-4060-8gb", "--ram-budget", 16).out
    assert "Drafts come from the model's MTP layer" in first and "mode       exact" in first
    command = first.splitlines()[-1].split()
    assert command[:4] == ["hetero-ee", "plan", "--random-weights", "qwen3.5-9b"]
    (made, again) = (re.findall(r"^hash +(\w+)$", out, re.M) for out in (first, cli(*command[1:]).out))
    assert made == again


def test_it_says_what_would_help(cli: Cli, data: Path) -> None:
    """Each row is what a plan with that option says; options that bring nothing are in one line."""
    ended = cli("plan", *PAPER, "--vram-budget", 4)
    now = rate(ended.out)
    rows = re.findall(r"^(?:what if|) +(-[^ ]+ [\w.]+) +text +([\d.]+) tokens/s \(([^)]+)\)", ended.out, re.MULTILINE)
    found = {option.split()[0] for option, *_ in rows}
    assert found == {"--kv-type", "-c", "--vram-budget"} and len(rows) == 5
    assert [float(row[1]) for row in rows] == sorted((float(row[1]) for row in rows), reverse=True)
    for _, text, gain in rows:
        factor = float(text) / now
        assert gain == (f"{factor:.1f} times" if factor >= 2 else f"{factor - 1:+.0%}")
    for option, text, _ in rows:
        if option.startswith("--kv"):
            assert rate(cli("plan", *PAPER, "--vram-budget", 4, *option.split()).out) == float(text)
    ended = cli("plan", *PAPER[2:], "--hardware", "rtx-4090-24gb")
    assert re.search(r"nothing, or less than 1%: .*--vram-budget [\d.]+", ended.out)


def rate(out: str) -> float:
    """Of the text, as `plan` expects it."""
    (found,) = re.findall(r"^expected +text ([\d.]+) tokens/s", out, re.MULTILINE)
    return float(found)


def test_the_model_s_own_drafts_are_planned_with(cli: Cli, data: Path) -> None:
    own = cli("plan", *PAPER[:2], "--mode", "exact")
    assert own.code == 0 and "Drafts come from the draft head in draft_head" in own.out
    without = cli("plan", *PAPER[:2], "--no-own-drafts")
    assert without.code == 0 and "this model has no calibration yet" in without.out


def test_json_is_a_plan_that_can_be_used_again(cli: Cli, data: Path, tmp_path: Path) -> None:
    from hetero_ee.planning.plan import Plan

    text = cli("plan", *PAPER, "--json", "--vram-budget", 3).out
    made = from_json(Plan, text)
    assert to_json(made) == text and made.parts[0].name == "embedding"
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert cli("plan", *PAPER[2:], "--plan", file, "--json").out == text
    shown = cli("plan", *PAPER[2:], "--plan", file)
    assert shown.code == 0 and f"mode       {made.mode}: " in shown.out
    assert "other shapes" in cli("plan", "--random-weights", "llama-3-8b", "--plan", file).err
    file.write_text(text[:-100])
    assert cli("plan", *PAPER[2:], "--plan", file).code == 2


@pytest.mark.parametrize("named", [["{model}"], ["-m", "{model}"]])
def test_the_printed_command_names_the_model(cli: Cli, tiny: Path, named: list[str]) -> None:
    ended = cli("plan", *[word.format(model=tiny) for word in named], "--hardware", LAPTOP)
    assert ended.code == 0 and f" -m {tiny} -c " in ended.out.splitlines()[-1]


def test_fp32_weights_are_planned_with_fp32_keys_and_values(cli: Cli, tiny: Path) -> None:
    ended = cli("plan", tiny, "--hardware", LAPTOP, "--quantizer", "none")
    line = ended.out.splitlines()[-1]
    assert ended.code == 0 and f" -m {tiny} --quantizer none -c " in line and " --kv-type fp32 " in line
    asked = cli("plan", tiny, "--hardware", LAPTOP, "--quantizer", "none", "--kv-type", "int8")
    assert " --kv-type int8 " in asked.out.splitlines()[-1]


@pytest.mark.sample(0)
def test_a_curve_rises_to_what_the_card_has(cli: Cli, data: Path) -> None:
    ended = cli("plan", *PAPER, "--kv-type", "fp16", "--vram-budget", 3, "--curve")
    assert ended.code == 0 and ended.out.startswith("llama-2-7b on rtx-4060-laptop-8gb (derived")
    assert "\ncontext 4096, " in ended.out and "fp16 keys and values\n" in ended.out
    rows = re.findall(r"^ +([\d.]+) +([\d.]+) +#+(?: +<- (.*))?$", ended.out, re.MULTILINE)
    rates = [float(row[1]) for row in rows]
    assert len(rates) > 15 and rates[-1] > 2 * rates[0]
    assert float(rows[-1][0]) == pytest.approx(8 * 0.93, abs=0.01)
    assert next((row[0], row[2]) for row in rows if row[2]) == ("3.00", "you are here")
    assert [row[2] for row in rows].count("all layers on the GPU") == 1
    all_on_gpu = next(float(row[0]) for row in rows if row[2] == "all layers on the GPU")
    needed = cli("plan", *PAPER, "--kv-type", "fp16", "-ngl", 32, "--vram-budget", all_on_gpu + 0.01)
    assert needed.code == 0
    less = all_on_gpu - 0.01
    assert cli("plan", *PAPER, "--kv-type", "fp16", "-ngl", 32, "--vram-budget", less, "-c", 4096).code == 2
    larger = cli("plan", *PAPER[:3], "llama-2-13b", "--curve")
    assert re.search(r"\nall layers on the GPU would take 1\d\.\d\d GiB\n$", larger.out)


def test_only_a_terminal_sees_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hetero_ee_cli.reports.plan_report import show

    text = "layer      0  3\nattention  GGCs\nhead       G\n\nhetero-ee generate 'a [red]b'"
    for variable in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    show(text)
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(text)
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[\d;]*m", "", coloured) == text + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    show(text)
    assert capsys.readouterr().out == text + "\n"


def test_profiles_are_measured_once_and_used_by_plans(cli: Cli, data: Path, tiny: Path) -> None:
    measured = cli("profile", tiny, "--quick", "--json")
    profile = json.loads(measured.out)
    assert measured.code == 0 and "Measuring this machine" in measured.err and profile["kind"] == "measured"
    (file,) = (data / "profiles").iterdir()
    assert read_record(HardwareProfile, file).machine.cpu_model == profile["machine"]["cpu_model"]
    again = cli("profile", tiny, "--quick")
    assert again.code == 0 and "Measuring" not in again.err and "memory read" in again.out
    planned = cli("plan", tiny)
    assert planned.code == 0 and "Measuring" not in planned.err and "DERIVED" not in planned.out


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", ["garbage", "foreign", "old version"])
def test_a_profile_that_does_not_fit_is_never_used_silently(cli: Cli, data: Path, tiny: Path, damage: str) -> None:
    assert cli("profile", tiny, "--quick").code == 0
    (file,) = (data / "profiles").iterdir()
    profile = json.loads(file.read_text())
    if damage == "foreign":
        profile["machine"]["cpu_model"] = "another"
    if damage == "old version":
        profile["version"] = 0
    file.write_text("{" if damage == "garbage" else json.dumps(profile))
    ended = cli("plan", tiny)
    assert ended.code == 0 and str(file) in ended.err and "measuring again" in ended.err
    assert from_json(HardwareProfile, file.read_text()).kind == "measured"


def test_a_profile_on_a_disk_that_refuses_is_used_all_the_same(cli: Cli, data: Path, tiny: Path) -> None:
    data.write_text("in the way")
    ended = cli("plan", tiny)
    assert ended.code == 0 and "can't be kept" in ended.err


@pytest.mark.sample(0)
def test_bench_has_llama_benchs_keys_and_the_prediction(cli: Cli, data: Path, tiny: Path) -> None:
    arguments = ["bench", tiny, "-p", "4,8", "-n", "3", "-d", "0,5", "-r", "2", "--quick"]
    rows = json.loads(cli(*arguments, "--json").out)
    assert [row["test"] for row in rows] == ["pp4", "pp4 @ d5", "pp8", "pp8 @ d5", "tg3", "tg3 @ d5"]
    for row in rows:
        assert row["predicted_ts"] > 0 and row["avg_ts"] > 0 and len(row["samples_ns"]) == 2
        assert len(row["plan_hash"]) == 64 and row["n_gpu_layers"] == 0
    (first, *_) = csv.DictReader(io.StringIO(cli(*arguments, "-o", "csv").out))
    assert first.keys() == rows[0].keys()
    lines = [json.loads(line) for line in cli(*arguments, "-o", "jsonl").out.splitlines()]
    assert [line["test"] for line in lines] == [row["test"] for row in rows]
    table = cli(*arguments).out.splitlines()
    assert "predicted t/s" in table[0] and [line[0] for line in table if line.startswith("|")] == ["|"] * (
        2 + len(rows)
    )
    (date,) = {row["profile_date"] for row in rows}
    assert f"predicted from a profile measured on {date}; --refresh" in table[-2]
    overhead = r"executor overhead in .* per layer, kernels not counted: (?:[\d.]+|not measurable) \(threads: \d+\)"
    assert re.search(overhead, table[-1]) and all(re.search(r"\d (?:±|\+-) \d", line) for line in table[2:8])
    unmeasured = footer([row | {"executor_us_per_layer": 0.0} for row in rows])
    assert re.search(r"not counted: not measurable \(threads: \d+\)$", unmeasured)
    assert all(0 < row["executor_us_per_layer"] < 1e6 for row in rows)


@pytest.mark.sample(0)
def test_bench_measures_again_if_asked_and_tells_of_another_speed(cli: Cli, data: Path, tiny: Path) -> None:
    arguments = ["bench", tiny, "-p", "0", "-n", "2", "-r", "1", "-t", "1", "--quick"]
    assert "Measuring this machine" in cli(*arguments).err
    (file,) = (data / "profiles").iterdir()
    profile = read_record(HardwareProfile, file)
    quick_memory = replace(profile.cpu[0].read_bytes_per_s, value=1e18, p80=1e18)
    cpu = (replace(profile.cpu[0], read_bytes_per_s=quick_memory), *profile.cpu[1:])
    write_record(replace(profile, cpu=cpu), file)
    again = cli(*arguments)
    assert "Measuring this machine" not in again.err and "Memory is read at 0% of the speed" in again.err
    refreshed = cli(*arguments, "--refresh")
    assert "Measuring this machine" in refreshed.err and "Memory is read at 0%" not in refreshed.err
    assert read_record(HardwareProfile, file).cpu[0].read_bytes_per_s.value < 1e18


def test_bench_of_fp32_weights_times_no_kernels(cli: Cli, data: Path, tiny: Path) -> None:
    arguments = ["bench", tiny, "-p", "0", "-n", "2", "-r", "1", "-t", "0", "--quick", "--quantizer", "none"]
    (row,) = json.loads(cli(*arguments, "--json").out)
    assert row["executor_us_per_layer"] is None and row["n_threads"] == physical_core_count()
    out = cli(*arguments).out
    assert "executor overhead" not in out and not re.search(r"±|\+-", out)  # of one repetition


BAD: dict[str, tuple[list[Any], str]] = {
    "hardware": (["plan", "--hardware", "abacus"], "is not a shipped profile; `hetero-ee profile --list` lists"),
    "hardware file": (["plan", "--hardware", "./missing.json"], "can't be used"),
    "random weights": (["plan", "--random-weights", "gpt-9"], "choose one of tinyllama"),
    "a name of ollama's": (["plan", "gpt-oss:20b"], "Without a download, plan knows gpt-oss-20b."),
    "both models": (["plan", "a/b", "--random-weights", "llama-2-7b"], "exclude each other"),
    "budget": (["plan", *PAPER, "--vram-budget", "-1"], "expected GiB from 0"),
    "infinite budget": (["plan", *PAPER, "--vram-budget", "inf"], "expected GiB from 0"),
    "no such budget": (["plan", *PAPER, "--vram-budget", "nan"], "expected GiB from 0"),
    "more than the card": (["plan", *PAPER, "--vram-budget", "99"], "lower --vram-budget"),
    "override": (["plan", *PAPER, "-ot", "ffn"], "has no '='"),
    "override place": (["plan", *PAPER, "-ot", "ffn=moon"], "names no place"),
    "override pattern": (["plan", *PAPER, "-ot", "(=gpu"], "not a regular expression"),
    "kv type": (["plan", *PAPER, "--kv-type", "int3"], "expected one of fp32"),
    "mode": (["plan", *PAPER, "--mode", "magic"], "expected one of full, exact"),
    "exact without statistics": (["plan", *PAPER, "--mode", "exact"], "or drop mode exact"),
    "a pin of nothing": (["plan", *PAPER, "-ot", "layer.3=gpu"], "matches no part"),
    "a streamed head": (["plan", *PAPER, "-ot", "head=stream"], "can't be streamed"),
    "a streamed embedding": (["plan", *PAPER, "-ot", "embedding=stream"], "can't be streamed"),
    "more RAM than there is": (["plan", *PAPER, "--ram-budget", "1000"], "lower --ram-budget"),
    "no RAM": (["plan", *PAPER, "--ram-budget", "0"], "raise --ram-budget"),
    "nobody's home": (["plan", "--hardware", "~nobody-of-that-name/x.json"], "can't be used"),
    "draft tokens": (["plan", *PAPER, "--draft-tokens", "0"], "expected a whole number from 1 to 16"),
    "bench numbers": (["bench", "-p", "x"], "expected whole numbers"),
    "bench of nothing": (["bench", "-p", "0", "-n", "0"], "nothing to measure"),
    "bench of many threads": (
        ["bench", "-t", "0,1000"],
        "--threads is 0,1000; expected 0 (one on each physical core) to ",
    ),
    "bench of too many digits": (["bench", "-p", "00000000001048577"], "expected whole numbers"),
    "bench with a bad plan": (["bench", "--random-weights", "llama-2-7b", "--plan", "/dev/null"], "can't be used"),
    "bench format": (["bench", "-o", "xml"], "expected one of md"),
    "bench repetitions": (["bench", "-r", "0"], "expected 1 to"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_wishes_end_in_one_line(cli: Cli, data: Path, name: str) -> None:
    arguments, words = BAD[name]
    ended = cli(*arguments)
    assert (ended.code, ended.out) == (2, "") and words in ended.err
    assert re.fullmatch(r"hetero-ee: [^\n]+\n", ended.err)


def test_a_plan_for_this_machine_has_no_more_threads_than_it_has_processors(cli: Cli, data: Path, tiny: Path) -> None:
    ended = cli("plan", tiny, "-t", 1000, "--json")
    assert json.loads(ended.out)["threads"] == processor_count()
    assert (
        ended.err.count(f"1000 threads were requested, but this process has only {processor_count()} processors") == 1
    )


def test_the_shipped_profiles_are_listed(cli: Cli, data: Path) -> None:
    listed = cli("profile", "--list").out
    rows = listed.splitlines()
    assert rows[0].split()[:2] == ["profile", "CPU"] and rows[-1].startswith("DERIVED from data sheets")
    assert [row.split()[0] for row in rows[1:-1]] == reference_names()
    machines = json.loads(cli("profile", "--list", "--json").out)["machines"]
    assert [machine["name"] for machine in machines] == reference_names()


def test_every_shipped_profile_plans(cli: Cli, data: Path, tmp_path: Path) -> None:
    for name in MACHINES:
        assert cli("plan", "--random-weights", "llama-3-8b", "--hardware", name).code == 0
    write_record(reference_profile("rtx-3060-12gb"), tmp_path / "mine.json")
    ended = cli("plan", "--random-weights", "llama-3-8b", "--hardware", tmp_path / "mine.json")
    assert ended.code == 0 and "rtx-3060-12gb" in ended.out
    (tmp_path / "mine.json").write_text(to_json(reference_profile("rtx-3060-12gb"))[:-50])
    assert cli("plan", "--hardware", tmp_path / "mine.json").code == 2


def test_drafts_are_planned_with_the_threads_of_the_plan(cli: Cli, tmp_path: Path) -> None:
    """More threads than that were measured, too, and are slower. The demo model has a draft head."""
    file, fast = tmp_path / "machine.json", replace(reference_profile("rtx-3060-12gb"), gpu=None, link=None)
    [times] = fast.cpu

    def doubled(row: MatmulTime) -> MatmulTime:
        value = 2 * row.time.value
        return replace(row, time=replace(row.time, value=value, p20=value, p80=value))

    slower = replace(times, threads=2 * times.threads, matmuls=tuple(map(doubled, times.matmuls)))
    found = []
    for cpu in ((times,), (times, slower)):
        file.write_text(to_json(replace(fast, cpu=cpu)))
        found.append(json.loads(cli("plan", "--hardware", file, "--mode", "exact", "--json").out)["prediction"])
    assert found[0] == found[1]
