"""Stories in files, every n-th of them held out, and settings as command-line flags, shared by the scripts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

SEPARATOR = "<|endoftext|>"  # between stories, as the TinyStories files have it

T = TypeVar("T")


def read_stories(files: Sequence[Path], separator: str = SEPARATOR) -> list[str]:
    """The stories of all files, without the separators and line ends between them."""
    pieces = (piece.strip() for file in files for piece in file.read_text("utf-8", errors="ignore").split(separator))
    return [piece for piece in pieces if piece]


def without_held_out(stories: list[str], every: int) -> tuple[list[str], list[str]]:
    """The stories to learn from, and every n-th one, which is held out."""
    held_out = stories[every - 1 :: every] or stories[-1:]
    return [story for number, story in enumerate(stories, 1) if number % every], held_out


def parse_settings(parser: argparse.ArgumentParser, kind: type[T]) -> tuple[argparse.Namespace, T]:
    """Return the command line and a dataclass with a flag for each field. The fields' metadata hold the help texts.

    With --smoke the settings are those of its method smoke().
    """
    for item in fields(kind):  # type: ignore[arg-type]
        flag = "--" + item.name.replace("_", "-")
        parser.add_argument(flag, type=type(item.default), default=item.default, help=item.metadata["help"])
    given = parser.parse_args()
    settings: Any = kind(**{item.name: getattr(given, item.name) for item in fields(kind)})  # type: ignore[arg-type]
    return given, settings.smoke() if given.smoke else settings
