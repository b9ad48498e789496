"""Chat input, typed or piped: turns lines into messages and commands.

A line is a message. A line that ends in a backslash continues on the next one. Lines between two \"\"\" are one
message. A line that begins with a slash is a command; a leading space makes it a message.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from hetero_ee.errors import UsageError
from hetero_ee_cli.terminal.text_file import decoded

ReadLine = Callable[[str], str | None]  # a prompt -> a line without its end, None after the last

PROMPT, PROMPT_OF_MORE = "> ", ". "
FENCE = '"""'
MAX_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Command:
    name: str  # with its slash
    argument: str  # the rest of the line


def read_entry(read_line: ReadLine) -> str | Command | None:
    """Return the next message or command, or None at the end."""
    while (line := read_line(PROMPT)) is not None:
        if line.lstrip().startswith(FENCE):
            text = _fenced(line.lstrip(), read_line)
        else:
            text = _continued(line, read_line)
            if text.startswith("/"):
                name, _, argument = text.strip().partition(" ")
                return Command(name, argument.strip())
        if text.strip():
            return text
    return None


def _fenced(line: str, read_line: ReadLine) -> str:
    """Return the text between the fences, including text on the fences' lines."""
    text = line.removeprefix(FENCE)
    while not text.rstrip().endswith(FENCE):
        if (more := read_line(PROMPT_OF_MORE)) is None:
            raise UsageError(f"a message that begins with {FENCE} must end with it.")
        text = _joined(text, more)
    return text.rstrip().removesuffix(FENCE).removeprefix("\n").removesuffix("\n")


def _continued(line: str, read_line: ReadLine) -> str:
    while line.endswith("\\"):
        line = line[:-1]
        if (more := read_line(PROMPT_OF_MORE)) is None:
            break
        line = _joined(line, more)
    return line


def _joined(text: str, line: str) -> str:
    from hetero_ee.text.chat_template import MAX_MESSAGE_CHARACTERS

    if len(text) + len(line) >= MAX_MESSAGE_CHARACTERS:
        raise UsageError(f"the message has more than {MAX_MESSAGE_CHARACTERS} characters.")
    return f"{text}\n{line}"


def piped_lines() -> ReadLine:
    """Return a function that reads a line from a pipe or file on standard input."""
    n_lines = 0

    def read(_prompt: str) -> str | None:
        nonlocal n_lines
        n_lines += 1
        name = f"line {n_lines} of standard input"
        line = decoded(sys.stdin.buffer.readline(MAX_LINE_BYTES + 1), name, MAX_LINE_BYTES)
        if "\0" in line:
            raise UsageError(f"{name} contains a NUL character.")
        return line.removesuffix("\n").removesuffix("\r") if line else None

    return read
