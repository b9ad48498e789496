"""The wall clock may jump: nothing that waits, measures or decides goes by it."""

import itertools
import time
from pathlib import Path

import pytest

from hetero_ee_cpu_ops.jit.kernel_files import SUFFIX, UNFINISHED, is_unfinished, read_kernel, write_kernel
from tests.command_line import PROMPT, Cli

PRODUCT = Path(__file__).resolve().parents[2]
YEAR_S = 365 * 24 * 3600.0


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that goes back a year at one call and on by two at the next."""
    now_s, jumps = time.time(), itertools.cycle((-YEAR_S, YEAR_S))
    monkeypatch.setattr(time, "time", lambda: now_s + next(jumps))


@pytest.mark.usefixtures("jumping")
def test_a_text_is_the_same(cli: Cli, tiny: Path) -> None:
    arguments = ("generate", PROMPT, "-m", tiny, "-n", 20, "-t", 1, "--temp", 0)
    first, again = cli(*arguments), cli(*arguments)
    assert first.code == again.code == 0 and first.out == again.out
    assert "-" not in again.err.partition("gen")[2].partition("|")[0]  # no negative rate


def test_only_ages_of_files_and_dates_of_answers_go_by_the_wall_clock() -> None:
    folders = ("hetero_ee", "kernels", "cpu_ops", "profiles", "cli")
    sources = (file for folder in folders for file in (PRODUCT / folder).rglob("*.py"))
    users = {file.name for file in sources if "time.time()" in file.read_text()}
    assert users == {"kernel_files.py", "doctor.py", "openai.py", "responses.py", "models.py"}


@pytest.mark.parametrize("jump_s", [-YEAR_S, YEAR_S])
def test_a_kernel_is_written_whole_while_the_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """A jump back keeps an unfinished file for longer; one forward may take it from its writer, who writes it again."""
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + jump_s)
    (unfinished := tmp_path / f"a{UNFINISHED}").touch()
    assert is_unfinished(unfinished) == (jump_s > 0)
    write_kernel(tmp_path / f"a{SUFFIX}", b"code")
    assert read_kernel(tmp_path / f"a{SUFFIX}") == b"code"
