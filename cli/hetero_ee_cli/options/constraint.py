"""Options that say what form a text is to have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from hetero_ee_cli.terminal.text_file import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintOptions:
    """Files with what SamplingParams has as text."""

    PANEL: ClassVar[str] = "Text"

    json_schema: Annotated[
        Path | None,
        typer.Option(help="The text is JSON that keeps to the JSON Schema in this file. Needs the extra [server]."),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(help="The text keeps to the grammar in this file: Lark, as llguidance has it, or GBNF."),
    ] = None

    def changes(self) -> dict[str, Any]:
        """Fields of SamplingParams. Raises UsageError for a file that can't be read or is no JSON."""
        from hetero_ee.decoding.sampling import SamplingParams

        files = {"json_schema": self.json_schema, "grammar": self.grammar}
        found = {name: read_text(name, file) for name, file in files.items() if file is not None}
        if found:
            SamplingParams(**found)  # type: ignore[arg-type]  # checks them now, not after a conversion
        return found
