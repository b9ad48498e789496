"""`hetero-ee calibrate`: the table, the document, the picture, and one sentence for whatever is wrong."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hetero_ee.weights.store.calibration_files import JSON_FILE
from tests.command_line import Cli, Ended
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


def complaint(ended: Ended, code: int) -> str:
    """The one line that a refusal says."""
    assert ended.code == code and ended.out == ""
    assert re.fullmatch(r"hetero-ee: [^\n]+\n", ended.err), ended.err
    return ended.err


class FakeFigure:
    """What is drawn of matplotlib's Figure; saved as a file with the labels."""

    def __init__(self, **_: Any) -> None:
        self.labels: list[str] = []

    def add_subplot(self) -> "FakeFigure":
        return self

    def plot(self, places: list[int], values: list[float], *, label: str, **_: Any) -> None:
        assert len(places) == len(values) and all(0 <= value <= 1 for value in values)
        self.labels.append(label)

    def set(self, **_: Any) -> None: ...
    def set_title(self, title: str) -> None: ...
    def grid(self, **_: Any) -> None: ...
    def legend(self) -> None: ...

    def savefig(self, file: Path, **_: Any) -> None:
        file.write_text("\n".join(self.labels))


@pytest.fixture
def matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matplotlib that can draw what we draw."""
    package: Any = ModuleType("matplotlib")
    package.figure = SimpleNamespace(Figure=FakeFigure)
    monkeypatch.setitem(sys.modules, "matplotlib", package)


def test_the_table_the_cost_and_where_it_lies(cli: Cli, tiny: Path, text: Path, cache: Path) -> None:
    ended = calibrated(cli, tiny, text)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].split()[:3] == ["exit", "layer", "agreement"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert re.search(r"mean depth [\d.]+ of 3 layers", ended.out)
    (folder,) = calibrations(cache)
    assert re.search(rf"\[ \d+ tokens \| \d+ s \| {re.escape(str(folder))} \]\n$", ended.err)
    assert (folder / JSON_FILE).is_file()
    listed = cli("models")
    assert listed.code == 0 and ".calibration" not in listed.out


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
    assert json.loads((calibrations(cache)[0] / JSON_FILE).read_text())["depths"] == found["depths"]


def test_the_picture_shows_agreement_and_acceptance(
    cli: Cli, tiny: Path, text: Path, tmp_path: Path, matplotlib: None
) -> None:
    picture = tmp_path / "exits.png"
    assert calibrated(cli, tiny, text, "--plot", picture).code == 0
    assert {"agreement without a map", "acceptance of gated drafts"} <= set(picture.read_text().splitlines())


def test_a_picture_without_matplotlib_is_refused_before_the_work(
    cli: Cli, tiny: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "hetero-ee[plot]" in complaint(calibrated(cli, tiny, text, "--plot", "x.png"), 2)
    assert not list(cache.glob("stores/*"))


def test_a_text_too_short_says_how_much_is_needed(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time.")
    ended = calibrated(cli, tiny, short)
    assert ended.code == 2 and re.search(r"the text has \d tokens .* at least 512 are needed", ended.err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--text", "nothing.txt"), "nothing.txt can't be read"),
        (("--tokens", "5"), "expected 512 to"),
        (("--tokens", "many"), "--tokens"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(cli: Cli, tiny: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in complaint(cli("calibrate", tiny, *arguments), 2)


def test_fp32_weights_are_refused(cli: Cli, tiny: Path, text: Path) -> None:
    assert "belongs to a store" in complaint(calibrated(cli, tiny, text, "--quantizer", "none"), 2)


def test_the_text_may_come_from_standard_input(cli: Cli, tiny: Path) -> None:
    ended = cli("calibrate", tiny, "--text", "-", "--tokens", 600, "-t", 1, stdin=text_of(700).encode())
    assert ended.code == 0 and "exit layer" in ended.out
