"""`hetero-ee calibrate`: the table, the document, the picture, and one sentence for whatever is wrong."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero_ee import UsageError
from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.hub.config_file import read_spec
from hetero_ee.profiling.kept import keep_profile
from hetero_ee.profiling.machine_profile import versions
from hetero_ee.weights.store.calibration_files import RECORD_FILE
from hetero_ee.weights.store.record import load_record
from hetero_ee_cli.reports import gain
from hetero_ee_cli.reports.gain import Gain, Speed
from hetero_ee_profiles.hardware import MEASURED, HardwareProfile
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.machine import this_machine
from hetero_ee_profiles.measurement import derived
from hetero_ee_profiles.records import read_record, write_record
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import Cli, Ended, complaint
from tests.e2e.test_calibration import text_of


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "words.txt"
    file.write_text(text_of(700))
    return file


def calibrated(cli: Cli, model: Path, text: Path, *more: object) -> Ended:
    return cli("calibrate", model, "--text", text, "--tokens", 600, "-t", 1, *more)


def calibrations(cache: Path) -> list[Path]:
    return sorted(cache.glob("stores/*.calibration"))


def test_the_table_the_cost_and_where_it_lies(cli: Cli, tiny: Path, text: Path, cache: Path) -> None:
    ended = calibrated(cli, tiny, text)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].split()[:3] == ["exit", "layer", "agreement"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert re.search(r"mean depth [\d.]+ of 3 layers", ended.out)
    (folder,) = calibrations(cache)
    assert re.search(rf"\[ \d+ tokens of words\.txt \| \d+ s \| {re.escape(str(folder))} \]\n$", ended.err)
    assert (folder / RECORD_FILE).is_file()
    listed = cli("models")
    assert listed.code == 0 and ".calibration" not in listed.out


@pytest.mark.sample(0)
def test_the_document_has_every_figure(cli: Cli, tiny: Path, text: Path, cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.txt"
    other.write_text(text_of(400, seed=3))
    ended = calibrated(cli, tiny, text, "--json", "--text", other)
    found = json.loads(ended.out)
    assert found["schema"] == 2 and found["text"]["description"] == "words.txt, more.txt"
    assert [each["exit_layer"] for each in found["exit_layers"]] == [1, 2]
    assert {"agreement", "exit_rate", "precision", "recall", "acceptance"} <= found["exit_layers"][0].keys()
    assert set(found["schedule"]) <= {1, 2}
    assert {"map_rank", "threshold", "partial_threshold"} <= found["exit_layers"][1].keys()
    assert found["folder"] == str(calibrations(cache)[0]) and found["seconds"] > 0
    header, _ = load_record(calibrations(cache)[0] / RECORD_FILE, 2**20, "") or ({}, {})
    assert header["depths"] == found["depths"]


def test_a_text_too_short_says_how_much_is_needed(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time.")
    ended = calibrated(cli, tiny, short)
    assert ended.code == 2 and re.search(r"the text has \d tokens .* at least 512 are needed", ended.err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--text", "nothing.txt"), "nothing.txt can't be read"),
        (("--tokens", "5"), "expected a whole number from 512 to"),
        (("--tokens", "many"), "--tokens"),
        (("--show",), "make one with hetero-ee calibrate -m /"),
        (("--show", "--force"), "drop --force"),
        (("--show", "--tokens", "600"), "drop --force, --full, --certify, --text and --tokens"),
        (("--show", "--quantizer", "none"), "belongs to a store"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(cli: Cli, tiny: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in complaint(cli("calibrate", tiny, *arguments), 2)


def test_fp32_weights_are_refused(cli: Cli, tiny: Path, text: Path) -> None:
    assert "belongs to a store" in complaint(calibrated(cli, tiny, text, "--quantizer", "none"), 2)


@pytest.mark.sample(0)
def test_the_text_may_come_from_standard_input(cli: Cli, tiny: Path) -> None:
    ended = cli("calibrate", tiny, "--text", "-", "--tokens", 600, "-t", 1, stdin=text_of(700).encode())
    assert ended.code == 0 and "exit layer" in ended.out and "tokens of standard input |" in ended.err


# What it gained, and a second run.

GAIN = (
    r"Tokens/s before and after: expected ([\d.]+) -> ([\d.]+) \(([+-]\d+)%\), "
    r"measured ([\d.]+) -> ([\d.]+) \(([+-]\d+)%\); (.+)\."
)
FULL = r"Tokens/s: expected ([\d.]+), measured [\d.]+; still full mode\."


@pytest.fixture
def headless(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo model, whose calibration ships with it, without its draft head; on a machine where exits pay."""
    folder = Path(shutil.copytree(demo, tmp_path / "headless", ignore=shutil.ignore_patterns("draft_head")))
    profile = reference_profile("rtx-4060-laptop-8gb")
    machine, cpu = this_machine(this_host(), versions()), (replace(profile.cpu[0], threads=1),)
    mine = replace(profile, kind=MEASURED, machine=machine, cpu=cpu, gpu=None, link=None)
    keep_profile(tmp_path / "data", mine, read_spec(folder), quick=True)
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    return folder


