"""Rounds of exact mode, on a model whose answers are scripted: what is computed, kept and rolled back."""

from collections.abc import Sequence
from typing import Any

import pytest
from hetero_ee.speculation.draft_gate import FixedGate

from hetero_ee.decoding.full import generate
from hetero_ee.decoding.result import FinishReason, GeneratedToken
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending
from hetero_ee.errors import UsageError
from hetero_ee.planning.plan import EXIT, SEQUENCE
from hetero_ee.speculation.drafting import Drafting, ExitHead
from hetero_ee.speculation.exact import generate_exact, generate_exact_from
from hetero_ee.speculation.statistics import DraftCounts, OriginCounts
from tests.draft_sources import ScriptedSource
from tests.scripted_model import N_LAYERS, VOCABULARY, ScriptedModel, successor, wrong_at

BOUNDARY = 2
PROMPT = [3, 4, 5]
COUNTING = [6 + i for i in range(26)]  # what successor says after PROMPT


def drafting(draft_length: int = 4, exit_layer: int = BOUNDARY, source: Any = None, **changes: Any) -> Drafting:
    """Exits without end, unless changed."""
    return Drafting(
        exit_layer, draft_length, **{"gate": FixedGate(0.0), "exit_head": ExitHead()} | changes, source=source
    )


def generated(
    model: ScriptedModel,
    how: Drafting | None = None,
    prompts: Sequence[list[int]] = (PROMPT,),
    counts: DraftCounts | None = None,
    eos: frozenset[int] = frozenset(),
    context_tokens: int = 200,
    **params: Any,
) -> list[GeneratedToken]:
    """In exact mode, or at full depth where `how` is None; a text of the tokens' numbers."""
    sampling = SamplingParams(**{"max_new_tokens": 17} | params)
    arguments: Any = (model, list(prompts), sampling, Ending(eos, context_tokens), decode, lambda: 0.0)
    return list(generate(*arguments) if how is None else generate_exact(*arguments, how, counts))


def decode(token_ids: list[int]) -> str:
    return "".join(f"{token_id}," for token_id in token_ids)


def ids(tokens: list[GeneratedToken]) -> list[int]:
    return [token.token_id for token in tokens]


class RecordingGate(FixedGate):
    """Lets pass what `answers` says, alternately, then everything; keeps what it is told."""

    def __init__(self, *answers: bool) -> None:
        super().__init__(0.0)
        self._answers = list(answers)
        self.asked: list[tuple[int, int]] = []
        self.audits: list[bool] = []
        self.settled: list[tuple[int, int]] = []

    def goes_on(self, sequence: int, confidence: float, n_pending: int) -> bool:
        self.asked.append((sequence, n_pending))
        return self._answers.pop(0) if self._answers else True

    def audit(self, confidence: float, was_right: bool) -> None:
        self.audits.append(was_right)

    def settle(self, n_rows: int, n_tokens: int) -> None:
        self.settled.append((n_rows, n_tokens))


# What is computed.


