"""ExitDrafter: a step's drafts, and the next-token guess that is made of its last token, for asynchronous drafting."""

from typing import Any

import pytest

from hetero_ee.decoding.requests import Ending, Request, prefill
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.exit_drafter import ExitDrafter
from hetero_ee.speculation.pending import PendingToken, advance
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.scripted_model import PROMPT, Says, ScriptedModel, numbers, successor

EXIT_LAYER, NAN = 4, float("nan")


def drafted(
    confidence: float = 1.0,
    end: int | None = None,
    n_tokens: int = 17,
    draft_length: int = 3,
    guesses_next: bool = False,
    depths: tuple[int, ...] = (0,),
) -> tuple[list[DraftStep], ScriptedModel]:
    """The first step of as many texts as there are depths, after PROMPT, whose next token is 6.

    end: a token that ends texts. depths: layers that each last token has passed before.
    """
    scripted = ScriptedModel(successor, successor)
    model: Any = scripted
    sampler, params = DraftSampler(), SamplingParams(n_tokens)
    ending = Ending(frozenset() if end is None else frozenset({end}), context_tokens=200)
    steps = []
    for sequence, depth in enumerate(depths):
        text = Request.of_prompt(sequence, PROMPT, params, ending, numbers, model.cache.open_new())
        prefill(model, text)
        text.token_ids.append(6)
        last = PendingToken(6, text.kv_sequence, len(PROMPT))
        advance(model, [last], depth)
        steps.append(DraftStep(text, min(draft_length, text.tokens_left) - 1, [last]))
    scripted.passes.clear()
    scripted.n_logits = 0
    end_, warnings = DraftEnd(judge=Says(confidence)), list[str]()
    rule = FixedThreshold(0.5)
    drafter = ExitDrafter(model, EXIT_LAYER, end_, rule, sampler, warnings.append, guesses_next=guesses_next)
    drafter.draft(steps)
    assert all(token.depth == EXIT_LAYER for step in steps for token in step.tokens)
    return steps, scripted


def ids(step: DraftStep) -> list[int]:
    return [token.token_id for token in step.tokens]


@pytest.mark.parametrize("guesses_next", [False, True])
def test_a_token_that_does_not_exit_has_a_guess(guesses_next: bool) -> None:
    ((step,), _) = drafted(confidence=0.0, guesses_next=guesses_next)
    assert (ids(step), step.next_guess, step.judged) == ([6], 7, {0: [(7, 0.0)]})


def test_the_last_token_of_a_full_step_is_judged_for_its_guess_alone() -> None:
    ((full,), model) = drafted()
    assert (ids(full), full.next_guess, len(full.judged), model.n_logits) == ([6, 7, 8], None, 2, 2)
    ((guessing,), model) = drafted(guesses_next=True)
    assert (ids(guessing), guessing.next_guess, len(guessing.judged), model.n_logits) == ([6, 7, 8], 9, 2, 3)


@pytest.mark.parametrize("n_tokens", [2, 3, 4])
def test_there_is_no_guess_where_the_text_ends_first(n_tokens: int) -> None:
    """Of n_tokens one is there already."""
    ((step,), _) = drafted(guesses_next=True, n_tokens=n_tokens)
    assert len(step.tokens) == min(3, n_tokens - 1) and step.next_guess is None


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_an_end_token_is_neither_drafted_nor_guessed(confidence: float) -> None:
    ((step,), _) = drafted(confidence, end=7, guesses_next=True)
    assert (ids(step), step.next_guess) == ([6], None)


@pytest.mark.parametrize("draft_length", [1, 3])
def test_a_confidence_that_is_not_finite_drafts_nothing(draft_length: int) -> None:
    ((step,), _) = drafted(NAN, guesses_next=True, draft_length=draft_length)
    assert ids(step) == [6] and step.judged == {}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_token_that_has_begun_passes_what_is_left(depth: int) -> None:
    ((step,), model) = drafted(draft_length=2, depths=(depth,))
    assert ids(step) == [6, 7]
    assert [one.layers for one in model.passes] == [range(depth, EXIT_LAYER)] * (depth < EXIT_LAYER) + [range(4)]


def test_a_token_that_begins_joins_one_that_has_begun() -> None:
    steps, model = drafted(depths=(2, 0), draft_length=1)
    assert [(one.layers, one.batch.sequences) for one in model.passes] == [(range(2), (1,)), (range(2, 4), (0, 1))]
    assert [ids(step) for step in steps] == [[6], [6]]
