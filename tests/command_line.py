"""What the tests of the command line share."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROMPT = "Once upon a time"
N_TOKENS = 40
PLAIN = ["-t", "1", "--quantizer", "none", "-n", str(N_TOKENS)]
CLOSING_LINE = (
    r"\[ prompt (\d+) tok, [\d.]+ t/s \| gen (\d+) tok, [\d.]+ t/s \| peak memory [\d.]+ GiB( \| seed \d+)? \]\n"
)


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]


def refused(ended: Ended, cache: Path) -> int:
    """The exit code of a run that said one line and left nothing but, at most, compiled kernels."""
    assert ended.out == ""
    assert re.fullmatch(r"hetero-ee: [^\n]+\n", ended.err)
    assert "Traceback" not in ended.err and "\x1b" not in ended.err
    left = [path for path in cache.rglob("*") if path.is_file() or path.parent.name == "stores"]
    assert not [path for path in left if path.relative_to(cache).parts[0] != "kernels"]
    return ended.code
