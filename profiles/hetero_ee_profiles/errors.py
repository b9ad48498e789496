"""The base classes of all errors that the project raises deliberately. hetero_ee.errors has the others."""

from collections.abc import Callable


class HeteroError(Exception):
    """Base class of all deliberate errors.

    Args:
        parts: pieces of the message: text, and options that it names. `str` of an option is its Python keyword;
            `spelled` shows other names, such as those of the command line.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    def spelled(self, spell: Callable[[object], str]) -> str:
        """Return the message with each option named by spell(option)."""
        return "".join(part if isinstance(part, str) else spell(part) for part in self.args)


class UsageError(HeteroError, ValueError):
    """A value chosen by the caller can't be used: sampling settings, prompt, context size, a flag."""
