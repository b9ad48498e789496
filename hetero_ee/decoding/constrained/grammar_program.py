"""Program that compiles grammars for a server in a process of its own, since some need unlimited time and memory.

Its arguments are limits: seconds per grammar, and bytes in addition to those of the tokenizer. The first line of
standard input is a JSON document with the parameters of Grammars. The program prints [] when it is ready. Each further
line is a JSON document with fields of SamplingParams. The answer is a list with the parts of an error message, empty if
the grammar can be used. A part that names an option is a list of its own. The program ends with standard input.
"""

import json
import math
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_ee.decoding.constrained.grammars import Grammars
from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams


def answer(grammars: Grammars, fields: dict[str, Any]) -> list[str | list[str]]:
    """Compile a grammar and compute its first mask, which is much of the work. Return the parts of an error message."""
    try:
        constraint = grammars.constraint(SamplingParams(**fields))
        if constraint is not None:
            constraint.allowed([])
    except HeteroError as error:
        return [part if isinstance(part, str) else [str(part)] for part in error.args]
    return []


def _limit_memory(n_bytes: int) -> None:
    """Limit the memory that this process may use in addition to its present memory, if the system supports that."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        n_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = n_pages * resource.getpagesize() + n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_after(seconds: float) -> None:
    """Make the system end this process after that time, even if its parent was killed. 0 cancels the timer."""
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(seconds))


def _write(answered: list[str | list[str]]) -> None:
    sys.stdout.write(json.dumps(answered) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer requests from standard input until it ends."""
    seconds, n_bytes = float(sys.argv[1]), int(sys.argv[2])
    tokenizer, n_tokens, end_token_ids = json.loads(sys.stdin.readline())
    grammars = Grammars(lambda: tokenizer, n_tokens, end_token_ids, n_kept=0)
    answer(grammars, {"grammar": 'start: "a"'})  # reads the tokenizer
    _limit_memory(n_bytes)
    _write([])
    for line in sys.stdin:
        _end_after(seconds + 1)
        answered = answer(grammars, json.loads(line))
        _end_after(0)
        _write(answered)


if __name__ == "__main__":
    main()
