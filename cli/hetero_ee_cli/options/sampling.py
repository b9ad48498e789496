"""Options for choosing tokens and for ending texts."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import RANDOM, SAMPLING, UNLIMITED, SamplingParams
from hetero_ee_cli.options.flags import OptionGroup
from hetero_ee_cli.terminal.text_file import read_text

FORMS = ("json_schema", "grammar")  # whose flags name files
LENGTH_FLAGS = SAMPLING["max_new_tokens"].flags


class SamplingOptions(OptionGroup):
    """Sampling options that have a flag. An option that is not given keeps the model's own value."""

    PANEL: ClassVar = "Text"
    OPTIONS: ClassVar = {name: each for name, each in SAMPLING.items() if each.flags and name not in FORMS}

    @property
    def has_seed(self) -> bool:
        """Whether the user chose a seed, so that texts are repeatable."""
        return bool(self.given.get("seed", RANDOM) != RANDOM)

    def changes(self) -> dict[str, Any]:
        """Return the given fields of SamplingParams, and a seed in any case."""
        if "" in self.given.get("stop", ()):
            raise UsageError(SAMPLING["stop"], " is empty, which every text holds; give the string that ends the text.")
        length, option = self.given.get("max_new_tokens", 1), SAMPLING["max_new_tokens"]
        if length < 1 and length != UNLIMITED:
            raise UsageError(option, f" is {length}; expected a whole number from 1, or -1: until the text ends.")
        changes: dict[str, Any] = {
            name: tuple(value) if name == "stop" else SAMPLING[name].stand_ins.get(value, value)
            for name, value in self.given.items()
        }
        if not self.has_seed:
            changes["seed"] = new_seed()
        SamplingParams(**changes)  # checks them now, not after a conversion
        return changes


class ConstraintOptions(OptionGroup):
    """Options for files with a JSON Schema or a grammar."""

    PANEL: ClassVar = "Text"
    OPTIONS: ClassVar = {name: replace(SAMPLING[name], typed=Path) for name in FORMS}

    def changes(self) -> dict[str, str]:
        found = {name: read_text(name, file) for name, file in self.given.items()}
        if found:
            SamplingParams(**found)  # type: ignore[arg-type]  # checks them now, not after a conversion
        return found


def new_seed() -> int:
    return time.time_ns() % 2**32
