"""What goes wrong while drafting never makes a wrong token; what is interrupted leaves the KV cache usable."""

import itertools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.decoding.requests import Continuation
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.errors import DeviceLostError, DeviceMemoryError, HeteroError, UsageError
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.source import Choose
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.draft_sources import ScriptedSource
from tests.scripted_model import (
    COUNTING,
    EXIT_LAYER,
    HIDDEN,
    KINDS,
    N_LAYERS,
    PROMPT,
    VOCABULARY,
    Says,
    ScriptedModel,
    decoding,
    drafted,
    successor,
    wrong_at,
)

PROMPTS, N_TOKENS = [PROMPT, [20, 21]], 12
NAN, INFINITY = float("nan"), float("inf")
WAYS = [*KINDS, "asynchronous"]

both_kinds = pytest.mark.parametrize("kind", KINDS)
every_way = pytest.mark.parametrize("way", WAYS)


# Values that are not finite.


def spoiled_map(value: float, *calls: int) -> Callable[[Tensor], Tensor]:
    """Makes these calls' exit logits `value`: the scripted lm_head takes what no layer gives for it."""
    numbers = itertools.count()

    def spoil(normed: Tensor) -> Tensor:
        spoiled = normed.clone()
        if next(numbers) in calls:
            spoiled[:, 2] = value
        return spoiled

    return spoil


class SpoiltExits(ScriptedModel):
    """Logits of states whose number of layers is not finite are not finite either."""

    def lm_head(self, normed: Tensor) -> Tensor:
        is_sound = torch.isfinite(normed[:, 2])
        logits = super().lm_head(torch.where(is_sound[:, None], normed, torch.zeros_like(normed)))
        logits[~is_sound, 4] = normed[~is_sound, 2]
        return logits


def warned(model: ScriptedModel, how: Drafting) -> tuple[list[str], list[int]]:
    """Warnings, and how many tokens each verification had. The text must be right."""
    warnings: list[str] = []
    tokens = list(decoding(model, replace(how, warn=warnings.append), [PROMPT]))
    assert [token.token_id for token in tokens] == COUNTING[:N_TOKENS]
    return warnings, [len(one.batch) for one in model.verifications]


def warned_of_exits(exit_end: DraftEnd) -> tuple[list[str], list[int]]:
    return warned(SpoiltExits(successor, successor), Drafting(EXIT_LAYER, 4, FixedThreshold(0.0), exit_end))


def warned_of(*sources: ScriptedSource) -> tuple[list[str], list[int]]:
    return warned(ScriptedModel(successor, successor), Drafting(0, 4, FixedThreshold(0.0), None, sources))


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_exit_logits_that_are_not_finite_draft_nothing(value: float) -> None:
    warnings, sizes = warned_of_exits(DraftEnd(state_map=spoiled_map(value, *range(99))))
    assert sizes == [1] * 11
    assert warnings == ["exits' logits are not finite; these tokens pass every layer one by one, as in mode full."]
    _, sizes = warned_of_exits(DraftEnd(state_map=spoiled_map(value, 1)))
    assert sizes == [2, 4, 4, 1]  # drafting goes on where it can


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_confidences_that_are_not_finite_draft_nothing(value: float) -> None:
    warnings, sizes = warned_of_exits(DraftEnd(judge=Says(value)))
    assert sizes == [1] * 11
    assert len(warnings) == 1 and warnings[0].startswith("exits' confidences are not finite; ")


