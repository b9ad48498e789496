"""What the tests of the command line share."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROMPT = "Once upon a time"
N_TOKENS = 40
PLAIN = ["-t", "1", "--quantizer", "none", "-n", str(N_TOKENS)]
RATE = r"[\d.]+ t/s(?: \(expected [\d.]+\))?"
MODE = r"(?: \| (?:full|exact)[^|\n]*)?"
READING = r"(?: \((?:n-grams|draft head) [^)]+\))?"
CLOSING_LINE = (
    rf"\[ prompt (\d+) tok, {RATE}{READING} \| gen (\d+) tok, {RATE}{MODE} \| peak memory [\d.]+ GiB( \| seed \d+)? "
    r"\]\n"
)


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]


def complaint(ended: Ended, code: int) -> str:
    """Return the one line on standard error of a command that ended with that exit code and printed nothing else."""
    assert ended.code == code and ended.out == ""
    assert re.fullmatch(r"hetero-ee: [^\n]+\n", ended.err), ended.err
    return ended.err


def stores(cache: Path) -> list[Path]:
    """What lies in the cache's folder of stores: whole ones and parts, but not the locks, which are never deleted."""
    return sorted(path for path in cache.glob("stores/*") if path.suffix != ".lock")


def refused(ended: Ended, cache: Path) -> int:
    """The exit code of a run that said one line and left nothing but, at most, compiled kernels."""
    assert ended.out == ""
    assert re.fullmatch(r"hetero-ee: [^\n]+\n", ended.err)
    assert "Traceback" not in ended.err and "\x1b" not in ended.err
    left = [path for path in cache.rglob("*") if path.suffix != ".lock" and (path.is_file() or path in stores(cache))]
    assert not [path for path in left if path.relative_to(cache).parts[0] != "kernels"]
    return ended.code
