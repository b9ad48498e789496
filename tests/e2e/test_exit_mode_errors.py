"""Early-exit modes on what is damaged, of another model or out of range: one error each, or full mode's text; and an
audit that finds what was not certified."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.calibration.certificate_file import write_certificate
from hetero_ee.config import demo_model_folder
from hetero_ee.options.engine import CERTIFIED, EARLY_EXIT_MODES
from hetero_ee.planning.limits import Limits
from hetero_ee.speculation.exits.certificate import N_LEVELS, Certificate
from hetero_ee.speculation.exits.predictor import ExitConfidence
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE, RECORD_FILE, calibration_folder
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import Cli
from tests.e2e.test_cli_eval import SHORT, STORIES, complaint
from tests.e2e.test_demo_calibration import place
from tests.emulation import LAPTOP

SIMULATED = ["simulate", "-ngl", 6, "-n", 4, "-t", 1]


@pytest.fixture
def own_folder(converted_demo: None, cache: Path) -> Path:
    """Where a calibration of the test's own store lies, before the one that ships with the model."""
    [store] = [each for each in (cache / "stores").iterdir() if each.is_dir()]
    folder = calibration_folder(store)
    folder.mkdir()
    return folder


def shipped(own_folder: Path) -> Certificate:
    """The demo's certificate, as one of the test's own store."""
    store = next(each for each in own_folder.parent.iterdir() if calibration_folder(each) == own_folder)
    found = place(demo_model_folder(), store)
    calibration = found.find()
    assert calibration is not None
    certificate = found.certificate(calibration)
    assert certificate is not None
    return replace(certificate, key=found.key)


@pytest.mark.parametrize("mode", EARLY_EXIT_MODES)
def test_a_damaged_calibration_is_one_error(cli: Cli, own_folder: Path, mode: str) -> None:
    (own_folder / RECORD_FILE).write_text("{")
    says = complaint(cli(*SIMULATED, "--mode", mode), 1)
    assert str(own_folder) in says and "calibrate" in says


def test_eval_leaves_such_modes_out_each_with_its_reason(cli: Cli, own_folder: Path, tmp_path: Path) -> None:
    (own_folder / RECORD_FILE).write_text("{")
    text, modes = tmp_path / "stories.txt", ",".join(EARLY_EXIT_MODES)
    text.write_text(STORIES)
    ended = cli("eval", "--hardware", LAPTOP, "-ngl", 6, "--text", text, *SHORT, "--modes", modes, "--json")
    full, *others = json.loads(ended.out)["modes"]
    assert ended.code == 0 and full["mode"] == "full" and [each["mode"] for each in others] == list(EARLY_EXIT_MODES)
    assert all(str(own_folder) in each["reason"] for each in others)


