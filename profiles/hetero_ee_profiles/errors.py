"""The roots of the family of errors: hetero_ee.errors has the others, and this package raises these two itself."""

from collections.abc import Callable


class HeteroError(Exception):
    """Base of the family; catching it catches every deliberate refusal.

    Args:
        parts: The message in pieces. Pieces are text, and options that the message names: `str` of an option is its
            Python keyword, and `spelled` lets a caller show the name its own users know.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    def spelled(self, spell: Callable[[object], str]) -> str:
        """Return the message with every option in it named by `spell`."""
        return "".join(part if isinstance(part, str) else spell(part) for part in self.args)


class UsageError(HeteroError, ValueError):
    """A value the caller chose can't be used: sampling settings, prompt, context size, a flag."""
