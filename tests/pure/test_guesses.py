"""The guess of a round: what its last row would draft, for who begins it before the round is verified."""

from typing import Any

import pytest
from hetero_ee.speculation.draft_gate import FixedGate
from hetero_ee.speculation.draft_round import DraftRound
from hetero_ee.speculation.drafter import Drafter

from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending, Text, prefill
from hetero_ee.runtime.batch import Batch
from hetero_ee.speculation.drafting import Drafting, ExitHead, ExitLevel, ExitLevels
from hetero_ee.text.text_stream import Decode
from tests.scripted_model import ScriptedModel, successor

BOUNDARY, PROMPT = 4, [3, 4, 5]
DECODE: Decode = str
NAN = float("nan")


def round_of(confidence: float = 1.0, end: int | None = None, n_tokens: int = 17, **changes: Any) -> DraftRound:
    """The first round behind PROMPT, whose next token is 6. end: a token that ends texts."""
    model: Any = ScriptedModel(successor, successor)
    params, ending = SamplingParams(n_tokens), Ending(frozenset() if end is None else frozenset({end}), 200)
    text = Text.of_prompt(0, PROMPT, params, DECODE, cached_as=model.cache.open_new())
    prefill(model, text)
    text.token_ids.append(6)
    exit_head = ExitHead(None, lambda *_: confidence)
    how = Drafting(BOUNDARY, **{"draft_length": 3, "gate": FixedGate(0.5), "exit_head": exit_head} | changes)
    (found,) = Drafter(model, how, params, ending).draft([text], {})
    assert found.passed == [BOUNDARY] * len(found.token_ids)
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_does_not_exit_has_one(ahead: bool) -> None:
    found = round_of(confidence=0.0, drafts_ahead=ahead)
    assert (found.token_ids, found.guess) == ([6], 7)


def test_the_last_row_of_a_full_queue_is_judged_for_its_guess_alone() -> None:
    full = round_of()
    assert (full.token_ids, full.guess, len(full.asked)) == ([6, 7, 8], None, 2)
    ahead = round_of(drafts_ahead=True)
    assert (ahead.token_ids, ahead.guess, len(ahead.asked)) == ([6, 7, 8], 9, 2)


def test_on_the_way_there_it_is_judged_nowhere() -> None:
    seen: list[float] = []
    level = ExitLevel(ExitHead(None, lambda normed, *_: seen.append(float(normed[1])) or 0.0), 0.5)
    levels = ExitLevels({2: level}, (2,))
    found = round_of(drafts_ahead=True, levels=levels)
    assert (found.token_ids, found.guess, seen) == ([6, 7, 8], 9, [3, 4])


@pytest.mark.parametrize("n_tokens", [2, 3, 4])
def test_there_is_none_where_the_text_ends_first(n_tokens: int) -> None:
    """Of n_tokens one is there already."""
    found = round_of(drafts_ahead=True, n_tokens=n_tokens)
    assert len(found.token_ids) == min(3, n_tokens - 1)
    assert found.guess is None


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_an_end_token_is_none(confidence: float) -> None:
    assert round_of(confidence, end=7, drafts_ahead=True).guess is None


@pytest.mark.parametrize("draft_length", [1, 3])
def test_logits_that_are_no_numbers_make_none(draft_length: int) -> None:
    exit_head = ExitHead(lambda normed: normed, lambda *_: NAN)
    found = round_of(exit_head=exit_head, drafts_ahead=True, draft_length=draft_length)
    assert found.token_ids == [6]


@pytest.mark.parametrize(
    ("n_passed", "layers"),
    [
        (1, [range(1, 2), range(2, 4), range(4)]),
        (2, [range(2, 4), range(4)]),
        (3, [range(3, 4), range(4)]),
        (4, [range(4)]),
    ],
)
def test_a_row_that_has_begun_is_judged_where_it_has_not_been(n_passed: int, layers: list[range]) -> None:
    model: Any = ScriptedModel(successor, successor)
    params, ending = SamplingParams(17), Ending(frozenset(), 200)
    text = Text.of_prompt(0, PROMPT, params, DECODE, cached_as=model.cache.open_new())
    prefill(model, text)
    text.token_ids.append(6)
    (state,) = model.run(Batch.of_sequence(text.cached_as, 3, [6]), None, range(n_passed))
    model.passes.clear()
    levels = ExitLevels({2: ExitLevel(ExitHead(None, lambda *_: 0.0), 0.9)}, (2,))
    how = Drafting(BOUNDARY, 2, FixedGate(0.0), ExitHead(), levels=levels)
    (found,) = Drafter(model, how, params, ending).draft([text], {0: (state, n_passed)})
    assert found.token_ids == [6, 7] and found.passed == [BOUNDARY] * 2
    assert [one.layers for one in model.passes] == layers
    assert model.n_projected == 1 + 1 + (n_passed <= 2)  # the prompt's, at the exit layer, at level 2


def test_a_row_that_begins_anew_joins_one_that_has_begun() -> None:
    model: Any = ScriptedModel(successor, successor)
    params, ending = SamplingParams(17), Ending(frozenset(), 200)
    texts = [Text.of_prompt(i, PROMPT, params, DECODE, cached_as=model.cache.open_new()) for i in range(2)]
    for text in texts:
        prefill(model, text)
        text.token_ids.append(6)
    (state,) = model.run(Batch.of_sequence(texts[0].cached_as, 3, [6]), None, range(2))
    model.passes.clear()
    Drafter(model, Drafting(BOUNDARY, 1, FixedGate(0.0), ExitHead()), params, ending).draft(texts, {0: (state, 2)})
    passes = [(one.layers, list(one.rows.sequences)) for one in model.passes]
    assert passes == [(range(2), [texts[1].cached_as]), (range(2, 4), [text.cached_as for text in texts])]
