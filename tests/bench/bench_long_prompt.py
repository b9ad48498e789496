"""Exact mode behind long prompts: the draft head reads them with the model, so that the text has its full rate at once.

    python tests/bench/bench_long_prompt.py [--prompts 2000,20000] [--tokens 128] [--runs 3] [--json]

The demo model with its draft head, processor time of one thread, which other work lengthens least. A prompt of so many
tokens is read in one go, and a text follows. The same text at the same depth follows a short prompt too: all tokens but
the last 16 are known already, as in a chat; both begin with what rule and n-grams had learned by then. Both must have
the same rate: the draft head owes the text nothing. The tokens are full mode's.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from exit_demo import KNOWLEDGE, Stories
from specee_subjects import OPENINGS, this_profile

from hetero_ee.config import demo_model_folder
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Continuation, Ending
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.opening import Opened, open_planned
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.opening import open_drafting
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee_profiles.hardware import HardwareProfile
from tests.drafted_generation import generate_exact

CLOCK = time.thread_time
SHORT_TOKENS = 16  # of the prompt behind what is known
STORY_TOKENS = 300
CLOSE = 0.1  # how far the two rates may be apart
HEADING = (
    "| prompt | mode | prompt t/s | of it the draft head | first chunk, last chunk | text t/s | behind a short prompt "
    "| ratio | first step |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of all runs, in seconds and tokens a second."""

    n_prompt: int
    mode: str
    prompt_rate: float
    head_share: float  # of the prompt's time; 0 in full mode
    first_chunk_s: float
    last_chunk_s: float  # longer by the attention to what comes before it
    rate: float  # of the text behind a prompt read in one go
    short_rate: float  # of the same text behind a short prompt at the same depth
    first_step_s: float  # from the text's first token to what came next

    @property
    def ratio(self) -> float:
        return self.rate / self.short_rate

    def __str__(self) -> str:
        chunks = f"{1e3 * self.first_chunk_s:.0f} ms, {1e3 * self.last_chunk_s:.0f} ms"
        return (
            f"| {self.n_prompt:,} | {self.mode} | {self.prompt_rate:.0f} | {self.head_share:.1%} | {chunks} "
            f"| {self.rate:.1f} | {self.short_rate:.1f} | {self.ratio:.2f} | {1e3 * self.first_step_s:.1f} ms |"
        )


