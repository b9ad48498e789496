"""Steps of exact mode, on a model whose answers are scripted: what is computed, kept and rolled back."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_ee.decoding.requests import Continuation
from hetero_ee.decoding.result import FinishReason, GeneratedToken
from hetero_ee.errors import UsageError
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exit_drafter import EXIT
from hetero_ee.speculation.sources.source import Choose
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.draft_sources import MAX_DRAFTS, ScriptedSource
from tests.scripted_model import (
    COUNTING,
    EXIT_LAYER,
    HIDDEN,
    KINDS,
    N_LAYERS,
    PROMPT,
    ScriptedModel,
    decoding,
    drafted,
    successor,
    wrong_at,
)

both_kinds = pytest.mark.parametrize("kind", KINDS)


def ids(model: ScriptedModel, how: Drafting | None, n_tokens: int = 17, **options: Any) -> list[int]:
    return [token.token_id for token in decoding(model, how, [PROMPT], n_tokens, **options)]


class RecordingRule(FixedThreshold):
    """Says what `answers` says, alternately, then that every draft is worth it; keeps what it is told."""

    def __init__(self, *answers: bool) -> None:
        super().__init__(0.0)
        self._answers = list(answers)
        self.asked: list[int] = []
        self.audits: list[bool] = []
        self.settled: list[tuple[int, int]] = []

    def is_worth(self, chances: Sequence[float], draft_s: float) -> bool:
        self.asked.append(len(chances))
        return self._answers.pop(0) if self._answers else True

    def audit(self, confidence: float, was_right: bool) -> None:
        self.audits.append(was_right)

    def settle(self, n_verified: int, n_tokens: int, n_in_pass: int) -> None:
        self.settled.append((n_verified, n_tokens))


# What is computed.


@both_kinds
@pytest.mark.parametrize("draft_length", [1, 2, 4, 16])
def test_right_drafts_read_the_later_layers_once_a_step(kind: str, draft_length: int) -> None:
    (model, how), counts = drafted(kind, draft_length=draft_length), DraftCounts()
    assert ids(model, how, counts=counts) == COUNTING[:17]
    assert [one.layers for one in model.verifications] == [range(how.exit_layer, N_LAYERS)] * (16 // draft_length)
    assert all(len(one.batch) == draft_length for one in model.verifications)
    found = counts.statistics(N_LAYERS, how.exit_layer)
    assert (found.n_passes, found.n_tokens) == (16 // draft_length, 16)
    assert found.tokens_per_pass == draft_length and found.acceptance == (1.0 if draft_length > 1 else 0.0)
    n_passed = EXIT_LAYER if kind == "exits" else N_LAYERS  # by accepted drafts, when they were known
    assert found.mean_exit_depth == (n_passed * (draft_length - 1) + N_LAYERS) / draft_length
    assert [each.origin for each in found.origins] == [EXIT if kind == "exits" else "scripted"] * (draft_length > 1)


def test_drafts_by_exit_pass_the_earlier_layers_one_by_one_and_sequences_none() -> None:
    model, how = drafted("exits")
    ids(model, how)
    assert len(model.drafting_passes) == 16 and all(len(one.batch) == 1 for one in model.drafting_passes)
    model, how = drafted("sequences")
    ids(model, how)
    assert model.drafting_passes == [] and model.n_logits == 1 + 16


@both_kinds
def test_wrong_drafts_cost_their_tokens_and_nothing_else(kind: str) -> None:
    (model, how), counts = drafted(kind, lambda token_id, _: (token_id + 2) % 32), DraftCounts()
    assert ids(model, how, counts=counts) == COUNTING[:17]
    assert [len(one.batch) for one in model.verifications] == [4] * 13 + [3, 2, 1]
    assert counts.statistics(N_LAYERS, how.exit_layer).acceptance == 0


@both_kinds
@pytest.mark.parametrize(
    ("wrong", "firsts"),
    [(3, [3, 4, 8]), (4, [3, 5, 9]), (5, [3, 6, 10]), (6, [3, 7, 11]), (7, [3, 7, 8])],  # no draft after the fourth
)
def test_the_first_wrong_draft_is_corrected_and_the_rest_rolled_back(kind: str, wrong: int, firsts: list[int]) -> None:
    model, how = drafted(kind, wrong_at(wrong))
    assert ids(model, how) == COUNTING[:17]
    assert [one.batch.positions[0] for one in model.verifications][:3] == firsts


def test_the_rule_ends_drafting() -> None:
    rule = RecordingRule(True, False, False, True, True)
    model, how = drafted("exits", rule=rule)
    assert ids(model, how, 8) == COUNTING[:8]
    assert [len(one.batch) for one in model.verifications] == [2, 1, 4]
    assert rule.asked == [1, 2, 1, 1, 2, 3]
    assert rule.settled == [(2, 2), (1, 1), (4, 4)]
    assert rule.audits == [True] * 6  # those that were not made were right too


@both_kinds
def test_the_rule_is_told_of_drafts_up_to_the_first_wrong_one(kind: str) -> None:
    rule = RecordingRule()
    ids(*drafted(kind, wrong_at(4), rule=rule), 8)
    assert rule.audits == [True, False, True, True, True]
    assert rule.settled == [(4, 2), (4, 4), (1, 1)]


@both_kinds
def test_several_texts_share_every_pass(kind: str) -> None:
    """The second text's drafts are wrong; it needs more steps, the first one's passes are its own as well."""
    prompts, counts, rule = [PROMPT, [20, 21], [9]], DraftCounts(), RecordingRule()
    model, how = drafted(kind, lambda token_id, _: token_id + (2 if token_id >= 19 else 1), rule=rule)
    model.prompt_chunk_tokens = 2
    together = list(decoding(model, how, prompts, 9, counts))
    for sequence, prompt in enumerate(prompts):
        alone = decoding(*drafted(kind), [prompt], 9)
        mine = [token.token_id for token in together if token.sequence == sequence]
        assert mine == [token.token_id for token in alone]
    assert set(model.verifications[0].batch.sequences) == {0, 1, 2} and len(model.verifications[0].batch) == 12
    if kind == "exits":  # drafts in lockstep
        assert [set(one.batch.sequences) for one in model.drafting_passes[:4]] == [{0, 1, 2}] * 4
        assert rule.asked[:9] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    found = counts.statistics(N_LAYERS, how.exit_layer)
    assert found.n_passes == len(model.verifications) < found.n_steps


@pytest.mark.parametrize("wrong", [(), (4,), (5, 6, 11)])
def test_a_source_observes_verified_tokens_alone(wrong: tuple[int, ...]) -> None:
    """ScriptedSource checks that what it is told follows what it knows."""
    model, how = drafted("sequences", wrong_at(*wrong))
    (source,), model.prompt_chunk_tokens = how.sources, 2
    assert isinstance(source, ScriptedSource)
    sequence = model.cache.open_new()  # it stays open when the text ends
    for token in decoding(model, how, Continuation(sequence, list(PROMPT)), 17):
        if token.finish_reason is None:
            seen = source.observed[0]
            assert (PROMPT + COUNTING)[: len(seen)] == seen and len(seen) >= token.position
    list(decoding(model, how, [PROMPT], 17))  # in a sequence of its own
    assert source.closed == [1] and source.observed.keys() == {sequence}


# Endings.


@both_kinds
@pytest.mark.parametrize("n_tokens", range(1, 10))
@pytest.mark.parametrize("limit", ["length", "context"])
def test_no_draft_goes_beyond_the_end(kind: str, n_tokens: int, limit: str) -> None:
    model, how = drafted(kind, wrong_at(6))
    limits = {"n_tokens": n_tokens} if limit == "length" else {"n_tokens": None, "context_tokens": 3 + n_tokens}
    tokens = list(decoding(model, how, [PROMPT], **limits))  # type: ignore[arg-type]
    assert [token.token_id for token in tokens] == COUNTING[:n_tokens]
    assert tokens[-1].finish_reason == (FinishReason.LENGTH if limit == "length" else FinishReason.CONTEXT)
    assert max(max(one.batch.positions) for one in model.passes) <= 3 + n_tokens - 2  # the last token passes no layer


@both_kinds
@pytest.mark.parametrize("end", COUNTING[:9])
@pytest.mark.parametrize("ends", ["eos", "stop_token_ids"])
def test_an_end_token_in_a_draft_ends_the_text_and_drafting(kind: str, end: int, ends: str) -> None:
    model, how = drafted(kind)
    ending: Any = {ends: frozenset({end})}
    full = decoding(ScriptedModel(successor, successor), None, [PROMPT], **ending)
    assert list(decoding(model, how, [PROMPT], **ending)) == list(full)
    assert all(end not in one.batch.token_ids for one in model.passes)  # nothing would follow it


@both_kinds
@pytest.mark.parametrize("stop", ["8,", "9,10,", ",11", "12,1", "13,14,15,"])
def test_a_stop_string_in_a_draft_ends_the_text(kind: str, stop: str) -> None:
    for wrong in ((), (8,)):
        model, how = drafted(kind, wrong_at(*wrong), 5)
        full = decoding(ScriptedModel(successor, successor), None, [PROMPT], 17, stop=stop)
        assert list(decoding(model, how, [PROMPT], 17, stop=stop)) == list(full)


# Sampling.

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.4, "top_k": 9, "min_p": 0.01, "seed": 2},
    {"temperature": 1.0, "top_p": 0.9, "repeat_penalty": 1.5, "seed": 3},
    {"repeat_penalty": 2.0},
]


class Drawing(ScriptedSource):
    """Knows the full model's logits, and draws."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(lambda _: [], HIDDEN)
        self._model = model

    def _drafted(self, token_ids: Sequence[int], choose: Choose) -> Generator[int]:
        history = list(token_ids)
        while len(history) < len(token_ids) + MAX_DRAFTS:
            state = torch.tensor([[history[-1], len(history) - 1, N_LAYERS]], dtype=torch.float32)
            history.append(choose(state, DraftEnd(is_normed=True), history).token_id)
            yield history[-1]


