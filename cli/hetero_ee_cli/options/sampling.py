"""Options for choosing tokens and for ending texts."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hetero_ee.errors import UsageError, shown
from hetero_ee.options.option import Option
from hetero_ee.options.sampling import RANDOM, SAMPLING, UNLIMITED, SamplingParams
from hetero_ee_cli.options.flags import OptionGroup
from hetero_ee_cli.options.prompt import unescaped
from hetero_ee_cli.terminal.text_file import read_text

OF_FILE = "_file"  # suffix of options that read another option's value from a file
FORMS = {"json_schema": "{", "grammar": ":"}  # a character that occurs in every such text but hardly in a file name
LENGTH_FLAGS = SAMPLING["max_new_tokens"].flags
BIAS = r"(\d{1,10})([+-](?:inf|\d+\.?\d*|\.\d+))"  # as in llama.cpp


def _of_file(option: Option) -> Option:
    return replace(option, flags=option.file_flags, typed=Path, help=f"Read {option.flag} from this file.")


class SamplingOptions(OptionGroup):
    """Sampling options that have a flag. An option that is not given keeps the model's own value."""

    PANEL: ClassVar = "Text"
    OPTIONS: ClassVar = {name: each for name, each in SAMPLING.items() if each.flags} | {
        f"{name}{OF_FILE}": _of_file(SAMPLING[name]) for name in FORMS
    }

    @property
    def has_seed(self) -> bool:
        """Whether the user chose a seed, so that texts are repeatable."""
        return bool(self.given.get("seed", RANDOM) != RANDOM)

    def changes(self, *, escapes: bool = False) -> dict[str, Any]:
        """Return the fields of SamplingParams that the user gave, and always a seed.

        Args:
            escapes: replace escape sequences such as \\n in stop strings.
        """
        if "" in self.given.get("stop", ()):
            raise UsageError(SAMPLING["stop"], " is empty, which every text holds; give the string that ends the text.")
        length, option = self.given.get("max_new_tokens", 1), SAMPLING["max_new_tokens"]
        if length < 1 and length != UNLIMITED:
            raise UsageError(option, f" is {length}; expected a whole number from 1, or -1: until the text ends.")
        changes: dict[str, Any] = {
            name: SAMPLING[name].stand_ins.get(value, value)
            for name, value in self.given.items()
            if not isinstance(value, list | Path)
        }
        changes["stop"] = tuple(unescaped(text) if escapes else text for text in self.given.get("stop", ()))
        changes["logit_bias"] = tuple(map(_bias, self.given.get("logit_bias", ())))
        changes = {name: value for name, value in changes.items() if value != ()} | self._forms()
        if not self.has_seed:
            changes["seed"] = new_seed()
        SamplingParams(**changes)  # checks them now, not after a conversion
        return changes

    def _forms(self) -> dict[str, str]:
        """Return the JSON Schema and the grammar that the user gave as text or in files."""
        found: dict[str, str] = {}
        for name, sign in FORMS.items():
            option, text, file = SAMPLING[name], self.given.get(name), self.given.get(f"{name}{OF_FILE}")
            from_file = _of_file(option).flag
            if text is not None and file is not None:
                raise UsageError(option, f" and {from_file} are both given; leave one out.")
            if text is not None and sign not in text:
                raise UsageError(option, f" is {shown(text)}; expected its text, which {from_file} reads from a file.")
            if text is not None or file is not None:
                found[name] = read_text(option.flag.removeprefix("--"), file) if text is None else text
        return found


def _bias(text: str) -> tuple[int, float]:
    """Split a --logit-bias value such as 15043-1.5 into the token id and the bias."""
    if (found := re.fullmatch(BIAS, text)) is None:
        option = SAMPLING["logit_bias"]
        raise UsageError(option, f" is {shown(text)}; expected a token id, a sign and a number, like 15043-1.5.")
    return int(found[1]), float(found[2])


def new_seed() -> int:
    return time.time_ns() % 2**32