@dataclass(slots=True)
class Told:
    """One text. at_s: when each token came; chunks_s: when each chunk of its prompt began, and when it was read."""

    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)
    head_s: float = 0.0

    @property
    def rate(self) -> float:
        return (len(self.at_s) - 1) / (self.at_s[-1] - self.at_s[0])

    @property
    def first_step_s(self) -> float:
        return self.at_s[1] - self.at_s[0]


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """The demo model by this profile of the machine. n_runs: of each mode, from a fresh start."""

    stories: Stories
    profile: HardwareProfile
    n_runs: int

    def rows(self, n_prompt: int) -> Iterator[Row]:
        """Full mode, then exact; raises AssertionError where a token differs."""
        token_ids, texts = self._prompt(n_prompt), set()
        for mode in ("full", "exact"):
            runs = [self._run(mode, token_ids) for _ in range(self.n_runs)]
            texts |= {tuple(told.token_ids) for whole, shorts in runs for told in (whole, *shorts)}
            if len(texts) > 1:
                raise AssertionError(f"{mode} mode says something else behind {n_prompt} tokens.")
            yield _row(n_prompt, mode, runs)

    def _prompt(self, n_tokens: int) -> list[int]:
        """Stories of the model's own, one after another."""
        engine, found, seed = self.stories.engine, list[int](), 0
        while len(found) < n_tokens:
            opening = OPENINGS[seed % len(OPENINGS)]
            told = engine.generate(opening, max_new_tokens=STORY_TOKENS, temperature=0.9, seed=seed)
            found += [*engine.tokenizer.encode(opening), *told.token_ids[:-1]]
            seed += 1
        return found[:n_tokens]

    def _run(self, mode: str, token_ids: list[int]) -> tuple[Told, list[Told]]:
        """The text behind the prompt, and thrice behind the end of it."""
        opened = self._opened(mode, len(token_ids))
        drafting = open_drafting(KNOWLEDGE, opened, self.profile, _fail)
        executor, n_tokens = opened.executor, self.stories.n_tokens
        ending, learned = Ending(frozenset(), executor.cache.max_tokens), list[Any]()
        try:

            def told(known: Continuation) -> Told:
                found, counts = Told(), DraftCounts()
                executor.progress = lambda *_: found.chunks_s.append(CLOCK())
                common = executor, known, SamplingParams(n_tokens), ending, lambda _: "", CLOCK
                tokens = generate(*common) if drafting is None else generate_exact(*common, drafting, counts)
                for token in tokens:
                    if not found.token_ids and drafting is not None and len(known.token_ids) > SHORT_TOKENS:
                        _learned_alike(drafting, learned)
                    found.token_ids.append(token.token_id)
                    found.at_s.append(token.elapsed_s)
                found.head_s = counts.statistics(1, 0).prompt_s.get("draft head", 0.0)
                return found

            warm = executor.cache.open_new()
            told(Continuation(warm, token_ids[:SHORT_TOKENS]))  # kernels are there, the rule has learned
            executor.cache.close(warm)
            sequence, shorts = executor.cache.open_new(), list[Told]()
            whole = told(Continuation(sequence, token_ids))
            for _ in range(3):
                executor.cache.truncate(sequence, len(token_ids) - SHORT_TOKENS)
                shorts.append(told(Continuation(sequence, token_ids)))
            return whole, shorts
        finally:
            executor.close()

    def _opened(self, mode: str, n_prompt: int) -> Opened:
        engine = self.stories.engine
        known = KNOWLEDGE.statistics(engine.spec, self.profile, 1)
        n_context = n_prompt + self.stories.n_tokens + 1
        limits = Limits(mode=mode, context_tokens=n_context, threads=1, gpu_layers=0)
        placement = PlanRequest(self.profile, limits, statistics=known)
        opened = open_planned(engine.spec, engine.executor.weights, placement, 1, CLOCK, _fail)
        return replace(opened, request=placement)  # exact mode was asked for, so that every step drafts


def _learned_alike(drafting: Drafting, learned: list[Any]) -> None:
    """Rule and n-grams know what they knew at the first call, which keeps it in `learned`."""
    known = [drafting.rule, *(source._precision for source in drafting.sources if isinstance(source, NgramSource))]
    if not learned:
        learned += [deepcopy(vars(each)) for each in known]
    for each, then in zip(known, learned, strict=True):
        vars(each).update(deepcopy(then))


def _row(n_prompt: int, mode: str, runs: list[tuple[Told, list[Told]]]) -> Row:
    wholes = [whole for whole, _ in runs]
    prompt_s = statistics.median(whole.at_s[0] for whole in wholes)
    chunks = [whole.chunks_s for whole in wholes if len(whole.chunks_s) > 2] or [[0.0, 0.0, 0.0]]
    return Row(
        n_prompt,
        mode,
        n_prompt / prompt_s,
        statistics.median(whole.head_s for whole in wholes) / prompt_s,
        statistics.median(times[1] - times[0] for times in chunks),
        statistics.median(times[-2] - times[-3] for times in chunks),  # the last whole one
        statistics.median(whole.rate for whole in wholes),
        statistics.median(short.rate for _, shorts in runs for short in shorts),
        statistics.median(whole.first_step_s for whole in wholes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="2000,20000", help="numbers of tokens, separated by commas")
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="the rows as JSON instead of a table")
    arguments = parser.parse_args()
    stories = Stories.opened(1, arguments.tokens)
    bench = LongPrompts(stories, this_profile(demo_model_folder()), arguments.runs)
    rows = []
    if not arguments.json:
        print(HEADING)
    for n_prompt in map(int, arguments.prompts.split(",")):
        for row in bench.rows(n_prompt):
            rows.append(row)
            if not arguments.json:
                print(row, flush=True)
                if abs(row.ratio - 1) > CLOSE:
                    print(f"MISSED: the two rates are more than {CLOSE:.0%} apart")
    if arguments.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1))
    stories.engine.close()


def _fail(warn: str) -> None:
    raise AssertionError(warn)


if __name__ == "__main__":
    main()