@pytest.mark.parametrize("draft_length", [1, 2, 4, 16])
def test_right_drafts_read_the_later_layers_once_a_round(draft_length: int) -> None:
    model, counts = ScriptedModel(successor, successor), DraftCounts()
    assert ids(generated(model, drafting(draft_length), counts=counts)) == COUNTING[:17]
    assert [one.layers for one in model.later] == [range(BOUNDARY, N_LAYERS)] * (16 // draft_length)
    assert all(len(one.rows) == draft_length for one in model.later)
    assert len(model.earlier) == 16 and all(len(one.rows) == 1 for one in model.earlier)
    found = counts.statistics(N_LAYERS, BOUNDARY)
    assert (found.n_passes, found.n_tokens) == (16 // draft_length, 16)
    assert found.tokens_per_pass == draft_length and found.acceptance == (1.0 if draft_length > 1 else 0.0)
    assert found.mean_exit_depth == (BOUNDARY * (draft_length - 1) + N_LAYERS) / draft_length


def test_wrong_drafts_cost_their_rows_and_nothing_else() -> None:
    model, counts = ScriptedModel(successor, lambda token_id, _: token_id + 2), DraftCounts()
    assert ids(generated(model, drafting(4), counts=counts)) == COUNTING[:17]
    assert [len(one.rows) for one in model.later] == [4] * 13 + [3, 2, 1]
    assert counts.statistics(N_LAYERS, BOUNDARY).acceptance == 0


@pytest.mark.parametrize(
    ("wrong", "firsts"),
    [(3, [3, 4, 8]), (4, [3, 5, 9]), (5, [3, 6, 10]), (6, [3, 7, 11]), (7, [3, 7, 8])],  # the fourth row has no draft
)
def test_the_first_wrong_draft_is_corrected_and_the_rest_rolled_back(wrong: int, firsts: list[int]) -> None:
    model = ScriptedModel(successor, wrong_at(wrong))
    assert ids(generated(model, drafting(4))) == COUNTING[:17]
    assert [one.rows.positions[0] for one in model.later][:3] == firsts


def test_the_gate_ends_drafting() -> None:
    gate = RecordingGate(True, False, False, True, True)
    model = ScriptedModel(successor, successor)
    assert ids(generated(model, drafting(4, gate=gate), max_new_tokens=8)) == COUNTING[:8]
    assert [len(one.rows) for one in model.later] == [2, 1, 4]
    assert gate.asked == [(0, 1), (0, 2), (0, 1), (0, 1), (0, 2), (0, 3)]
    assert gate.settled == [(2, 2), (1, 1), (4, 4)]
    assert gate.audits == [True] * 6  # those that did not pass were right too


def test_the_gate_is_told_of_drafts_up_to_the_first_wrong_one() -> None:
    gate = RecordingGate()
    generated(ScriptedModel(successor, wrong_at(4)), drafting(4, gate=gate), max_new_tokens=8)
    assert gate.audits == [True, False, True, True, True]
    assert gate.settled == [(4, 2), (4, 4), (1, 1)]


def test_several_texts_share_every_pass() -> None:
    """The second text's drafts are wrong; it needs more rounds, the first one's passes are its own as well."""
    prompts, counts, gate = [PROMPT, [20, 21], [9]], DraftCounts(), RecordingGate()
    model = ScriptedModel(successor, lambda token_id, _: token_id + (2 if token_id >= 19 else 1), prompt_chunk_tokens=2)
    together = generated(model, drafting(4, gate=gate), prompts, counts, max_new_tokens=9)
    for sequence, prompt in enumerate(prompts):
        alone = generated(ScriptedModel(successor, successor), drafting(4), [prompt], max_new_tokens=9)
        assert ids([token for token in together if token.sequence == sequence]) == ids(alone)
    assert set(model.later[0].rows.sequences) == {0, 1, 2} and len(model.later[0].rows) == 12
    assert [set(one.rows.sequences) for one in model.earlier[:4]] == [{0, 1, 2}] * 4
    assert gate.asked[:9] == [(sequence, n_pending) for n_pending in (1, 2, 3) for sequence in (0, 1, 2)]
    found = counts.statistics(N_LAYERS, BOUNDARY)
    assert found.n_passes == len(model.later) < found.n_rounds


# Chains.


def known(*errors: int) -> ScriptedSource:
    """Chains of what successor says; wrong at these positions."""
    text = PROMPT + COUNTING
    wrong = [31 - token if position in errors else token for position, token in enumerate(text)]

    def propose(token_ids: Sequence[int], n_tokens: int) -> list[int]:
        return wrong[len(token_ids) : len(token_ids) + n_tokens]

    return ScriptedSource(propose, 3)


@pytest.mark.parametrize("exit_layer", [0, BOUNDARY, N_LAYERS - 1])
def test_a_chain_passes_the_earlier_layers_as_one_batch(exit_layer: int) -> None:
    model, counts = ScriptedModel(successor, successor), DraftCounts()
    how = drafting(4, exit_layer, known(), exit_head=None)
    assert ids(generated(model, how, counts=counts)) == COUNTING[:17]
    layers = [one.layers for one in model.passes[1:]]
    assert layers == [range(exit_layer), range(exit_layer, N_LAYERS)] * 4
    assert all(len(one.rows) == 4 for one in model.passes[1:])
    assert [origin.origin for origin in counts.statistics(N_LAYERS, exit_layer).origins] == [SEQUENCE]
    assert model.n_projected == 1 + 16  # no exit head


def test_without_exits_the_gate_is_not_asked() -> None:
    gate = RecordingGate(*[False] * 99)
    assert ids(generated(ScriptedModel(successor, successor), drafting(4, 0, known(), gate=gate))) == COUNTING[:17]
    assert gate.asked == [] and gate.settled == [(4, 4)] * 4


def test_the_gate_cuts_a_chain_at_the_boundary_and_the_exit_is_asked_instead() -> None:
    gate = RecordingGate(True, False, False)
    model, counts = ScriptedModel(successor, successor), DraftCounts()
    source = known(5)
    generated(model, drafting(4, source=source, gate=gate), counts=counts, max_new_tokens=7)
    assert [len(one.rows) for one in model.earlier[:1]] == [4]
    assert [len(one.rows) for one in model.later[:1]] == [2]
    assert gate.asked[:3] == [(0, 1), (0, 2), (0, 2)]
    assert gate.audits[:3] == [True, False, True]  # the chain's second was wrong, the exit's right
    assert counts.statistics(N_LAYERS, BOUNDARY).origins == (OriginCounts(SEQUENCE, 4, 4, 4),)  # none that was cut


def test_exits_go_on_where_a_chain_ends_or_is_cut() -> None:
    source = ScriptedSource(lambda token_ids, _: [token_ids[-1] + 1], 3)  # one right token
    counts = DraftCounts()
    model = ScriptedModel(successor, successor)
    generated(model, drafting(4, source=source), counts=counts)
    assert [len(one.rows) for one in model.earlier] == [2, 1, 1] * 4
    origins = {found.origin: found.n_accepted for found in counts.statistics(N_LAYERS, BOUNDARY).origins}
    assert origins == {EXIT: 8, SEQUENCE: 4}
    gate = RecordingGate(False, True)
    model = ScriptedModel(successor, successor)
    generated(model, drafting(4, source=known(4), gate=gate), max_new_tokens=5)
    assert [len(one.rows) for one in model.earlier] == [4, 1, 1, 1] and len(model.later) == 1


@pytest.mark.parametrize("errors", [(), (4,), (5, 6, 11)])
@pytest.mark.parametrize("exit_head", [None, ExitHead()])
def test_a_source_observes_verified_rows_alone(errors: tuple[int, ...], exit_head: ExitHead | None) -> None:
    """ScriptedSource checks that what it is told follows what it knows."""
    source, seen = known(*errors), list[list[int]]()
    model = ScriptedModel(successor, wrong_at(7), prompt_chunk_tokens=2)
    arguments: Any = (SamplingParams(max_new_tokens=17), Ending(frozenset(), 200), decode, lambda: 0.0)
    how = drafting(4, source=source, exit_head=exit_head)
    for token in generate_exact(model, [PROMPT], *arguments, how):  # type: ignore[arg-type]
        if token.finish_reason is None:
            seen.append(source.observed[0])
            assert (PROMPT + COUNTING)[: len(seen[-1])] == seen[-1] and len(seen[-1]) >= token.position
    assert source.closed == [0] and source.observed == {}


# Endings.


@pytest.mark.parametrize("n_tokens", range(1, 10))
@pytest.mark.parametrize("kind", ["length", "context"])
def test_no_draft_goes_beyond_the_end(n_tokens: int, kind: str) -> None:
    model, source = ScriptedModel(successor, wrong_at(6), max_tokens=3 + n_tokens), known()
    limits = {"max_new_tokens": n_tokens} if kind == "length" else {"context_tokens": 3 + n_tokens}
    tokens = generated(model, drafting(4, source=source), **limits)  # type: ignore[arg-type]
    assert ids(tokens) == COUNTING[:n_tokens]
    assert tokens[-1].finish_reason == (FinishReason.LENGTH if kind == "length" else FinishReason.CONTEXT)
    assert max(max(one.rows.positions) for one in model.passes) <= 3 + n_tokens - 2  # the last token is no row


@pytest.mark.parametrize("end", COUNTING[:9])
@pytest.mark.parametrize("source", [None, known])
def test_an_end_token_in_a_draft_ends_the_text_and_drafting(end: int, source: Any) -> None:
    for ending in ({"eos": frozenset({end})}, {"stop_token_ids": (end,)}):
        model = ScriptedModel(successor, successor)
        how = drafting(4, source=source and source())
        assert generated(model, how, **ending) == generated(ScriptedModel(successor, successor), **ending)  # type: ignore[arg-type]
        assert all(end not in one.rows.token_ids for one in model.passes)  # nothing would follow it


@pytest.mark.parametrize("stop", ["8,", "9,10,", ",11", "12,1", "13,14,15,"])
def test_a_stop_string_in_a_draft_ends_the_text(stop: str) -> None:
    for source in (None, known(), known(9)):
        tokens = generated(ScriptedModel(successor, wrong_at(8)), drafting(5, source=source), stop=stop)
        assert tokens == generated(ScriptedModel(successor, successor), stop=stop)


# Sampling.

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.4, "top_k": 9, "min_p": 0.01, "seed": 2},
    {"temperature": 1.0, "top_p": 0.9, "repeat_penalty": 1.5, "seed": 3},
    {"repeat_penalty": 2.0},
]