CHANGES: dict[str, tuple[dict[str, str], str]] = {
    "of other weights": (
        {"key": "ef" * 32},
        "made for another model or other weights; run hetero-ee calibrate",
    ),
    "of other exits": ({"exits_digest": "ef" * 32}, "made for other exit maps and predictors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_certificate_of_another_model_is_one_error(cli: Cli, own_folder: Path, change: str) -> None:
    changes, says = CHANGES[change]
    write_certificate(replace(shipped(own_folder), **changes), own_folder)  # type: ignore[arg-type]
    assert says in complaint(cli(*SIMULATED, "--mode", CERTIFIED), 1)


def test_a_damaged_certificate_is_one_error_and_of_one_mode(cli: Cli, own_folder: Path) -> None:
    (own_folder / CERTIFICATE_FILE).write_bytes(b"nothing")
    assert "is damaged" in complaint(cli(*SIMULATED, "--mode", CERTIFIED), 1)
    assert cli(*SIMULATED, "--mode", "calm").code == 0


BAD: dict[str, tuple[list[Any], str]] = {
    "no risk": (["--risk", 0], "--risk is 0.0; expected a share"),
    "all the risk": (["--risk", 1], "--risk is 1.0; expected a share"),
    "a risk below 0": (["--risk=-0.1"], "--risk is -0.1; expected a share"),
    "a risk that is no number": (["--risk", "nan"], "--risk is nan; expected a share"),
    "less than can be certified": (["--risk", 0.0001], "1500 prompts can't certify less than"),
    "other keys and values": (["--kv-type", "int8"], "the certificate is of keys and values in fp16, not int8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_was_not_certified_is_refused(cli: Cli, converted_demo: None, name: str) -> None:
    arguments, says = BAD[name]
    assert says in complaint(cli(*SIMULATED, "--mode", CERTIFIED, *arguments), 2)


def test_a_text_that_is_not_greedy_is_refused(converted_demo: None) -> None:
    limits = Limits(mode=CERTIFIED, gpu_layers=6)
    with (
        Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), limits=limits, emulate=True) as engine,
        pytest.raises(UsageError, match="of greedy texts"),
    ):
        engine.generate("Once upon a time", max_new_tokens=4, temperature=0.7)


@pytest.mark.parametrize("mode", sorted({*EARLY_EXIT_MODES} - {CERTIFIED}))
def test_a_risk_of_another_mode_is_refused(cli: Cli, mode: str) -> None:
    assert "--risk is of mode certified" in complaint(cli(*SIMULATED, "--mode", mode, "--risk", 0.05), 2)


@pytest.mark.sample(0)
def test_predictors_that_say_nothing_let_nothing_exit(
    cli: Cli, converted_demo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN confidences: every mode that asks a predictor is full mode."""
    for name in ("of_row", "of_candidates"):
        monkeypatch.setattr(ExitConfidence, name, lambda *_: math.nan)
    text, modes = tmp_path / "stories.txt", ["specee", CERTIFIED]
    text.write_text(STORIES)
    options = ["--hardware", LAPTOP, "-ngl", 6, "--text", text, *SHORT, "--modes", ",".join(modes), "--json"]
    _, *others = json.loads(cli("eval", *options).out)["modes"]
    assert [each["mode"] for each in others] == modes
    for each in others:
        assert (each["identity"]["value"], each["changed"]["value"], each["kl_nats"]["value"]) == (1, 0, 0)
        assert each["mean_depth"]["value"] == 12


def test_an_audit_finds_what_was_not_certified_says_so_and_leaves_the_mode(own_folder: Path) -> None:
    """The certificate says that every exit is sure and right, which they are not."""
    known, remarks = shipped(own_folder), list[str]()
    sure = np.full_like(known.judgements, 2 * (N_LEVELS - 1) + 1)
    write_certificate(replace(known, judgements=sure), own_folder)
    limits, profile = Limits(mode=CERTIFIED, risk=0.01, gpu_layers=6), reference_profile(LAPTOP)
    told = lambda stage, done, n_all: remarks.append(stage) if n_all == 0 else None  # noqa: E731
    with Engine.from_pretrained(threads=1, profile=profile, limits=limits, emulate=True, progress=told) as engine:
        remarks.clear()
        for seed in range(20):
            engine.generate("One day", max_new_tokens=200, seed=seed, ignore_eos=True)
            if remarks:
                break
        [remark] = remarks
        assert "audited exits differ from the full model, more than was certified: no token exits any more" in remark
        left = engine.generate("Once upon a time", max_new_tokens=40).token_ids
        assert engine.exit_statistics is not None and engine.exit_statistics.n_exited == 0
    full = replace(limits, mode="full", risk=None)
    with Engine.from_pretrained(threads=1, profile=profile, limits=full, emulate=True) as engine:
        assert engine.generate("Once upon a time", max_new_tokens=40).token_ids == left


def test_certificates_are_found_with_their_store(own_folder: Path) -> None:
    """What the tests above spoil is what is read where nothing is spoilt."""
    write_certificate(shipped(own_folder), own_folder)
    limits = Limits(mode=CERTIFIED, gpu_layers=6)
    with Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), limits=limits, emulate=True) as engine:
        engine.generate("Once upon a time", max_new_tokens=20)
        assert engine.exit_statistics is not None and engine.exit_statistics.n_exited > 0
