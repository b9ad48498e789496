"""Options for the prompt."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from hetero_ee.errors import UsageError
from hetero_ee_cli.terminal.text_file import MAX_TEXT_BYTES, decoded, read_text

STANDARD_INPUT = "-"
ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}  # llama.cpp's escapes, in addition to \', \", \\ and \xHH
ONE_PROMPT = "give one prompt: as an argument, with --prompt, with --file, or - for standard input."
PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The text to begin with; - reads it from standard input.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options that give the prompt as text or as a file."""

    PANEL: ClassVar[str] = "Prompt"

    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Text to begin with; in a chat, the first message.")
    ] = None
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Read it from a file.")] = None
    escape: Annotated[
        bool, typer.Option("-e", "--escape", help="Replace \\n, \\t, \\xHH and so on in the prompt and in --stop.")
    ] = False

    def given(self, argument: str | None = None) -> str | None:
        """Return the prompt, or None. A final newline of a file or of standard input is dropped.

        `argument` is a prompt that was typed without a flag; "-" reads standard input.
        """
        prompts = [each for each in (argument, self.prompt) if each is not None]
        if len(prompts) + (self.file is not None) > 1:
            raise UsageError(ONE_PROMPT)
        if not prompts and self.file is None:
            return None
        text = prompts[0] if prompts else STANDARD_INPUT
        if text == STANDARD_INPUT:
            text = read_text("prompt", self.file).removesuffix("\n").removesuffix("\r")
        if not text:
            raise UsageError("the prompt is empty; give some text to begin with.")
        return unescaped(text) if self.escape else text

    def required(self, argument: str | None = None) -> str:
        """Return the prompt as `given` does. Raises: UsageError: if there is none."""
        if (text := self.given(argument)) is None:
            raise UsageError(ONE_PROMPT)
        return text


def unescaped(text: str) -> str:
    """Replace escape sequences by their characters, as llama.cpp does. Unknown sequences stay unchanged."""

    def character(found: re.Match[bytes]) -> bytes:
        return bytes.fromhex(found[1].decode()) if found[1] else ESCAPES.get(found[2], found[2])

    data = text.encode("utf-8", "surrogateescape")
    replaced = re.sub(rb"\\(?:x([0-9A-Fa-f]{2})|([nrt'\"\\]))", character, data)
    return decoded(replaced, "the text with its escapes replaced", MAX_TEXT_BYTES)
