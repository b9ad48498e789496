"""A home folder that can't be read, or is not there: no trouble for commands whose folders are set."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of users and capabilities as Linux has them")
# As for a user of a container whose number is in no passwd file.
HOMELESS = """
import pwd
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
from hetero_ee_cli.__main__ import main
main()
"""
CAPABILITIES = "-dac_override,-dac_read_search"  # by which root may read everything
GENERATE = ["generate", "Once upon a time", "-n", "3", "-t", "1", "--profile", "off", "--quantizer", "rtn"]
COMMANDS = {
    "models": ["models"],
    "generate": GENERATE,
    "chat": ["chat", "-t", "1", "--profile", "off", "--quantizer", "rtn"],
    "config": ["config", "show"],
    "doctor": ["doctor"],
    "plan": ["plan", "-t", "1"],
}


def ended(command: list[str], folder: Path, home: Path | None = None, **variables: str) -> Ended:
    own = ("HOME", "XDG_", "HF_", "HETERO_EE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)} | variables
    if home is not None:
        environment["HOME"] = str(home)
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300, check=False)
    return Ended(run.returncode, run.stdout, run.stderr)


def folders(cache: Path) -> dict[str, str]:
    return {"HETERO_EE_CACHE_DIR": str(cache), "HETERO_EE_DATA_DIR": str(cache / "data")}


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A home folder that nobody may look into."""
    folder = tmp_path / "locked"
    (folder / ".config" / "hetero_ee").mkdir(parents=True)
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def unprivileged() -> list[str]:
    """What makes of a command one that has to ask permission."""
    if os.geteuid() != 0:
        return []
    command = ["setpriv", "--bounding-set", CAPABILITIES, "--inh-caps", CAPABILITIES]
    if not shutil.which("setpriv") or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("root reads every folder, and there is no setpriv here that would take that from it")
    return command


@pytest.mark.few(4)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.sample(0)
def test_a_home_that_may_not_be_read(name: str, locked: Path, cache: Path, tmp_path: Path) -> None:
    command = [*unprivileged(), sys.executable, "-m", "hetero_ee_cli", *COMMANDS[name]]
    run = ended(command, tmp_path, locked, **folders(cache))
    assert run.code == 0 and "Traceback" not in run.err, run.err


def test_a_configuration_that_may_not_be_read_is_said_to_be_there(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "home" / ".config" / "hetero_ee" / "config.toml"
    file.parent.mkdir(parents=True)
    file.touch(mode=0)
    command = [*unprivileged(), sys.executable, "-m", "hetero_ee_cli", "models"]
    run = ended(command, tmp_path, tmp_path / "home", **folders(cache))
    assert run.code == 2 and run.err == f"hetero-ee: the configuration {file} can't be read (Permission denied).\n"


@pytest.mark.few(4)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.sample(1)
def test_a_user_without_a_home(name: str, cache: Path, tmp_path: Path) -> None:
    run = ended([sys.executable, "-c", HOMELESS, *COMMANDS[name]], tmp_path, **folders(cache))
    assert run.code == 0 and "Traceback" not in run.err, run.err
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "show", "--json"], ["doctor"]])
@pytest.mark.sample(1)
def test_without_a_home_no_file_of_the_working_folder_is_read(
    arguments: list[str], cache: Path, tmp_path: Path
) -> None:
    for name in ("~", "~/.config"):
        file = tmp_path / name / "hetero_ee" / "config.toml"
        file.parent.mkdir(parents=True)
        file.write_text("no_setting = 1\n")
    run = ended([sys.executable, "-c", HOMELESS, *arguments], tmp_path, **folders(cache))
    assert run.code == 0 and "config.toml" not in run.out, run.out + run.err


@pytest.mark.parametrize(
    ("arguments", "variable", "given"),
    [
        (GENERATE, "HETERO_EE_CACHE_DIR", ()),
        (["pull", "someone/some-model"], "HF_HOME", ("HETERO_EE_CACHE_DIR", "HETERO_EE_DATA_DIR")),
    ],
)
@pytest.mark.sample(0)
def test_what_needs_a_home_says_so(arguments: list[str], variable: str, given: tuple[str, ...], tmp_path: Path) -> None:
    variables = {name: str(tmp_path / name) for name in given}
    run = ended([sys.executable, "-c", HOMELESS, *arguments], tmp_path, **variables)
    assert run.code == 2 and run.out == "" and run.err.count("\n") == 1
    assert "this user has no home folder" in run.err and variable in run.err
    assert not any(tmp_path.iterdir())
