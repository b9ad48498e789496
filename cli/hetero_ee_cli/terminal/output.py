"""What a command says: the text on standard output as it comes, everything else in lines on standard error."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GeneratedToken


def print_tokens(tokens: "Iterator[GeneratedToken]", quiet: bool = False) -> "tuple[list[GeneratedToken], bool]":
    """Prints the text as it comes; the tokens that came, and whether Ctrl-C ended them."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="")  # type: ignore[union-attr]
    seen: list[GeneratedToken] = []
    try:
        for token in tokens:
            seen.append(token)
            if token.text and not quiet:
                sys.stdout.write(token.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        return seen, True
    return seen, False


def say(line: str) -> None:
    """A line on standard error."""
    print(line, file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """A refusal, on standard error."""
    say(f"hetero-ee: {printable(message)}")


def printable(message: str) -> str:
    """One line, control characters escaped: file and tensor names come from outside."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
