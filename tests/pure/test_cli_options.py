"""Options of the command line: stated once in a dataclass, seen by typer as parameters of each command."""

import inspect
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer

from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee_cli.commands.bench import bench
from hetero_ee_cli.commands.calibrate import calibrate
from hetero_ee_cli.commands.chat import chat
from hetero_ee_cli.commands.generate import generate
from hetero_ee_cli.commands.plan import plan
from hetero_ee_cli.commands.simulate import simulate
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.planning import GIB, LimitOptions
from hetero_ee_cli.options.sampling import SamplingOptions


@dataclass(frozen=True, kw_only=True)
class Paint:
    colour: Annotated[str, typer.Option("--colour")] = "red"
    coats: Annotated[int, typer.Option()] = 2


def test_a_command_gets_the_dataclass_and_typer_its_fields() -> None:
    seen: list[tuple[Paint, int]] = []

    @with_options(without={"coats": "one is enough"})
    def command(paint: Paint, height: Annotated[int, typer.Option()] = 1) -> None:
        seen.append((paint, height))

    parameters = inspect.signature(command).parameters
    assert list(parameters) == list(command.__annotations__) == ["height", "colour"]
    assert parameters["colour"].default == "red" and parameters["colour"].annotation == Paint.__annotations__["colour"]
    command(height=3, colour="blue")
    assert seen == [(Paint(colour="blue", coats=2), 3)]


@pytest.mark.parametrize("command", [generate, chat, bench, plan, simulate])
def test_every_command_that_plans_has_the_limits(command: object) -> None:
    names = set(inspect.signature(command).parameters)  # type: ignore[arg-type]
    assert {field.name for field in fields(LimitOptions)} <= names


def test_sampling_options_are_fields_of_the_library_s() -> None:
    assert {each.name for each in fields(SamplingOptions)} <= {each.name for each in fields(SamplingParams)}


def test_help_names_the_library_s_defaults() -> None:
    """Importing the library for them would make every --help wait for torch."""
    hints = LimitOptions.__annotations__
    assert f"[default: {Limits().vram_margin_bytes // GIB}]" in hints["vram_margin"].__metadata__[0].help
    assert f"[default: {Limits().kv_type}]" in hints["kv_type"].__metadata__[0].help
    tokens = inspect.signature(calibrate).parameters["tokens"].annotation
    assert f"[default: {CalibrationRequest().n_tokens}]" in tokens.__metadata__[0].help
