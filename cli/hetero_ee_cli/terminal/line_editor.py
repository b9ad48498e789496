"""Line editor for a terminal, with editing, history and completion by readline if Python has it."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Self

import platformdirs

from hetero_ee.config.toml_file import own_folder
from hetero_ee.errors import UsageError

N_HISTORY_LINES = 1000
MAX_HISTORY_BYTES = 2**20


def history_file() -> Path:
    """Return the history's path in the platform's folder for state, or None for a user without a home folder."""
    folder = own_folder(platformdirs.user_state_path)
    return Path(os.devnull) if folder is None else folder / "chat_history"


class LineEditor:
    """Reads lines from the terminal. Tab completes `commands`, and the file `history` stores the lines."""

    def __init__(self, commands: Sequence[str], history: Path) -> None:
        self._commands, self._history = commands, history
        self._readline = _readline() if sys.stdout.isatty() else None  # readline writes the prompt to standard output

    def __enter__(self) -> Self:
        if self._readline is not None:
            self._readline.set_completer(self._completion)
            self._readline.set_completer_delims("")
            is_libedit = "libedit" in (self._readline.__doc__ or "")
            self._readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
            self._readline.set_history_length(N_HISTORY_LINES)
            with suppress(OSError):  # the chat works without history
                self._load_history(self._readline)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None:
            self._readline.set_completer(None)

    def read(self, prompt: str) -> str | None:
        """Return a line without its newline, or None at Ctrl-D."""
        try:
            line = self._line(prompt)
            line.encode("utf-8")  # if the locale is not UTF-8, Python reads other bytes as surrogates
        except EOFError:
            return None
        except UnicodeError as error:
            raise UsageError("that line is not UTF-8 text.") from error
        if "\0" in line:
            raise UsageError("that line contains a NUL character.")
        return line

    def _line(self, prompt: str) -> str:
        """Read a line. Raises: EOFError: at the end. UnicodeError: if its bytes are not text."""
        if self._readline is not None:
            line = input(prompt)
            self._keep(line)
            return line
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _load_history(self, readline: ModuleType) -> None:
        """Read the history, which is made readable only for its owner. A file that is not regular stays unchanged."""
        self._history.parent.mkdir(parents=True, exist_ok=True)
        if not self._history.exists():
            self._history.touch(mode=0o600)
        if self._history.is_file():
            self._history.chmod(0o600)
            if self._history.stat().st_size <= MAX_HISTORY_BYTES:
                readline.read_history_file(self._history)

    def _keep(self, line: str) -> None:
        """Append the line to the history at once, so that parallel chats both keep theirs, as does a killed chat."""
        append = getattr(self._readline, "append_history_file", None)  # libedit may have none
        if line and append is not None:
            with suppress(OSError):
                append(1, self._history)

    def _completion(self, text: str, state: int) -> str | None:
        matching = [command for command in self._commands if text and command.startswith(text)]
        return matching[state] if state < len(matching) else None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Windows
        return None
    return readline
