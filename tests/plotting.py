"""A matplotlib that keeps what is drawn as text."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeFigure:
    """Stand-in for matplotlib's Figure. Saved as the format, then a line for each curve and each annotation."""

    def __init__(self, **_: Any) -> None:
        self.lines: list[str] = []

    def add_subplot(self) -> "FakeFigure":
        return self

    def plot(self, places: list[int], values: list[float], *, label: str, **_: Any) -> None:
        assert len(places) == len(values) and all(0 <= value <= 1 for value in values)
        self.lines.append(label)

    def errorbar(self, x: list[float], y: list[float], *, label: str, xerr: Any, yerr: Any, **_: Any) -> None:
        assert all(len(side) == len(x) == len(y) and min(side, default=0) >= 0 for side in (*xerr, *yerr))
        assert x == sorted(x)
        self.lines.append(f"{label} {len(x)}")

    def annotate(self, words: str, *_: Any, **__: Any) -> None:
        self.lines.append(f"at {words}")

    def set(self, **_: Any) -> None: ...
    def set_title(self, title: str, **_: Any) -> None: ...
    def grid(self, **_: Any) -> None: ...
    def legend(self, **_: Any) -> None: ...

    def savefig(self, file: Path, *, format: str, **_: Any) -> None:
        file.write_text("\n".join([format, *self.lines]))


def fake_matplotlib() -> ModuleType:
    package: Any = ModuleType("matplotlib")
    package.figure = SimpleNamespace(Figure=FakeFigure)
    return package
