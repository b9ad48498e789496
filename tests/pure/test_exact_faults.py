"""What goes wrong while drafting never makes a wrong token; what is interrupted leaves the KV cache usable."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hetero_ee.speculation.draft_gate import FixedGate
from torch import Tensor

from hetero_ee.decoding.full import generate
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending
from hetero_ee.errors import HeteroError
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.speculation.drafting import Drafting, ExitHead
from hetero_ee.speculation.exact import generate_exact, generate_exact_from
from tests.draft_sources import ScriptedSource
from tests.scripted_model import N_LAYERS, VOCABULARY, ScriptedModel, successor, wrong_at

PROMPTS = [[3, 4, 5], [20, 21]]
N_TOKENS = 12
COUNTING = [(6 + i) % VOCABULARY for i in range(40)]
NAN, INFINITY = float("nan"), float("inf")


def arguments(n_tokens: int = N_TOKENS) -> Any:
    decode = lambda token_ids: "".join(f"{token_id}," for token_id in token_ids)  # noqa: E731
    return SamplingParams(max_new_tokens=n_tokens), Ending(frozenset(), 200), decode, lambda: 0.0


def drafting(draft_length: int = 4, **changes: Any) -> Drafting:
    return Drafting(2, draft_length, **{"gate": FixedGate(0.0), "exit_head": ExitHead()} | changes)


def half_known(hidden_size: int = 3) -> ScriptedSource:
    """Chains of right tokens of which every fifth is wrong."""
    return ScriptedSource(
        lambda before, n: [(before[-1] + 1 + i + (len(before) + i) % 5 // 4) % VOCABULARY for i in range(n)],
        hidden_size,
    )


# Values that are no numbers.


def spoiled_map(value: float, *rows: int) -> Callable[[Tensor], Tensor]:
    """Makes the exit logits of these calls' rows `value`: the scripted head takes what no layer gives for it."""
    calls = itertools.count()

    def spoil(normed: Tensor) -> Tensor:
        spoiled = normed.clone()
        if next(calls) in rows:
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


def noticed(model: ScriptedModel, **changes: Any) -> tuple[list[str], list[int]]:
    """What is told, and how many rows each verification had. The tokens must be right."""
    notices: list[str] = []
    how = drafting(warn=notices.append, **changes)
    tokens = list(generate_exact(model, PROMPTS[:1], *arguments(), how))  # type: ignore[arg-type]
    assert [token.token_id for token in tokens] == COUNTING[:N_TOKENS]
    return notices, [len(one.rows) for one in model.later]


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_exit_logits_that_are_no_numbers_draft_nothing(value: float) -> None:
    exit_head = ExitHead(map=spoiled_map(value, *range(99)))
    notices, sizes = noticed(SpoiltExits(successor, successor), exit_head=exit_head)
    assert sizes == [1] * 11
    assert notices == ["exits' logits are not finite; these tokens pass every layer one by one, as in mode full."]
    _, sizes = noticed(SpoiltExits(successor, successor), exit_head=ExitHead(map=spoiled_map(value, 1)))
    assert sizes == [2, 4, 4, 1]  # drafting goes on where it can
    notices, sizes = noticed(SpoiltExits(successor, successor), exit_head=exit_head, source=half_known())
    assert sizes == [1] * 11 and len(notices) == 1  # a chain that can't be judged is not verified


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_confidences_that_are_no_numbers_draft_nothing(value: float) -> None:
    for source in (None, half_known()):
        exit_head = ExitHead(confidence=lambda *_: value)
        notices, sizes = noticed(ScriptedModel(successor, successor), exit_head=exit_head, source=source)
        assert sizes == [1] * 11
        assert len(notices) == 1 and notices[0].startswith("exits' confidences are not finite; ")


def test_source_logits_that_are_no_numbers_draft_nothing() -> None:
    class Spoilt(ScriptedSource):
        def propose(self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Any, *_: Any) -> list[int]:
            return [choose(torch.full((VOCABULARY,), NAN), token_ids)]

    source = Spoilt(lambda *_: [], 3)
    notices, sizes = noticed(ScriptedModel(successor, successor), exit_head=None, source=source)
    assert sizes == [1] * 11 and source.closed == [0]
    assert len(notices) == 1 and notices[0].startswith("the draft source's logits are not finite; ")


@pytest.mark.parametrize("foreign", [VOCABULARY, -1, 2**40])
def test_a_source_of_another_vocabulary_drafts_what_this_model_has(foreign: int) -> None:
    source = ScriptedSource(lambda before, n: [before[-1] + 1, foreign, 7][:n], 3)
    notices, sizes = noticed(ScriptedModel(successor, successor), exit_head=None, source=source)
    assert sizes == [2] * 5 + [1]
    assert len(notices) == 1 and notices[0].startswith(f"the draft source proposes token {foreign}, which this model")


def test_a_source_that_proposes_more_than_was_asked_for_is_cut_short() -> None:
    source = ScriptedSource(lambda before, n: [before[-1] + 1 + i for i in range(n + 5)], 3)
    notices, sizes = noticed(ScriptedModel(successor, successor), exit_head=None, source=source)
    assert (notices, sizes) == ([], [4, 4, 3])


def test_without_anybody_to_tell_drafting_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    how = drafting(exit_head=ExitHead(confidence=lambda *_: NAN))
    assert len(list(generate_exact(ScriptedModel(successor, successor), PROMPTS, *arguments(), how))) == 2 * N_TOKENS  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("position", range(2, 14))
