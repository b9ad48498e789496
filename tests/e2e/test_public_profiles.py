"""HardwareProfile as Python callers come by it: measured, loaded, shipped; and UsageError for what can't be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, HardwareProfile, HeteroError, Limits, UsageError
from hetero_ee_profiles.hardware import HardwareProfile as Record
from hetero_ee_profiles.records import to_json
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import Cli
from tests.shipped import MACHINES

LAPTOP = "rtx-4060-laptop-8gb"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own."""
    monkeypatch.setenv("HETERO_EE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def test_measured_once_and_found_again_as_the_command_line_finds_it(cli: Cli, data: Path, tiny: Path) -> None:
    stages: list[tuple[str, int]] = []
    found = HardwareProfile.measure(tiny, progress=lambda stage, n_done, n_all: stages.append((stage, n_all)))
    assert isinstance(found, HardwareProfile) and found.kind == "measured" and "about 5 seconds" in stages[0][0]
    stages.clear()
    again = HardwareProfile.measure(tiny, progress=lambda stage, n_done, n_all: stages.append((stage, n_all)))
    assert stages == [] and again.cpu[0].matmuls == found.cpu[0].matmuls
    listed = cli("profile", tiny, "--quick")
    assert listed.code == 0 and "[ found, measured on " in listed.err and "by HardwareProfile.measure" in listed.err


def test_what_the_command_prints_is_loaded(cli: Cli, data: Path, tiny: Path, tmp_path: Path) -> None:
    ended = cli("profile", tiny, "--quick", "--json")
    (file,) = (data / "profiles").iterdir()
    assert f"[ measured now | kept in {file} | --refresh measures again ]" in ended.err
    (tmp_path / "mine.json").write_text(ended.out)
    found = HardwareProfile.load(tmp_path / "mine.json")
    assert isinstance(found, HardwareProfile) and to_json(found) == ended.out
    assert cli("plan", tiny, "--hardware", tmp_path / "mine.json").code == 0


@pytest.mark.parametrize("name", MACHINES)
def test_shipped_profiles(name: str) -> None:
    found = HardwareProfile.shipped(name)
    assert isinstance(found, HardwareProfile) and to_json(found) == to_json(reference_profile(name))


def test_an_engine_takes_them_all(tiny: Path) -> None:
    limits = Limits(context_tokens=64, vram_budget_bytes=2**30)
    with Engine.from_pretrained(
        tiny, threads=1, profile=HardwareProfile.shipped(LAPTOP), limits=limits, emulate=True, context_tokens=64
    ) as engine:
        assert engine.plan is not None and engine.plan.hardware == LAPTOP


def damaged(folder: Path) -> Path:
    file = folder / "damaged.json"
    file.write_text(json.dumps(json.loads(to_json(reference_profile(LAPTOP))) | {"version": 1}))
    return file


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no such name": (
        lambda _: HardwareProfile.shipped("nope"),
        "'nope' is not a shipped profile; `hetero-ee profile --list` lists",
    ),
    "a name's type": (lambda _: HardwareProfile.shipped(None), "None is not a shipped profile"),
    "no such file": (lambda folder: HardwareProfile.load(folder / "x.json"), "can't be used"),
    "a folder": (HardwareProfile.load, "it is a folder, not a regular file"),
    "a damaged file": (lambda folder: HardwareProfile.load(damaged(folder)), "profile version 1"),
    "a NUL": (lambda _: HardwareProfile.load("a\0b"), "can't be used"),
    "nobody's home": (lambda _: HardwareProfile.load("~nobody-of-that-name/x"), "can't be used"),
    "no path": (lambda _: HardwareProfile.load(""), "is not a file"),
    "a path's type": (lambda _: HardwareProfile.load(3), "the profile 3 is not a file"),
    "a model's type": (lambda _: HardwareProfile.measure(3), "the model is 3"),
    "no such model": (lambda folder: HardwareProfile.measure(folder / "x"), "there is no folder"),
    "quick": (lambda _: HardwareProfile.measure(quick="yes"), "quick is 'yes'; expected True or False"),
    "refresh": (lambda _: HardwareProfile.measure(refresh=1), "refresh is 1"),
    "offline": (lambda _: HardwareProfile.measure(offline=None), "offline is None"),
    "threads": (lambda _: HardwareProfile.measure(threads=1.5), "threads is 1.5"),
    "progress": (lambda _: HardwareProfile.measure(progress=True), "progress is True"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_ends_in_one_sentence(name: str, tmp_path: Path) -> None:
    call, words = BAD[name]
    with pytest.raises(HeteroError) as refused:
        call(tmp_path)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert isinstance(refused.value, UsageError)


def test_there_is_one_family_of_errors() -> None:
    with pytest.raises(UsageError):
        reference_profile("nope")
    assert issubclass(HardwareProfile, Record)
