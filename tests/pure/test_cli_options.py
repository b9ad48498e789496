"""Options of the command line: stated once in a dataclass, seen by typer as parameters of each command."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import pytest
import typer
from typer.testing import CliRunner

from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.errors import UsageError
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.options.engine import ENGINE_OPTIONS, KV_TYPES, PLAN_OPTIONS
from hetero_ee.planning.limits import Limits
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.store.names import STORES_FOLDER
from hetero_ee_cli.app import app
from hetero_ee_cli.commands.bench import bench
from hetero_ee_cli.commands.calibrate import calibrate
from hetero_ee_cli.commands.chat import chat
from hetero_ee_cli.commands.generate import generate
from hetero_ee_cli.commands.plan import plan
from hetero_ee_cli.commands.simulate import simulate
from hetero_ee_cli.options.command import as_typed, typed_flags
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.placement import LimitOptions
from hetero_ee_profiles.units import GIB


@dataclass(frozen=True, kw_only=True)
class Paint:
    PANEL: ClassVar[str] = "Paint"

    colour: Annotated[str, typer.Option("--colour")] = "red"
    coats: Annotated[int, typer.Option()] = 2


def test_a_command_gets_the_dataclass_and_typer_its_fields() -> None:
    seen: list[tuple[Paint, int]] = []

    @with_options(without={"coats": "one is enough"})
    def command(paint: Paint, height: Annotated[int, typer.Option()] = 1) -> None:
        seen.append((paint, height))

    parameters = inspect.signature(command).parameters
    assert list(parameters) == list(command.__annotations__) == ["height", "colour"]
    assert parameters["colour"].default == "red" and get_args(parameters["colour"].annotation)[0] is str
    command(height=3, colour="blue")
    assert seen == [(Paint(colour="blue", coats=2), 3)]


@pytest.mark.parametrize("command", [generate, chat, bench, plan, simulate])
def test_every_command_that_plans_has_the_limits(command: object) -> None:
    names = set(inspect.signature(command).parameters)  # type: ignore[arg-type]
    assert set(LimitOptions.OPTIONS) <= names


def test_help_names_the_library_s_defaults() -> None:
    """Importing the library for them would make every --help wait for torch."""
    assert f"[default: {Limits().vram_margin_bytes // GIB}]" in PLAN_OPTIONS["vram_margin"].full_help
    kv_types = f"[default: {KV_TYPE}; {ReferenceExecutor.kv_type} with --quantizer none]"
    assert kv_types in PLAN_OPTIONS["kv_type"].full_help
    tokens = inspect.signature(calibrate).parameters["tokens"].annotation
    assert f"[default: {CalibrationRequest().n_tokens}]" in tokens.__metadata__[0].help


@pytest.mark.parametrize(
    ("name", "typed", "shown"),
    [
        ("context_tokens", ["-c", "-5"], "-c / --ctx-size"),
        ("context_tokens", ["--ctx-size=-5"], "--ctx-size"),
        ("context_tokens", ["-c3"], "-c / --ctx-size"),
        ("gpu_layers", ["-ngl=x"], "-ngl / --gpu-layers"),
        ("gpu_layers", ["--n-gpu-layers", "x"], "--n-gpu-layers / --gpu-layers"),
        ("gpu_layers", [], "--gpu-layers"),
        ("plan", ["-ngl", "3"], "--plan"),
        ("traces", [], "traces"),
    ],
)
def test_messages_name_options_by_the_flags_that_were_typed(name: str, typed: list[str], shown: str) -> None:
    option = ENGINE_OPTIONS[name]
    words = typed_flags(typed, {flag for each in ENGINE_OPTIONS.values() for flag in each.flags})
    error = UsageError(option, " is 3; drop ", option, ".")
    assert error.spelled(lambda part: as_typed(part, words)) == f"{shown} is 3; drop {shown}."
    assert str(error) == f"{name} is 3; drop {name}."


def test_completion_knows_what_the_library_does() -> None:
    """Importing the library for it would make Tab wait for torch."""
    assert tuple(KV_BYTES) == KV_TYPES


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["generate", "--quantizer", "r"], ["rtn"]),
        (["chat", "--kv-type", ""], ["fp32", "fp16", "int8"]),
        (["run", "--mode", "e"], ["exact"]),
        (["bench", "--mode", "a"], ["all"]),
        (["bench", "-o", "js"], ["json", "jsonl"]),
        (["plan", "--hardware", "rtx-40"], ["rtx-4060-laptop-8gb", "rtx-4070-12gb", "rtx-4090-24gb"]),
        (["generate", "-m", "de"], ["demo-codebook-1"]),
        (["run", ""], ["demo-codebook-1", "tiny-rtn-2"]),
        (["models", "remove", "t"], ["tiny-rtn-2"]),
        (["plan", "--random-weights", "llama-2"], ["llama-2-7b", "llama-2-13b"]),
    ],
    ids=range(10),
)
def test_values_complete(words: list[str], found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo-codebook-1", "tiny-rtn-2", "half.partial"):
        (tmp_path / STORES_FOLDER / name).mkdir(parents=True)
        if not name.endswith(".partial"):
            (tmp_path / STORES_FOLDER / name / "manifest.json").touch()
    line = " ".join(["hetero-ee", *words])
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", str(tmp_path))
    asked = {"_HETERO_EE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    ended = CliRunner().invoke(app, [], prog_name="hetero-ee", env=asked)
    assert ended.stdout.split() == found


@pytest.mark.parametrize("command", ["run", "generate", "chat", "bench"])
def test_help_has_its_options_in_groups(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], prog_name="hetero-ee").stdout
    titles = re.findall(r"^(\w[\w ]*):$", shown, re.M)
    assert titles[:2] == ["Arguments", "Options"] and {"Model", "Placement", "Plan and report"} <= set(titles)
    assert len(titles) == len(set(titles)) and "-ngl, --gpu-layers" in shown.partition("\nPlacement:\n")[2]
