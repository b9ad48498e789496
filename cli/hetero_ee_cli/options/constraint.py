"""Options that name files with the form a text is to have."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from hetero_ee.options.sampling import SAMPLING, SamplingParams
from hetero_ee_cli.options.flags import OptionGroup
from hetero_ee_cli.options.sampling import FORMS
from hetero_ee_cli.terminal.text_file import read_text


class ConstraintOptions(OptionGroup):
    """Files with a JSON Schema or a grammar."""

    PANEL: ClassVar = "Text"
    OPTIONS: ClassVar = {name: replace(SAMPLING[name], typed=Path) for name in FORMS}

    def changes(self) -> dict[str, str]:
        """Return the fields of SamplingParams.

        Raises:
            UsageError: if a file can't be read, or is not JSON.
        """
        found = {name: read_text(name, file) for name, file in self.given.items()}
        if found:
            SamplingParams(**found)  # type: ignore[arg-type]  # checks them now, not after a conversion
        return found