@pytest.mark.sample(0)
def test_what_was_declined_is_said_with_its_reason_and_numbers(cli: Cli, tiny: Path, text: Path) -> None:
    """The random model's exits are worth nothing."""
    ended = calibrated(cli, tiny, text)
    line = ended.out.splitlines()[-1]
    assert re.match(FULL + r" Exact mode was declined: with calibration on words\.txt", line)
    assert re.search(
        r" Exact mode: measured [\d.]+ \([+-]\d+%\); it is used if at least 3% more are expected", line
    )  # n-grams


@pytest.mark.sample(0)
def test_exact_mode_that_was_declined_is_measured_too(cli: Cli, headless: Path, tmp_path: Path) -> None:
    """On a machine where a product with two tokens takes far more than twice the time of one."""
    (file,) = (tmp_path / "data" / "profiles").iterdir()
    profile = read_record(HardwareProfile, file)
    slow = [
        row if row.m == 1 else replace(row, time=derived(row.m * 0.1, "s", row.time.origin))
        for row in profile.cpu[0].matmuls
    ]
    write_record(replace(profile, cpu=(replace(profile.cpu[0], matmuls=tuple(slow)),)), file)
    line = cli("calibrate", headless, "-t", 1).out.splitlines()[-1]
    found = re.match(
        FULL + r" Exact mode: expected ([\d.]+) \(([+-]\d+)%\), measured [\d.]+ \([+-]\d+%\); it is used", line
    )
    assert found is not None
    assert float(found[2]) / (1 + int(found[3]) / 100) == pytest.approx(
        float(found[1]), rel=0.02
    )  # of the same context


@pytest.mark.sample(0)
def test_a_gain_is_said_as_expected_and_as_measured(cli: Cli, headless: Path) -> None:
    ended = cli("calibrate", headless, "-t", 1)
    assert ended.code == 0 and "Calibrating" not in ended.err  # it ships with the model
    found = re.fullmatch(GAIN, ended.out.splitlines()[-1])
    assert found is not None and float(found[2]) > float(found[1]) and int(found[3]) > 0
    assert re.fullmatch(r"full mode became exact mode, drafts by exit after layer \d+", found[7])
    document = json.loads(cli("calibrate", headless, "-t", 1, "--json").out)
    gained, folder = document["gain"], headless / "calibration"
    assert (document["is_new"], document["seconds"], document["folder"]) == (False, 0.0, str(folder))
    assert (gained["before"]["mode"], gained["after"]["mode"], gained["forced"]) == ("full", "exact", None)
    assert gained["after"]["expected_tokens_per_s"] > gained["before"]["expected_tokens_per_s"] > 0
    assert min(gained[when]["measured_tokens_per_s"] for when in ("before", "after")) > 0


