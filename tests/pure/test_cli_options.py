"""Options of the command line: stated once in a dataclass, seen by typer as parameters of each command."""

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from hetero_ee.calibration.job import CalibrationRequest
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.errors import UsageError
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.options.engine import ENGINE_OPTIONS, KV_TYPES, PLAN_OPTIONS
from hetero_ee.options.sampling import SAMPLING, SamplingParams
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
from hetero_ee_cli.options.command import _unknown, as_typed, typed_flags
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.llama_cpp import NOT_OFFERED
from hetero_ee_cli.options.placement import LimitOptions
from hetero_ee_cli.options.prompt import unescaped
from hetero_ee_cli.options.sampling import SamplingOptions
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
    assert as_typed(SAMPLING["json_schema"], {"-jf"}) == "-jf"


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
        (["plan", "--hardware", "rtx-4090-"], ["rtx-4090-24gb", "rtx-4090-laptop-16gb"]),
        (["generate", "-m", "de"], ["demo-codebook-1"]),
        (["run", ""], ["demo-codebook-1", "tiny-rtn-2"]),
        (["models", "remove", "t"], ["tiny-rtn-2"]),
        (["plan", "--random-weights", "llama-2"], ["llama-2-7b", "llama-2-13b", "llama-2-70b"]),
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


# Flags of llama.cpp.


def refusal(*words: str) -> str:
    """Return the message of the error that these words end with."""
    return str(CliRunner().invoke(app, words, prog_name="hetero-ee").exception)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["generate", "Hi", "-ngld", "9"], "-ngld is not offered: the plan decides where a draft model runs"),
        (["run", "m", "-fa", "on"], "-fa is not offered: "),
        (["bench", "-mg", "0"], "-mg is not offered: one GPU is used"),
        (
            ["chat", "m", "--cache-type-k=q8_0"],
            "--cache-type-k is not offered: keys and values have one type; use --kv-type int8",
        ),
        (["serve", "--mlock"], "--mlock is not offered: "),
        (["simulate", "-b", "512"], "-b is not offered: "),
        (["run", "m", "-vp", "Hi"], "there is no option -vp. See hetero-ee run --help."),
        (["run", "-mdemo"], "there is no option -mdemo. See hetero-ee run --help."),
        (["chat", "-ngl7"], "there is no option -ngl7. Did you mean -ngl 7? See hetero-ee chat --help."),
    ],
    ids=range(9),
)
def test_flags_that_are_not_offered_are_refused_by_name(words: list[str], advice: str) -> None:
    assert refusal(*words).startswith(advice)


def test_values_and_letters_with_numbers_are_no_unknown_flags() -> None:
    known = {"--stop": True, "-c": True, "-v": False}
    words = ["--stop", "-md", "-v", "--stop=-md", "-c", "-1", "-c512", "-", "-fa", "--", "-xy"]
    assert list(_unknown(words, known)) == ["-c512", "-", "-fa"]


def test_no_command_has_a_flag_that_is_refused_and_advice_names_flags_that_exist() -> None:
    commands = get_command(app).commands.values()  # type: ignore[attr-defined]
    offered = {flag for command in commands for each in command.params for flag in each.opts}
    assert not offered & NOT_OFFERED.keys()
    named = {flag for advice in NOT_OFFERED.values() for flag in re.findall(r"(?<!\S)--?[a-z][a-z-]*", advice)}
    assert named <= offered and len(named) > 10


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"logit_bias": ["15043+1", "7-.5", "15043-2"]}, {"logit_bias": ((15043, -2.0), (7, -0.5))}),
        ({"stop": [r"\n"]}, {"stop": ("\n",)}),
        ({"ignore_eos": True, "presence_penalty": 1.5, "frequency_penalty": -1.0}, None),
        ({"json_schema": '{"type": "object"}'}, None),
        ({"grammar": 'root ::= "a"'}, None),
    ],
    ids=range(5),
)
def test_sampling_flags_have_llama_cpps_meaning(given: dict[str, object], changes: dict[str, object] | None) -> None:
    found = SamplingOptions(**given, seed=3).changes(escapes=True)
    assert SamplingParams(**found) == SamplingParams(seed=3, **(given if changes is None else changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": ["5"]}, "is '5'; expected a token id, a sign and a number, like 15043-1.5"),
        ({"logit_bias": ["5-inf"]}, "of token 5 is -inf; expected a number from -100 to 100"),
        ({"json_schema": "pet.json"}, "is 'pet.json'; expected its text, which --json-schema-file reads from a file"),
        ({"grammar": "answer.gbnf"}, "is 'answer.gbnf'; expected its text, which --grammar-file reads from a file"),
        ({"json_schema": "{}", "json_schema_file": Path("a")}, "and --json-schema-file are both given; leave one out"),
        ({"json_schema": "{}", "grammar": "a: b"}, "are both given; leave one out"),
        ({"json_schema_file": Path("/missing")}, "the json-schema from /missing can't be read"),
    ],
    ids=range(7),
)
def test_values_of_sampling_flags_are_checked_at_once(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        SamplingOptions(**given).changes()


def test_escapes_are_llama_cpps() -> None:
    assert unescaped(r"a\nb\t\r\'\"\\n\xC3\xA9\q\x4") == "a\nb\t\r'\"\\n\N{LATIN SMALL LETTER E WITH ACUTE}\\q\\x4"
    with pytest.raises(UsageError, match="the text with its escapes replaced is not UTF-8 text at byte 0"):
        unescaped(r"\xFF")


@pytest.mark.parametrize(
    ("text", "redirect", "shown"),
    [("text", "2>&1", b"text\n[ stats ]\n"), ("text\n", "2>&1", b"text\n[ stats ]\n"), ("text", "", b"text")],
    ids=["without a newline", "with a newline", "to another pipe"],
)
def test_a_report_begins_on_a_line_of_its_own(text: str, redirect: str, shown: bytes) -> None:
    code = (
        "import sys; from hetero_ee_cli.terminal.output import end_line, say;"
        "print(sys.argv[1], end='', flush=True); end_line(sys.argv[1]); say('[ stats ]')"
    )
    line = f'"$0" -c "$1" "$2" {redirect} | cat'
    done = subprocess.run(["sh", "-c", line, sys.executable, code, text], capture_output=True, timeout=60, check=True)
    assert done.stdout == shown and done.stderr == (b"" if redirect else b"[ stats ]\n")