@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_drafts_are_drawn_with_the_noise_and_the_history_of_their_position(params: dict[str, Any]) -> None:
    """Exits that know the full logits are always right: what they draw is what verification draws."""
    counts = DraftCounts()
    prompts = [PROMPT, [9, 9, 9]]
    model = ScriptedModel(successor, successor, spread=2.0)
    tokens = generated(model, drafting(6), prompts, counts, max_new_tokens=41, **params)
    full = generated(ScriptedModel(successor, successor, spread=2.0), None, prompts, max_new_tokens=41, **params)
    key = lambda token: (token.sequence, token.position)  # noqa: E731
    assert sorted(tokens, key=key) == sorted(full, key=key)
    assert counts.statistics(N_LAYERS, BOUNDARY).acceptance == 1


def test_a_source_chooses_with_the_noise_of_its_position() -> None:
    import torch

    model = ScriptedModel(successor, successor, spread=2.0)

    class Drawing(ScriptedSource):
        def propose(self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Any, *_: Any) -> list[int]:
            ahead = list(token_ids)
            while len(ahead) < len(token_ids) + n_tokens:
                state = torch.tensor([[ahead[-1], len(ahead) - 1, N_LAYERS]], dtype=torch.float32)
                ahead.append(choose(model.lm_head(state)[0], ahead))
            return ahead[len(token_ids) :]

    counts, prompts = DraftCounts(), [[1, 2], PROMPT]
    how = drafting(6, 0, Drawing(lambda *_: [], 3))
    generated(model, how, prompts, counts, max_new_tokens=41, **SAMPLED[2])
    assert counts.statistics(N_LAYERS, 0).acceptance == 1


