"""Draft sources read a prompt with the model: in the prompt's time, counted apart, each token once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from hetero_ee.config import READING
from hetero_ee.decoding.benchmark import Bench
from hetero_ee.decoding.requests import Continuation, Ending
from hetero_ee.decoding.result import collect
from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import DraftRates, PromptReading, Statistics
from hetero_ee.planning.times.prediction import predicted_run_s
from hetero_ee.speculation.exact import ExactMode
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee_cli.reports.run_report import reading_words
from hetero_ee_profiles.reference import reference_profile
from tests.draft_sources import ScriptedSource, following
from tests.drafted_generation import generate_exact
from tests.scripted_model import (
    COUNTING,
    HIDDEN,
    N_LAYERS,
    PROMPT,
    ScriptedModel,
    decoding,
    drafted,
    numbers,
    successor,
)

CHUNK, TOKEN_S = 2, 0.5  # seconds that a source takes to read a token


class SlowReader(ScriptedSource):
    """Reading takes its time, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(following(successor), HIDDEN)
        self.now_s, self._error = 0.0, error

    def read_prompt(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        super().read_prompt(sequence, first_position, token_ids, normed, *captured)
        self.now_s += TOKEN_S * len(token_ids)
        if self._error is not None:
            raise self._error


def reading(source: SlowReader, prompts: Any, **changes: Any) -> tuple[ScriptedModel, Iterator[Any], DraftCounts]:
    """A model with small chunks, and what it generates by the source's clock."""
    model, how = drafted("sequences", sources=(NgramSource(), source), **changes)
    model.prompt_chunk_tokens = CHUNK
    counts, params, ending = DraftCounts(), SamplingParams(max_new_tokens=8), Ending(frozenset(), 200)
    tokens = generate_exact(model, prompts, params, ending, numbers, lambda: source.now_s, how, counts)  # type: ignore[arg-type]
    return model, tokens, counts


def test_sources_read_with_each_chunk_and_it_is_the_prompts_time() -> None:
    source, told = SlowReader(), list[tuple[Any, ...]]()
    model, tokens, counts = reading(source, [PROMPT])
    model.progress = lambda *what: told.append((*what, source.now_s))  # type: ignore[assignment]
    found = collect(list(tokens))
    assert source.read == [PROMPT[:2], PROMPT[2:]] and list(found.token_ids) == COUNTING[:8]
    assert (found.prompt_s, found.generation_s) == (3 * TOKEN_S, 0.0)
    assert counts.statistics(N_LAYERS, 0).prompt_s == {"n-grams": 0.0, "scripted": 3 * TOKEN_S}
    assert told == [(READING, 0, 3, 0.0), (READING, 2, 3, 2 * TOKEN_S), (READING, 3, 3, 3 * TOKEN_S)]


def test_a_prompt_of_one_chunk_is_told_too() -> None:
    model, tokens, _ = reading(SlowReader(), [PROMPT])
    model.prompt_chunk_tokens, told = len(PROMPT), list[tuple[Any, ...]]()
    model.progress = lambda *what: told.append(what)  # type: ignore[assignment]
    collect(list(tokens))
    assert told == [(READING, 0, 3), (READING, 3, 3)]


def test_a_prompt_that_ends_early_is_told_as_over() -> None:
    model, tokens, _ = reading(SlowReader(), [PROMPT])
    told = list[tuple[int, int]]()

    def interrupted(_stage: str, n_done: int, n_all: int) -> None:
        told.append((n_done, n_all))
        if n_done == 2:
            raise KeyboardInterrupt

    model.progress = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(tokens)
    assert told == [(0, 3), (2, 3), (3, 3)] and not model.cache.sequences


def test_what_a_conversation_holds_already_is_not_read_again() -> None:
    source = SlowReader()
    model = ScriptedModel(successor, successor)
    sequence, said = model.cache.open_new(), list(PROMPT)
    for n_read in (len(PROMPT), 1 + 2):  # the reply's last token, and what is said next
        source.read.clear()
        _, how = drafted("sequences", sources=(source,))
        for token in decoding(model, how, Continuation(sequence, said[:]), 8):
            said.append(token.token_id)
        assert sum(map(len, source.read)) == n_read and source.observed[sequence] == said[:-1]
        said += [7, 8]


@pytest.mark.parametrize("error", [DeviceMemoryError("gpu", "The GPU is full."), DeviceLostError("The GPU is lost.")])
def test_a_source_that_cannot_read_costs_no_token(error: Exception) -> None:
    warned: list[str] = []
    _, tokens, _ = reading(SlowReader(error), [PROMPT], warn=warned.append)
    assert [token.token_id for token in tokens] == COUNTING[:8]
    assert len(warned) == 1 and warned[0].startswith(f"{error} Source scripted could not read the prompt; ")


# What is measured and said of it.


def test_a_warm_up_is_not_counted() -> None:
    model, how = drafted("sequences", sources=(NgramSource(), source := SlowReader()))
    counts, clock = DraftCounts(), lambda: source.now_s

    def exact(counts: DraftCounts) -> ExactMode:
        return ExactMode(model, how, counts, clock)  # type: ignore[arg-type]

    def warm_up() -> ExactMode:
        return exact(DraftCounts())

    bench = Bench(model, 2, clock)  # type: ignore[arg-type]
    bench.text_run(warm_up, lambda: exact(counts), 5, 0)
    assert counts.n_tokens == 2 * 5
    counts = DraftCounts()
    found = bench.reading_run(warm_up, partial(exact, counts), 6, 4)
    assert found.name == "pp6 @ d4" and found.samples_s == (6 * TOKEN_S, 6 * TOKEN_S)
    statistics = counts.statistics(N_LAYERS, 0)
    assert statistics.reading_shares(sum(found.samples_s)) == {"n-grams": 0.0, "scripted": 1.0}
    assert source.observed == {} and model.cache.n_bytes == 0


@pytest.mark.parametrize(
    ("shares", "words"),
    [({}, ""), ({"draft head": 0.004}, ""), ({"n-grams": 0.006, "draft head": 0.031}, " (n-grams 1%, draft head 3%)")],
)
def test_parts_of_a_prompt_worth_a_word(shares: dict[str, float], words: str) -> None:
    assert reading_words(shares) == words


# What the planner makes of it.

SPEC, PROFILE = known_spec("llama-2-7b"), replace(reference_profile("rtx-4060-laptop-8gb"), gpu=None, link=None)
DRAFTS = DraftRates("a draft head", (0.8,) * 8, 1e-3)
N_PROMPT, READ_S = 1024, 0.1  # of so many tokens


def planned(read_s: float | None, mode: str | None = None) -> Plan:
    reads = None if read_s is None else PromptReading(lambda m, context_tokens: m / N_PROMPT * read_s)
    known = Statistics(drafts=replace(DRAFTS, reading=reads))
    return plan(SPEC, PROFILE, Limits(context_tokens=2048, mode=mode), known, predict_at_tokens=N_PROMPT)


def test_it_is_priced_as_prompt_and_nothing_else() -> None:
    without, found = (planned(read_s).prediction for read_s in (None, READ_S))
    assert N_PROMPT / found.prompt_tokens_per_s - N_PROMPT / without.prompt_tokens_per_s == pytest.approx(READ_S)
    assert found.request_s - without.request_s == pytest.approx(READ_S / 2)
    assert found.generated_tokens_per_s == without.generated_tokens_per_s
    made = planned(READ_S)
    assert made.mode == "exact" and made.prediction.prefill_terms[-1].name == "reading for drafts"
    assert made.prediction.prefill_terms[-1].seconds == made.prefill_chunk_tokens / N_PROMPT * READ_S
    known = Statistics(drafts=replace(DRAFTS, reading=PromptReading(lambda m, context_tokens: m * 1e-3)))
    runs = [predicted_run_s(SPEC, PROFILE, made, 700, 0, 0, known.reading(kind)) for kind in (None, made.drafts)]
    assert runs[1] - runs[0] == pytest.approx(0.7)


def test_drafts_that_take_more_of_the_prompt_than_they_save_of_the_text_are_declined() -> None:
    assert [planned(read_s).mode for read_s in (READ_S, 100.0)] == ["exact", "full"]
    assert planned(100.0, "exact").mode == "exact"