@pytest.mark.sample(0)
@pytest.mark.parametrize(("is_loss", "full"), [(True, False), (False, False), (True, True)])
def test_a_quick_look_comes_first_and_without_a_gain_it_is_all(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loss: bool, full: bool
) -> None:
    monkeypatch.setattr("hetero_ee_cli.commands.calibrate.QUICK_TOKENS", 600)
    monkeypatch.setattr("hetero_ee_cli.reports.gain.Gain.is_loss", lambda self, share: is_loss)
    words = tmp_path / "words.txt"
    words.write_text(text_of(900))
    ended = cli("calibrate", tiny, "--text", words, "-t", 1, *(["--full"] if full else []))
    assert ended.code == 0
    n_tokens = int(re.search(r"\[ ([\d,]+) tokens of words", ended.err)[1].replace(",", ""))  # type: ignore[index]
    assert (n_tokens < 650) == (is_loss and not full)
    assert ("A quick look at 600 tokens finds no gain, so this is all; --full goes on." in ended.err) == (
        n_tokens < 650
    )


@pytest.mark.parametrize(
    ("n_texts", "n_tokens", "found", "n_runs"),
    [
        (0, 1741, "new", 2),  # the model's own text, which never ends
        (1, 1741, "new", 1),
        (1, 2048, "new", 2),
        (2, 1100, "new", 2),  # one of them is short
        (0, 2048, "old", 1),
        (0, 2048, "interrupted", 2),
        (0, 8192, "interrupted", 1),
    ],
)
@pytest.mark.sample(7)
def test_a_quick_look_goes_on_if_there_is_more_text(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_texts: int, n_tokens: int, found: str, n_runs: int
) -> None:
    """The calibrations themselves are stand-ins. Standard input is read once."""
    requests: list[CalibrationRequest] = []

    def made(wanted: object, request: CalibrationRequest, *others: object) -> SimpleNamespace:
        requests.append(request)
        text = SimpleNamespace(text=SimpleNamespace(n_tokens=n_tokens))
        return SimpleNamespace(exits=SimpleNamespace(calibration=text, is_new=found == "new", folder=tmp_path / "c"))

    def refuse(found: object) -> None:
        raise UsageError("nothing is reported.")

    if found == "interrupted":
        (tmp_path / "c.partial").touch()
    for name, stand_in in (("_made", made), ("_gain", lambda options: None), ("_report", refuse)):
        monkeypatch.setattr(f"hetero_ee_cli.commands.calibrate.{name}", stand_in)
    file = tmp_path / "words.txt"
    file.write_text("words")
    texts = ["--text", "-"][: 2 * n_texts] + ["--text", file] * (n_texts - 1)
    assert cli("calibrate", *texts, stdin=b"from a pipe").code == 2
    assert [each.n_tokens for each in requests] == [2048, 8192][:n_runs]
    assert {each.texts and each.texts[0] for each in requests} == {"from a pipe" if n_texts else None}


@pytest.mark.parametrize(
    ("mode", "forced", "is_loss"),
    [("full", 94.0, True), ("full", 96.0, False), ("full", None, True), ("exact", None, False)],
)
def test_a_loss_is_clear_by_what_is_expected(mode: str, forced: float | None, is_loss: bool) -> None:
    speed = None if forced is None else Speed("exact", "exits", forced, 1.0)
    assert Gain(Speed("full", None, 100.0, 50.0), Speed(mode, None, 100.0, 50.0), speed, ()).is_loss(0.95) == is_loss