def test_full_logits_that_are_no_numbers_fail_as_at_full_depth(position: int) -> None:
    def until_failure(tokens: Iterator[GeneratedToken]) -> tuple[list[GeneratedToken], str]:
        seen: list[GeneratedToken] = []
        with pytest.raises(HeteroError) as failed:
            for token in tokens:
                seen.append(token)
        return seen, str(failed.value)

    def spoiled() -> ScriptedModel:
        return ScriptedModel(successor, wrong_at(6), spoiled=frozenset({position}))

    expected = until_failure(generate(spoiled(), PROMPTS[:1], *arguments()))  # type: ignore[arg-type]
    model = spoiled()
    assert until_failure(generate_exact(model, PROMPTS[:1], *arguments(), drafting())) == expected  # type: ignore[arg-type]
    assert f"logits at position {position + 1} are not finite" in expected[1] and model.cache.n_bytes == 0


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
    "source": ("propose", "observe", "truncate"),
    "gate": ("goes_on", "audit", "settle"),
}


def interrupted_model(at: int, after: bool, ahead: bool) -> tuple[ScriptedModel, Drafting, ScriptedSource]:
    model = ScriptedModel(successor, wrong_at(8, 9), overlap=Overlap(2, 3) if ahead else None)
    source, gate = half_known(), FixedGate(0.0)
    interrupter = Interrupter(at)
    for thing, names in zip((model, source, gate), SEAMS.values(), strict=True):
        interrupter.wrap(thing, names, after)
    return model, drafting(source=source, gate=gate, drafts_ahead=ahead), source


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_an_interruption_anywhere_frees_everything(after: bool, ahead: bool) -> None:
    expected = list(generate_exact(ScriptedModel(successor, successor), PROMPTS, *arguments(), drafting()))  # type: ignore[arg-type]
    for at in itertools.count(1):
        model, how, source = interrupted_model(at, after, ahead)
        try:
            tokens = list(generate_exact(model, PROMPTS, *arguments(), how))  # type: ignore[arg-type]
        except KeyboardInterrupt:
            assert model.cache.n_bytes == 0 and source.observed == {}
            again = list(generate_exact(model, PROMPTS, *arguments(), how))  # type: ignore[arg-type]
            assert sorted(map(str, again)) == sorted(map(str, expected))
        else:
            assert at > 100 and sorted(map(str, tokens)) == sorted(map(str, expected))
            return


def talked(model: ScriptedModel, how: Drafting) -> Iterator[bool]:
    """Generates as a conversation does, again after each interruption: what is known for certain then is the prompt and
    the tokens before the last one that was seen. Yields whether it was interrupted."""
    said = list(PROMPTS[0])
    sequence = model.cache.open_new()
    while len(said) < len(PROMPTS[0]) + N_TOKENS:
        certain = model.cache.length(sequence)
        try:
            for token in generate_exact_from(model, sequence, said[:], *arguments(), how):  # type: ignore[arg-type]
                certain = len(said)
                said.append(token.token_id)
        except KeyboardInterrupt:
            model.cache.truncate(sequence, certain)
            assert model.cache.length(sequence) == certain
            yield True
        else:
            yield False
        assert said == (PROMPTS[0] + COUNTING)[: len(said)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_an_interruption_of_any_call_leaves_what_was_said_to_go_on_from(after: bool, ahead: bool) -> None:
    for at in itertools.count(1):
        model, how, _ = interrupted_model(at, after, ahead)
        if True not in list(talked(model, how)):
            break
    assert at > 60


def test_an_interruption_of_any_line_leaves_what_was_said_to_go_on_from() -> None:
    for at in itertools.count(1, 5):
        lines = itertools.count(1)

        def trace(frame: Any, event: str, _: Any, at: int = at, lines: Iterator[int] = lines) -> Any:
            if "/decoding/" not in frame.f_code.co_filename:
                return None
            if event == "line" and next(lines) == at:
                raise KeyboardInterrupt
            return trace

        model = ScriptedModel(successor, wrong_at(8, 9), overlap=Overlap(2, 3))
        talk = talked(model, drafting(source=half_known(), drafts_ahead=True))
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


@pytest.mark.parametrize("n_tokens", range(2 * N_TOKENS))
def test_closing_early_frees_everything(n_tokens: int) -> None:
    model, source = ScriptedModel(successor, wrong_at(8, 9)), half_known()
    tokens: Any = generate_exact(model, PROMPTS, *arguments(), drafting(source=source))  # type: ignore[arg-type]
    for _ in range(n_tokens):
        next(tokens)
    tokens.close()
    assert model.cache.n_bytes == 0 and source.observed == {}
    assert list(tokens) == [] and len(model.passes) <= 12 * N_TOKENS


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("n_tokens", range(1, N_TOKENS))
def test_closing_early_leaves_a_sequence_that_is_true(n_tokens: int, ahead: bool) -> None:
    model, source = ScriptedModel(successor, wrong_at(8, 9), overlap=Overlap(2, 3)), half_known()
    sequence = model.cache.open_new()
    how = drafting(2, source=source, drafts_ahead=ahead)
    tokens: Any = generate_exact_from(model, sequence, PROMPTS[0], *arguments(), how)  # type: ignore[arg-type]
    said = PROMPTS[0] + [next(tokens).token_id for _ in range(n_tokens)]
    tokens.close()
    lengths = {model.cache.length_at(sequence, layer) for layer in range(N_LAYERS)}
    assert len(lengths) == 1 and lengths.pop() >= len(said) - 1
    assert source.observed[sequence][: len(said) - 1] == said[:-1]
