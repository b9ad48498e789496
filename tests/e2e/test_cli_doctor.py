"""`hetero-ee doctor` and `hetero-ee config show` as their users meet them."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_ee.options.engine import SETTINGS
from hetero_ee_cli.commands.doctor import lines
from tests.command_line import Cli, refused
from tests.recorded_hosts import recorded

ROWS = [
    *("hetero_ee", "Python", "system", "CPU", "instructions", "memory", "huge pages", "torch", "GPU", "GPU matmul"),
    *("transformers", "huggingface_hub", "Numba", "OpenMP", "versions", "cache disk", "kernel cache", "stores"),
    *("configuration", "variables", "Hugging Face", "clock"),
]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves the two seconds that importing torch in another process takes."""
    from hetero_ee_profiles.host import torch_build

    answer = torch_build.TorchBuild("2.13.0+cpu", None, None, (), "")
    monkeypatch.setattr(torch_build, "torch_build", lambda host: answer)


def test_one_json_document_that_names_nobody(cache: Path) -> None:
    """As a process, with the real torch. A secret token and the user's folders are there to be leaked."""
    home = cache / "home" / "somebody"
    (home / ".config" / "hetero_ee").mkdir(parents=True)
    (home / ".config" / "hetero_ee" / "config.toml").write_text("threads = 1")
    secret = "hf_NeverToBeShown"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HETERO_EE", "XDG"))
    }
    environment |= {"HOME": str(home), "USER": "somebody", "LOGNAME": "somebody", "HF_TOKEN": secret}
    environment |= {"HETERO_EE_TOKEN": secret}
    command = [sys.executable, "-m", "hetero_ee_cli", "doctor", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (ended.returncode, ended.stderr, ended.stdout.count("\n")) == (0, "", 1)
    document = json.loads(ended.stdout)
    assert set(document) == {"schema", "rows"} and document["schema"] == 2
    assert [row["name"] for row in document["rows"]] == ROWS
    for row in document["rows"]:
        assert set(row) == {"name", "status", "finding", "advice"} and row["finding"]
        assert row["status"] in ("ok", "warn") and bool(row["advice"]) == (row["status"] != "ok")
    found = {row["name"]: row["finding"] for row in document["rows"]}
    assert found["cache disk"].startswith("~/.cache/hetero_ee: ")
    assert found["configuration"] == "~/.config/hetero_ee/config.toml: 1 setting"
    assert found["variables"] == "unknown: HETERO_EE_TOKEN"
    assert found["Hugging Face"].startswith("a token")
    for private in (secret, "somebody", str(cache), socket.gethostname() if len(socket.gethostname()) > 3 else secret):
        assert private not in ended.stdout
    assert not (home / ".cache").exists()


def test_lines_are_aligned_and_plain(cli: Cli, no_torch: None) -> None:
    ended = cli("doctor")
    assert ended.code == 0 and ended.err == "" and "\x1b" not in ended.out
    rows = [line for line in ended.out.splitlines() if not line.startswith(" ")]
    assert [row[6:23].strip() for row in rows] == ROWS
    assert all(re.match(r"(ok  |warn|fail)  \S", row) and row[21:23] == "  " and row[23] != " " for row in rows)
    assert f"/{getpass.getuser()}/" not in ended.out


def test_a_failing_row_is_exit_code_1(
    cli: Cli, no_torch: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("thread = 3")
    monkeypatch.setenv("HETERO_EE_CONFIG", str(file))
    ended = cli("doctor")
    assert ended.code == 1 and ended.err == ""
    assert re.search(
        r"^fail  configuration +'thread' in .*config.toml is not a setting; did you mean threads\?$", ended.out, re.M
    )
    assert re.search(r"^ +-> Correct it; no other command runs until then\.$", ended.out, re.M)
    monkeypatch.setenv("HETERO_EE_CONFIG", os.devnull)
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", str(file / "inside"))
    as_json = cli("doctor", "--json")
    assert as_json.code == 1
    (failed,) = [row for row in json.loads(as_json.out)["rows"] if row["status"] == "fail"]
    assert failed["name"] == "cache disk" and "HETERO_EE_CACHE_DIR" in failed["advice"]
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", "~no-such-user-here")
    assert "fail  configuration" in cli("doctor").out


def test_a_machine_of_which_nothing_is_known_gets_all_rows() -> None:
    from hetero_ee_cli.checks.finding import examine
    from hetero_ee_cli.commands.doctor import checks

    rows = examine(checks(recorded(system="plan9", libc=""), {}))
    assert [row.name for row in rows] == ROWS
    assert {row.name: row.status for row in rows}["torch"] == "fail"


def test_colour_is_for_terminals(cli: Cli, no_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_ee_cli.checks.finding import Row, Status

    rows = [Row("a", Status.OK, "fine", ""), Row("bcd", Status.FAIL, "bad", "mend it")]
    assert lines(rows, in_colour=False) == ["ok    a    fine", "fail  bcd  bad", "           -> mend it"]
    coloured = lines(rows, in_colour=True)
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in coloured] == lines(rows, in_colour=False)
    assert coloured[1].startswith("\x1b[31mfail\x1b[0m")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("hetero_ee_cli.commands.doctor.is_terminal", lambda: True)
    assert "\x1b[32m" in cli("doctor").out and "\x1b" not in cli("doctor", "--json").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in cli("doctor").out


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["config", "show", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hetero_ee_cli", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in ended.stderr.splitlines()}
    heavy = {"torch", "transformers", "numpy", "numba", "huggingface_hub", "psutil", "filelock", "rich"}
    assert "hetero_ee_cli" in imported and not imported & heavy


# hetero-ee config show


def test_every_setting_is_shown_with_its_source(cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / "config.toml"
    file.write_text("quantizer = 'rtn'\nthreads = 4")
    monkeypatch.setenv("HETERO_EE_CONFIG", str(file))
    monkeypatch.setenv("HETERO_EE_THREADS", "2")
    ended = cli("config", "show", "--json", "-c", 512, "--offline")
    document = json.loads(ended.out)
    assert (ended.code, ended.err, document["schema"]) == (0, "", 2)
    assert document["settings"].pop("profile")["value"] in ("auto", "off")  # as whoever runs the tests has it
    assert document["settings"] == {
        "model": {"value": None, "source": "default"},
        "threads": {"value": 2, "source": "HETERO_EE_THREADS"},
        "ctx_size": {"value": 512, "source": "flag"},
        "quantizer": {"value": "rtn", "source": "file"},
        "activations": {"value": "int8", "source": "default"},
        "offline": {"value": True, "source": "flag"},
        "cache_dir": {"value": str(cache), "source": "HETERO_EE_CACHE_DIR"},
        "data_dir": {"value": os.environ["HETERO_EE_DATA_DIR"], "source": "HETERO_EE_DATA_DIR"},
    }
    paths = document["paths"]
    assert (paths["config_file"], paths["cache"], paths["stores"]) == (str(file), str(cache), str(cache / "stores"))
    assert Path(paths["kernels"]).parent == cache / "kernels"
    assert paths["profiles"] == str(Path(os.environ["HETERO_EE_DATA_DIR"], "profiles"))
    table = cli("config", "show", "-t", 9).out.splitlines()
    assert [line.split()[0] for line in table[1 : 1 + len(SETTINGS)]] == list(SETTINGS)
    assert table[1].split("  ")[0] == "model" and "demo model" in table[1] and table[1].endswith("default")
    rows = {line.split()[0]: line for line in table[1 : 1 + len(SETTINGS)]}
    assert re.fullmatch(r"threads +9 +flag", rows["threads"])
    assert re.fullmatch(r"offline +false +default", rows["offline"])


def test_control_characters_do_not_reach_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HETERO_EE_MODEL", "HETERO_EE_CACHE_DIR"):
        monkeypatch.setenv(variable, "/a\x1b[31m\nb")
    table = cli("config", "show").out
    assert "\x1b" not in table and table.count("/a\\x1b[31m\\nb") >= 3


def test_paths_are_those_hugging_face_hub_uses(cli: Cli) -> None:
    from huggingface_hub import constants

    paths = json.loads(cli("config", "show", "--json").out)["paths"]
    assert paths["hugging_face_cache"] == constants.HF_HUB_CACHE


@pytest.mark.parametrize(
    ("variable", "value", "arguments", "sentence"),
    [
        ("HETERO_EE_THREADS", "many", ["config", "show"], "HETERO_EE_THREADS is 'many'; expected a whole number from"),
        ("HETERO_EE_THREADS", "many", ["generate", "x"], "HETERO_EE_THREADS is 'many'; expected a whole number from"),
        ("HETERO_EE_CONFIG", "/no-such\n-file", ["generate", "x"], "/no-such\\n-file, which can't be read (No such"),
        ("HETERO_EE_CACHE_DIR", "~no-such-user-here", ["generate", "x"], "there is no such home folder."),
        ("HETERO_EE_MODEL", "./no-such-folder", ["generate", "x"], "HETERO_EE_MODEL: there is no folder no-"),
        ("HETERO_EE_MODEL", "./a", ["generate", "x", "-m", "./b"], "hetero-ee: there is no folder b; give one with"),
        ("NO_COLOR", "", ["config", "show", "-t", "-1"], "--threads is -1; expected a whole number from 0 to 1024."),
    ],
)
def test_settings_that_cannot_be_used(
    cli: Cli,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setenv(variable, value)
    ended = cli(*arguments)
    assert refused(ended, cache) in (1, 2) and sentence in ended.err


def test_generate_takes_its_settings_from_the_file(
    cli: Cli, tiny: Path, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"model = '{tiny}'\nquantizer = 'none'\nthreads = 1")
    monkeypatch.setenv("HETERO_EE_CONFIG", str(file))
    ended = cli("generate", "Once upon a time", "-n", 40, "--json")
    document = json.loads(ended.out)
    assert (ended.code, document["text"], document["quantizer"]) == (0, said, "none")
    assert document["model"] == str(tiny)
    over = cli("generate", "Once upon a time", "-n", 40, "--json", "--quantizer", "rtn")
    assert json.loads(over.out)["quantizer"] == "rtn"