class Faulty(ScriptedSource):
    """Drafts a right token, then raises."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(lambda _: [], HIDDEN)
        self._fault = fault

    def _drafted(self, token_ids: Sequence[int], choose: Choose) -> Generator[int]:
        yield successor(token_ids[-1], 0)
        raise self._fault


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (DeviceMemoryError("the GPU is full."), "the GPU is full. No drafts follow in this step; these tokens"),
        (DeviceLostError("the GPU is gone."), "the GPU is gone. No drafts follow in this step; these tokens"),
    ],
)
def test_a_source_that_fails_drafts_no_further(fault: Exception, words: str) -> None:
    source = Faulty(fault)
    warnings, sizes = warned_of(source)
    assert sizes == [2] * 5 + [1] and source.closed == [0]
    assert len(warnings) == 1 and warnings[0].startswith(words)


@pytest.mark.parametrize("fault", [DeviceMemoryError("it is full."), UsageError("it is full.")], ids=str)
@pytest.mark.parametrize("call", ["truncate", "read_prompt", "observe"])
def test_a_source_that_cannot_be_told_ends_no_text(call: str, fault: Exception) -> None:
    def failing(*_: Any) -> None:
        raise fault

    source: Any = ScriptedSource(lambda _: [], HIDDEN)
    for each in ("truncate", "read_prompt", "observe"):
        setattr(source, each, failing if each == call else lambda *_: None)
    source.drafts = lambda *_: (draft for draft in ())
    warnings, _ = warned_of(source)
    assert len(warnings) == 1 and warnings[0].startswith("it is full. Source scripted could not ")


@pytest.mark.parametrize("foreign", [VOCABULARY, -1, 2**40])
@pytest.mark.parametrize("is_free", [False, True])
def test_a_source_of_another_vocabulary_drafts_what_this_model_has(foreign: int, is_free: bool) -> None:
    warnings, sizes = warned_of(ScriptedSource(lambda before: [before[-1] + 1, foreign, 7], HIDDEN, is_free=is_free))
    assert sizes == [2] * 5 + [1]
    assert len(warnings) == 1 and warnings[0].startswith(f"scripted drafts token {foreign}, which this model does not")


def test_without_anybody_to_tell_drafting_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    model, how = drafted("exits", exit_end=DraftEnd(judge=Says(NAN)))
    assert len(list(decoding(model, how, PROMPTS))) == 2 * N_TOKENS
    assert capsys.readouterr() == ("", "")


@both_kinds
@pytest.mark.parametrize("position", range(2, 14))
def test_full_logits_that_are_not_finite_fail_as_at_full_depth(kind: str, position: int) -> None:
    def until_failure(how: Drafting | None) -> tuple[list[GeneratedToken], str]:
        seen: list[GeneratedToken] = []
        model = ScriptedModel(successor, wrong_at(6), spoiled=frozenset({position}))
        with pytest.raises(HeteroError) as failed:
            for token in decoding(model, how, [PROMPT]):
                seen.append(token)
        assert model.cache.n_bytes == 0
        return seen, str(failed.value)

    expected = until_failure(None)
    assert until_failure(drafted(kind, wrong_at(6))[1]) == expected
    assert f"logits at position {position + 1} are not finite" in expected[1]


# Interruptions.


class Interrupter:
    """Raises KeyboardInterrupt at the n-th call of anything it wraps."""

    def __init__(self, at: int) -> None:
        self._calls_left = at

    def __call__(self, called: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._calls_left -= 1
            if self._calls_left == 0 and not after:
                raise KeyboardInterrupt
            result = called(*arguments, **named)
            if self._calls_left == 0:
                raise KeyboardInterrupt
            return result

        return call

    def wrap(self, thing: Any, names: Sequence[str], after: bool) -> None:
        for name in names:
            setattr(thing, name, self(getattr(thing, name), after))


SEAMS = {
    "model": ("run", "on_cpu", "final_norm", "lm_head"),
    "source": ("drafts", "observe", "read_prompt", "truncate"),
    "rule": ("is_worth", "audit", "settle"),
}


def often_right(way: str) -> tuple[ScriptedModel, Drafting]:
    """A model that counts, whose drafts are right but for every fifth."""

    def drafts(token_id: int, position: int) -> int:
        return (token_id + (7 if position % 5 == 4 else 1)) % VOCABULARY

    is_async = way == "asynchronous"
    model, how = drafted("exits" if is_async else way, drafts, async_layers=EXIT_LAYER if is_async else 0)
    model.overlap = Overlap(2, 3) if is_async else None
    return model, how


def interrupted(at: int, after: bool, way: str) -> tuple[ScriptedModel, Drafting]:
    """The same, interrupted once."""
    model, how = often_right(way)
    interrupter = Interrupter(at)
    things = {"model": [model], "source": how.sources, "rule": [how.rule]}
    for seam, names in SEAMS.items():
        for thing in things[seam]:
            interrupter.wrap(thing, names, after)
    return model, how


def is_forgotten(how: Drafting) -> bool:
    """By the sources."""
    return all(isinstance(source, ScriptedSource) and source.observed == {} for source in how.sources)


@every_way
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.sample(1)
def test_an_interruption_anywhere_frees_everything(after: bool, way: str) -> None:
    expected = sorted(map(str, decoding(ScriptedModel(successor, successor), None, PROMPTS)))
    for at in itertools.count(1):
        model, how = interrupted(at, after, way)
        try:
            tokens = list(decoding(model, how, PROMPTS))
        except KeyboardInterrupt:
            assert model.cache.n_bytes == 0 and is_forgotten(how)
            assert sorted(map(str, decoding(model, how, PROMPTS))) == expected
        else:
            assert at > 60 and sorted(map(str, tokens)) == expected
            return


def talked(model: ScriptedModel, how: Drafting) -> Iterator[bool]:
    """Generates as a conversation does, again after each interruption: what is known for certain then is the prompt and
    the tokens before the last one that was seen. Yields whether it was interrupted."""
    said = list(PROMPT)
    sequence = model.cache.open_new()
    while len(said) < len(PROMPT) + N_TOKENS:
        certain = model.cache.length(sequence)
        try:
            for token in decoding(model, how, Continuation(sequence, said[:])):
                certain = len(said)
                said.append(token.token_id)
        except KeyboardInterrupt:
            model.cache.truncate(sequence, certain)
            assert model.cache.length(sequence) == certain
            yield True
        else:
            yield False
        assert said == (PROMPT + COUNTING)[: len(said)]


@every_way
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.sample(1)
def test_an_interruption_of_any_call_leaves_what_was_said_to_be_resumed(after: bool, way: str) -> None:
    for at in itertools.count(1):
        model, how = interrupted(at, after, way)
        if True not in list(talked(model, how)):
            break
    assert at > 30


@every_way
@pytest.mark.sample(0)
def test_an_interruption_of_any_line_leaves_what_was_said_to_be_resumed(way: str) -> None:
    for at in itertools.count(1, 5):
        lines = itertools.count(1)

        def trace(frame: Any, event: str, _: Any, at: int = at, lines: Iterator[int] = lines) -> Any:
            if "/speculation/" not in frame.f_code.co_filename and "/decoding/" not in frame.f_code.co_filename:
                return None
            if event == "line" and next(lines) == at:
                raise KeyboardInterrupt
            return trace

        talk = talked(*often_right(way))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            was_interrupted = next(talk)
        finally:
            sys.settrace(before)
        if not was_interrupted:
            break
        list(talk)
    assert at > 500


@both_kinds
@pytest.mark.parametrize("n_tokens", range(2 * N_TOKENS))
def test_closing_early_frees_everything(kind: str, n_tokens: int) -> None:
    model, how = often_right(kind)
    tokens: Any = decoding(model, how, PROMPTS)
    for _ in range(n_tokens):
        next(tokens)
    tokens.close()
    assert model.cache.n_bytes == 0 and is_forgotten(how)
    assert list(tokens) == [] and len(model.passes) <= 12 * N_TOKENS


@every_way
@pytest.mark.parametrize("n_tokens", range(1, N_TOKENS))
def test_closing_early_leaves_a_sequence_that_is_true(n_tokens: int, way: str) -> None:
    model, how = often_right(way)
    sequence = model.cache.open_new()
    tokens: Any = decoding(model, replace(how, draft_length=2), Continuation(sequence, PROMPT))
    said = PROMPT + [next(tokens).token_id for _ in range(n_tokens)]
    tokens.close()
    lengths = {model.cache.length_at(sequence, layer) for layer in range(N_LAYERS)}
    assert len(lengths) == 1 and lengths.pop() >= len(said) - 1
    for source in how.sources:
        assert isinstance(source, ScriptedSource)
        assert source.observed[sequence][: len(said) - 1] == said[:-1]