# Conversations, and what can't be.


def test_what_the_cache_holds_is_gone_on_from() -> None:
    model, source = ScriptedModel(successor, wrong_at(9)), known()
    sequence = model.cache.open_new()
    arguments: Any = (SamplingParams(max_new_tokens=10), Ending(frozenset(), 200), decode, lambda: 0.0)
    how, known_ids = drafting(4, source=source), list(PROMPT)
    for _ in range(2):
        start = known_ids[:]
        for token in generate_exact_from(model, sequence, start, *arguments, how):  # type: ignore[arg-type]
            assert token.token_id == (known_ids[-1] + 1) % VOCABULARY
            assert model.cache.length(sequence) >= len(known_ids)  # every token before this one
            known_ids.append(token.token_id)
        assert all(model.cache.length_at(sequence, layer) == len(known_ids) - 1 for layer in range(N_LAYERS))
        assert source.observed[sequence] == known_ids[:-1] and source.closed == []
    assert sum(len(one.rows) for one in model.passes if one.layers == range(N_LAYERS)) == len(PROMPT) + 1


@pytest.mark.parametrize("draft_length", [0, 17, -1])
def test_impossible_lengths_are_refused(draft_length: int) -> None:
    with pytest.raises(UsageError, match=f"draft_length is {draft_length}; expected 1 to 16"):
        drafting(draft_length)


def test_impossible_boundaries_are_refused() -> None:
    with pytest.raises(UsageError, match="exit layer is -1"):
        drafting(4, -1)
    model = ScriptedModel(successor, successor)
    with pytest.raises(UsageError, match=r"exit layer is 6; expected 0 to 5 for 6 layers"):
        generated(model, drafting(4, N_LAYERS))
    assert model.cache.n_bytes == 0
