"""Options of `hetero-ee bench`, named like llama-bench's."""

from dataclasses import dataclass
from typing import Annotated

import typer

from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee_cli.options.flags import one_of
from hetero_ee_cli.reports.bench_table import FORMATS
from hetero_ee_cli.terminal.signals import ending_at_once

MAX_TOKENS, MAX_REPETITIONS = 2**20, 1000
FULL, EXACT, ALL = "full", "exact", "all"
Test = tuple[int, int, int]  # tokens of prompt, text and depth


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options for the tests, their repetitions, and the output."""

    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", help="Prompt lengths, like 128,512; 0: none.")] = "512"
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help="Numbers of tokens to generate; 0: none.")] = "128"
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", help="Context lengths to start from.")] = "0"
    threads: Annotated[
        str | None, typer.Option("-t", "--threads", help="Numbers of CPU threads. [default: all cores]")
    ] = None
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Times to run each test.")] = 5
    mode: Annotated[
        str | None,
        typer.Option(
            help="full, exact (on text that the model writes), or all for both. [default: full]",
            autocompletion=one_of((FULL, EXACT, ALL)),
        ),
    ] = None
    output: Annotated[
        str, typer.Option("-o", "--output", help="md, csv, json or jsonl.", autocompletion=one_of(FORMATS))
    ] = "md"
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False
    quick: Annotated[bool, typer.Option(help="Predict from a quick profile instead of a full one.")] = False
    refresh: Annotated[bool, typer.Option(help="Measure this machine again even if a profile was kept.")] = False

    @property
    def style(self) -> str:
        return "json" if self.as_json else self.output

    @property
    def single_mode(self) -> str | None:
        """The mode to plan for; None if both are measured or the user chose none."""
        return None if self.mode == ALL else self.mode

    def modes(self, usual: str) -> tuple[str, ...]:
        """Return the modes to measure: those that the user chose, or else `usual`."""
        return (FULL, EXACT) if self.mode == ALL else (self.mode or usual,)

    def tests(self) -> list[Test]:
        """Return (prompt tokens, generated tokens, depth) of each test, prompts first as in llama-bench."""
        prompts, texts = _numbers(self.n_prompt, "-p"), _numbers(self.n_gen, "-n")
        pairs = [*((n, 0) for n in prompts if n), *((0, n) for n in texts if n)]
        depths = _numbers(self.n_depth, "-d")
        if not pairs:
            raise UsageError("-p and -n are both 0, so there is nothing to measure; give one of them.")
        return [(n_prompt, n_gen, depth) for n_prompt, n_gen in pairs for depth in depths]

    def thread_counts(self, usual: int) -> tuple[int, ...]:
        """Return the numbers of threads to measure with. `usual` is the number in the settings."""
        with ending_at_once():
            from hetero_ee_profiles.host.process import processor_count, usable_threads

        counts, most = _numbers(self.threads, "-t") if self.threads else [], processor_count()
        if not all(0 <= count <= most for count in counts):
            expected = f"expected 0 (one on each physical core) to {most}, this process's processors."
            raise UsageError(MODEL_OPTIONS["threads"], f" is {self.threads}; {expected}")
        return tuple(usable_threads(count) for count in counts or [usual])

    def check(self) -> None:
        """Check the values."""
        if self.style not in FORMATS:
            raise UsageError(f"--output is {shown(self.style)}; expected one of {', '.join(FORMATS)}.")
        if not 1 <= self.repetitions <= MAX_REPETITIONS:
            raise UsageError(f"--repetitions is {self.repetitions}; expected 1 to {MAX_REPETITIONS}.")
        if self.mode not in (None, FULL, EXACT, ALL):
            raise UsageError(f"--mode is {shown(self.mode)}; expected one of {FULL}, {EXACT}, {ALL}.")


def _numbers(text: str, flag: str) -> list[int]:
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 9 and int(word) <= MAX_TOKENS for word in words):
        raise UsageError(f"{flag} is {shown(text)}; expected whole numbers up to {MAX_TOKENS}, separated by commas.")
    return [int(word) for word in words]