@pytest.mark.parametrize("measured, percent", [(63.0, "+26%"), (50.0, "+0%"), (44.0, "-12%")])
def test_a_measurement_that_contradicts_the_decision_is_pointed_out(measured: float, percent: str) -> None:
    full, forced = Speed("full", None, 100.0, 50.0), Speed("exact", "exits", 88.0, measured)
    line = Gain(full, full, forced, ("Exact mode was declined: for a reason.",)).line
    doubt = " The measurement speaks for it, which a busy machine can distort: compare with --mode exact."
    assert line == (
        "Tokens/s: expected 100.0, measured 50.0; still full mode. Exact mode: expected 88.0 (-12%), measured "
        f"{measured:.1f} ({percent}); it is used if at least 3% more are expected.{doubt if measured > 60 else ''}"
    )


@pytest.mark.parametrize("ratio, percent", [(1.02, "+2%"), (1.0, "+0%"), (0.5, "-50%"), (2.5, "+150%")])
def test_a_gain_of_2_percent_is_called_2_percent(ratio: float, percent: str) -> None:
    before, after = Speed("full", None, 100.0, 50.0), Speed("exact", "n-grams", None, 50.0 * ratio)
    line = Gain(before, after, None, ("Drafts come from elsewhere.",)).line
    speeds = f"Tokens/s before and after: measured 50.0 -> {50 * ratio:.1f} ({percent})"
    assert line == f"{speeds}; full mode became exact mode, drafts by n-grams."
    line = Gain(replace(before, mode="exact", drafts="exits"), replace(after, drafts="exits"), None, ()).line
    assert line == f"{speeds}; still exact mode, drafts by exits."


@pytest.mark.sample(0)
def test_a_second_run_shows_what_is_there(cli: Cli, tiny: Path, text: Path, cache: Path, tmp_path: Path) -> None:
    first = calibrated(cli, tiny, text)
    (folder,) = calibrations(cache)
    written = (folder / RECORD_FILE).read_bytes(), (folder / RECORD_FILE).stat().st_mtime_ns
    other = tmp_path / "other.txt"
    other.write_text(text_of(700, seed=5))
    for arguments in ((), ("--text", other)):
        again = cli("calibrate", tiny, "-t", 1, *arguments)
        assert again.code == 0 and "Calibrating" not in again.err
        assert again.out.splitlines()[:-1] == first.out.splitlines()[:-1]
        day = r"\d{4}-\d\d-\d\d"
        closing = rf"\[ \d+ tokens of words\.txt \| already calibrated on {day}; use --force to redo \| .*\]\n$"
        assert re.search(closing, again.err)
    shown = cli("calibrate", tiny, "--show")
    assert shown.code == 0 and shown.out.splitlines() == first.out.splitlines()[:-1]
    assert json.loads(cli("calibrate", tiny, "--show", "--json").out)["gain"] is None
    assert ((folder / RECORD_FILE).read_bytes(), (folder / RECORD_FILE).stat().st_mtime_ns) == written
    forced = calibrated(cli, tiny, other, "--force")
    assert forced.code == 0 and "Calibrating" in forced.err and (folder / RECORD_FILE).read_bytes() != written[0]


@pytest.mark.sample(0)
def test_a_damaged_calibration_is_made_again_and_not_shown(cli: Cli, tiny: Path, text: Path, cache: Path) -> None:
    calibrated(cli, tiny, text)
    (folder,) = calibrations(cache)
    whole = (folder / RECORD_FILE).read_bytes()
    (folder / RECORD_FILE).write_bytes(whole[:-100])
    assert "is damaged" in complaint(cli("calibrate", tiny, "--show"), 1)
    again = calibrated(cli, tiny, text)
    assert again.code == 0 and "Calibrating again: the calibration /" in again.err
    assert (folder / RECORD_FILE).read_bytes() == whole


def test_a_gain_that_can_not_be_measured_leaves_the_calibration(
    cli: Cli, tiny: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise UsageError("the RAM is too small.")

    monkeypatch.setattr(gain, "measured_gain", refuse)
    ended = calibrated(cli, tiny, text)
    assert ended.code == 0 and len(calibrations(cache)) == 1
    assert "What the calibration gains can't be measured: the RAM is too small." in ended.err
