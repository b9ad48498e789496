"""What a command says: results on standard output, everything else in lines on standard error."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetero_ee import __version__

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GeneratedToken

JSON_SCHEMA = 2


def print_tokens(tokens: "Iterator[GeneratedToken]", quiet: bool = False) -> "tuple[list[GeneratedToken], bool]":
    """Prints the text as it is generated. Returns the tokens, and whether Ctrl-C ended them."""
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


def print_document(document: Mapping[str, Any], *, with_version: bool = False) -> None:
    """One JSON document on one line, with the version of its schema and of hetero_ee."""
    print(json.dumps({"schema": JSON_SCHEMA} | ({"version": __version__} if with_version else {}) | dict(document)))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def say(line: str) -> None:
    """A line on standard error."""
    print(line, file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """An error, on standard error."""
    say(f"hetero-ee: {printable(message)}")


def printable(message: str) -> str:
    """One line with control characters escaped: names of files and tensors come from outside."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