@both_kinds
@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_drafts_are_drawn_with_the_noise_and_the_history_of_their_position(kind: str, params: dict[str, Any]) -> None:
    """Drafts that know the full logits are always right: what they draw is what verification draws."""
    counts, prompts = DraftCounts(), [PROMPT, [9, 9, 9]]
    model, how = drafted(kind, draft_length=6)
    model.spread = 2.0
    if kind == "sequences":
        how = replace(how, sources=(Drawing(model),))
    full = decoding(ScriptedModel(successor, successor, spread=2.0), None, prompts, 41, **params)
    assert sorted(decoding(model, how, prompts, 41, counts, **params), key=by_position) == sorted(full, key=by_position)
    assert counts.statistics(N_LAYERS, how.exit_layer).acceptance == 1


def by_position(token: GeneratedToken) -> tuple[int, int]:
    return token.sequence, token.position


# Conversations, and what can't be.


@both_kinds
def test_what_the_cache_holds_is_resumed(kind: str) -> None:
    model, how = drafted(kind, wrong_at(9))
    sequence, said = model.cache.open_new(), list(PROMPT)
    for _ in range(2):
        for token in decoding(model, how, Continuation(sequence, said[:]), 10):
            assert token.token_id == (said[-1] + 1) % 32
            assert model.cache.length(sequence) >= len(said)  # every token before this one
            said.append(token.token_id)
        assert all(model.cache.length_at(sequence, layer) == len(said) - 1 for layer in range(N_LAYERS))
        for source in how.sources:
            assert isinstance(source, ScriptedSource)
            assert source.observed[sequence] == said[:-1] and source.closed == []
    assert sum(len(one.batch) for one in model.passes if one.is_prompt) == len(PROMPT) + 1


@pytest.mark.parametrize("draft_length", [0, 17, -1])
def test_impossible_lengths_are_refused(draft_length: int) -> None:
    with pytest.raises(UsageError, match=f"draft length is {draft_length}; expected 1 to 16"):
        drafted("exits", draft_length=draft_length)


def test_impossible_exit_layers_are_refused() -> None:
    for exit_layer, exit_end in ((-1, DraftEnd()), (0, DraftEnd()), (2, None)):
        with pytest.raises(UsageError, match=f"exit layer is {exit_layer}; expected 1 or more for exits, 0 for other"):
            Drafting(exit_layer, 4, FixedThreshold(0.0), exit_end)
    model = ScriptedModel(successor, successor)
    with pytest.raises(UsageError, match=r"exit layer is 6; expected 0 to 5, of this model"):
        ids(model, Drafting(N_LAYERS, 4, FixedThreshold(0.0), DraftEnd()))
    assert model.cache.n_bytes == 0
