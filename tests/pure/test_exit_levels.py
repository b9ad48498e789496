"""Levels before the exit layer, on a model whose answers are scripted: where rows exit, wait and are caught up on."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hetero_ee.speculation.draft_gate import FixedGate
from hetero_ee.speculation.exit_levels import ActiveLevels
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.decoding.full import generate
from hetero_ee.decoding.sampling import SamplingParams, choose_token, gumbel_noise
from hetero_ee.decoding.texts import Ending
from hetero_ee.errors import UsageError
from hetero_ee.speculation.drafting import Drafting, ExitHead, ExitLevel, ExitLevels
from hetero_ee.speculation.exact import generate_exact, generate_exact_from
from hetero_ee.speculation.exits.candidates import spread_out
from hetero_ee.speculation.statistics import DraftCounts
from tests.draft_sources import ScriptedSource
from tests.scripted_model import N_LAYERS, VOCABULARY, ScriptedModel, successor, wrong_at

BOUNDARY, PROMPT = 5, [3, 4, 5]
NAN = float("nan")
Depth = Callable[[int], int]  # position -> after how many layers its row exits; 0 for never


class Exits:
    """Exit heads that let each row exit where `depth` says. judged: (position, layers) in the order of judging."""

    def __init__(self, depth: Depth) -> None:
        self._depth = depth
        self._seen: deque[tuple[int, int]] = deque()
        self.judged: list[tuple[int, int]] = []
        self.head = ExitHead(self._look, lambda *_: self._confidence())

    def drafting(self, levels: Iterable[int], others: Iterable[int] = (), **changes: Any) -> Drafting:
        """levels: scheduled ones; others: those that only recent exits wake."""
        level = ExitLevel(self.head, 0.5, lambda *_: self._confidence(), 0.5)
        found = ExitLevels(dict.fromkeys((*levels, *others), level), tuple(levels))
        return Drafting(BOUNDARY, **{"draft_length": 4, "gate": FixedGate(0.5), "levels": found} | changes)

    def _look(self, normed: Any) -> Any:
        """The map, which changes nothing, sees all rows that are judged."""
        self._seen.extend((int(position), int(depth)) for _, position, depth in normed)
        return normed

    def _confidence(self) -> float:
        self.judged.append(self._seen.popleft())
        position, depth = self.judged[-1]
        return float(self._depth(position) == depth)


def drafting_with(depth: Depth, levels: Iterable[int], others: Iterable[int] = (), **changes: Any) -> Drafting:
    exits = Exits(depth)
    return exits.drafting(levels, others, exit_head=exits.head, **changes)


def generated(model: ScriptedModel, how: Drafting | None, prompts: Sequence[list[int]] = (PROMPT,), **kept: Any) -> Any:
    """17 tokens of each prompt, unless changed; at full depth where `how` is None."""
    params = SamplingParams(**{"max_new_tokens": 17} | kept.get("params", {}))
    arguments: Any = (model, list(prompts), params, Ending(frozenset(), 200), str, lambda: 0.0)
    found = generate(*arguments) if how is None else generate_exact(*arguments, how, kept.get("counts"))
    return sorted(found, key=lambda token: (token.sequence, token.position))


def passes(model: ScriptedModel) -> list[tuple[int, int, list[int]]]:
    """Layers and positions of every pass behind the prompt's."""
    return [(one.layers.start, one.layers.stop, list(one.rows.positions)) for one in model.passes[1:]]


# What is computed.


def test_a_row_that_exits_waits_and_is_taken_along() -> None:
    model = ScriptedModel(successor, successor)
    how = drafting_with({3: 1, 4: 3}.get, (1, 3), draft_length=3)  # type: ignore[arg-type]
    generated(model, how, params={"max_new_tokens": 4})
    assert passes(model) == [
        (0, 1, [3]),  # exits
        (0, 1, [4]),  # is judged where row 3 waits
        (1, 3, [3, 4]),  # exits
        (0, 3, [5]),  # no row has room behind it: not judged
        (3, BOUNDARY, [3, 4, 5]),
        (BOUNDARY, N_LAYERS, [3, 4, 5]),
    ]
    assert model.n_projected == 1 + 2 + 3 and model.n_sliced == 1  # the prompt's, levels', verification's


def test_rows_that_wait_at_several_levels_meet_on_the_way() -> None:
    model = ScriptedModel(successor, successor)
    how = drafting_with({3: 4, 4: 3, 5: 1}.get, (1, 3, 4))  # type: ignore[arg-type]
    generated(model, how, params={"max_new_tokens": 5})
    assert passes(model)[-5:] == [
        (0, 1, [6]),
        (1, 3, [5, 6]),
        (3, 4, [4, 5, 6]),
        (4, BOUNDARY, [3, 4, 5, 6]),
        (BOUNDARY, N_LAYERS, [3, 4, 5, 6]),
    ]


def test_a_row_that_never_exits_is_judged_by_the_whole_head_first_and_at_the_boundary() -> None:
    model, exits = ScriptedModel(successor, successor), Exits(lambda position: 0)
    generated(model, exits.drafting((1, 3, 4), exit_head=exits.head), params={"max_new_tokens": 3})
    assert exits.judged == [(3, 1), (3, 3), (3, 4), (3, BOUNDARY)]
    assert model.n_projected == 1 + 2 + 2 and model.n_sliced == 2


@pytest.mark.parametrize("levels", [ExitLevels(), ExitLevels({1: ExitLevel(ExitHead(), 0.0)}, ())])
def test_without_active_levels_nothing_changes(levels: ExitLevels) -> None:
    """Exits at the exit layer wake levels within two of it, and level 1 is not."""
    model, plain = (ScriptedModel(successor, wrong_at(6, 9)) for _ in range(2))
    tokens = generated(plain, Drafting(BOUNDARY, 4, FixedGate(0.0), ExitHead()))
    assert generated(model, Drafting(BOUNDARY, 4, FixedGate(0.0), ExitHead(), levels=levels)) == tokens
    assert passes(model) == passes(plain) and model.n_projected == plain.n_projected


def test_a_chain_passes_to_the_boundary_as_one_batch_and_exits_go_on_from_levels() -> None:
    model = ScriptedModel(successor, successor)
    source = ScriptedSource(lambda before, n: [before[-1] + 1, before[-1] + 2][:n], 3)
    how = drafting_with({3: 5, 4: 5, 5: 5, 6: 1}.get, (1,), source=source, draft_length=5)  # type: ignore[arg-type]
    generated(model, how, params={"max_new_tokens": 6})
    assert passes(model)[:4] == [(0, BOUNDARY, [3, 4, 5]), (0, 1, [6]), (0, 1, [7]), (1, BOUNDARY, [6, 7])]


def test_recent_exits_wake_levels_near_them() -> None:
    model, exits = ScriptedModel(successor, successor), Exits({3: 3, 4: 2}.get)  # type: ignore[arg-type]
    generated(model, exits.drafting((3,), (1, 2, 4), exit_head=exits.head), params={"max_new_tokens": 4})
    assert exits.judged[:3] == [(3, 3), (4, 1), (4, 2)]  # an exit at 3 wakes 1, 2, 4 and 5


def test_a_level_that_knows_no_candidates_of_others_is_passed_by() -> None:
    model, exits = ScriptedModel(successor, successor), Exits(lambda position: 0)
    blind = ExitLevel(exits.head, 0.5)
    how = exits.drafting((1, 3), exit_head=exits.head)
    for scheduled in ((1, 3), (3,)):
        levels = ExitLevels({1: blind, 3: blind}, scheduled)
        generated(model, replace(how, levels=levels), params={"max_new_tokens": 3})
    assert exits.judged == [(3, 1), (3, BOUNDARY), (3, 3), (3, BOUNDARY)]


def test_several_texts_share_passes_up_to_the_next_of_their_levels() -> None:
    """The first row of the second text exits early; its next one catches up with the first text's."""
    model = ScriptedModel(successor, successor)
    how = drafting_with({3: 4, 7: 1, 8: 4}.get, (1, 4), draft_length=3)  # type: ignore[arg-type]
    generated(model, how, [PROMPT, [1, 2, 3, 4, 5, 6, 7]], params={"max_new_tokens": 4})
    layers = [(one.layers.start, one.layers.stop, list(one.rows.positions)) for one in model.passes[2:6]]
    assert layers == [
        (0, 1, [3, 7]),  # 7 exits, 3 goes on
        (0, 1, [8]),
        (1, 4, [3, 7, 8]),  # 3 and 8 exit
        (0, 1, [4, 9]),
    ]


def test_levels_beyond_the_boundary_are_refused() -> None:
    for level in (0, BOUNDARY):
        with pytest.raises(UsageError, match=f"an exit level is {level}; expected 1 to 4"):
            drafting_with(lambda position: 0, (level,))


def test_a_level_sees_the_first_ones_candidates_and_how_they_have_changed() -> None:
    """The successor's logit stands out; the others of the four are the highest ids, as all logits rise with the id."""
    seen: list[tuple[list[float], list[float]]] = []

    def look(logits: Any, softmax: Any) -> float:
        seen.append((logits.tolist(), softmax.tolist()))
        softmax[:] = 0.25
        return 0.0

    model = ScriptedModel(successor, successor)
    level = ExitLevel(ExitHead(None, lambda *_: 0.0), 0.5, look, 0.5)
    levels = ExitLevels({1: level, 2: level, 3: level}, (1, 2, 3))
    generated(model, Drafting(BOUNDARY, 2, FixedGate(0.5), ExitHead(), levels=levels), params={"max_new_tokens": 3})
    line = torch.linspace(0, 1, VOCABULARY)
    expected = [float(line[7]) + 5, *(float(line[token_id]) for token_id in (31, 30, 29))]
    assert [logits for logits, _ in seen] == [pytest.approx(expected)] * 2
    assert seen[0][1] == pytest.approx(torch.softmax(torch.tensor(expected), 0).tolist()) and seen[1][1] == [0.25] * 4


def test_exits_that_were_wrong_wake_nothing() -> None:
    """Row 3 exits at 1: row 4 behind it is judged at 2 as well, until it shows that the draft was wrong."""
    model, exits = ScriptedModel(successor, wrong_at(3)), Exits({3: 1}.get)  # type: ignore[arg-type]
    generated(model, exits.drafting((1,), (2,), exit_head=exits.head), params={"max_new_tokens": 4})
    assert exits.judged == [(3, 1), (4, 1), (4, 2), (4, BOUNDARY), (4, 1), (4, BOUNDARY)]


def test_a_draft_of_few_candidates_is_drawn_with_its_positions_noise() -> None:
    logits, candidates = torch.tensor([2.0, 1.0, 0.5, 0.1]), torch.tensor([7, 3, 30, 11])
    params, drawn = SamplingParams(temperature=1.0, top_p=0.99, seed=5), set()
    for position in range(40):
        scores = logits.double() + gumbel_noise(VOCABULARY, 5, 0, position)[candidates]
        drawn.add(int(candidates[scores.argmax()]))
        spread = spread_out(logits, candidates, VOCABULARY)
        assert choose_token(spread, [1], params, 0, position) == int(candidates[scores.argmax()])
    assert len(drawn) == 4
    penal = SamplingParams(repeat_penalty=3.0)
    assert choose_token(spread_out(logits, candidates, VOCABULARY), [7], penal, 0, 1) == 3


# What is said.

Depths = st.lists(st.integers(0, BOUNDARY), min_size=40, max_size=40)


@given(
    Depths, st.sets(st.integers(1, BOUNDARY - 1)), st.sets(st.integers(1, BOUNDARY - 1)), st.integers(1, 6), st.data()
)
def test_the_tokens_are_those_of_full_depth(
    depths: list[int], levels: set[int], others: set[int], draft_length: int, data: st.DataObject
) -> None:
    """ScriptedModel checks that what every pass is given is where the pass begins."""
    prompts = [PROMPT, [9], [20, 21]][: data.draw(st.integers(1, 3))]
    wrong = wrong_at(*data.draw(st.sets(st.integers(2, 20))))
    how = drafting_with(depths.__getitem__, sorted(levels), sorted(others), draft_length=draft_length)
    params = data.draw(st.sampled_from([{}, {"temperature": 1.2, "top_k": 9, "seed": 4}, {"repeat_penalty": 1.5}]))
    spread = 2.0 if params else 5.0
    counts = DraftCounts()
    found = generated(ScriptedModel(successor, wrong, spread=spread), how, prompts, params=params, counts=counts)
    assert found == generated(ScriptedModel(successor, wrong, spread=spread), None, prompts, params=params)
    assert sum(counts.statistics(N_LAYERS, BOUNDARY).known_after) == 16 * len(prompts)


def test_tokens_are_counted_where_they_were_known() -> None:
    counts, model = DraftCounts(), ScriptedModel(successor, wrong_at(5))
    how = drafting_with({3: 1, 4: 3, 5: 1}.get, (1, 3))  # type: ignore[arg-type]
    generated(model, how, counts=counts, params={"max_new_tokens": 4})
    found = counts.statistics(N_LAYERS, BOUNDARY)
    assert found.known_after == (0, 1, 0, 1, 0, 0, 1)  # the third draft was wrong
    assert found.mean_exit_depth == (1 + 3 + N_LAYERS) / 3


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("of_logits", [True, False])
def test_what_is_no_number_is_judged_no_further(at_first: bool, of_logits: bool) -> None:
    """At its first level or its second: the row waits at the exit layer, and no row follows it."""
    depths: list[int] = []

    class Spoilt(ScriptedModel):
        def partial_logits(self, normed: Any, token_ids: Any) -> Any:
            return super().partial_logits(normed, token_ids) * (NAN if of_logits and not at_first else 1.0)

        def lm_head(self, normed: Any) -> Any:
            depths.extend(int(depth) for _, _, depth in normed)
            is_level = of_logits and at_first and int(normed[0, 2]) < BOUNDARY
            return super().lm_head(normed) * (NAN if is_level else 1.0)

    notices: list[str] = []
    first, second = (0.0, NAN) if not at_first else (NAN, 0.0)
    level = ExitLevel(ExitHead(None, lambda *_: 0.0 if of_logits else first), 0.5, lambda *_: second, 0.5)
    if of_logits:
        level = ExitLevel(ExitHead(None, lambda *_: 0.0), 0.5, lambda *_: 0.0, 0.5)
    levels = ExitLevels({1: level, 3: level}, (1, 3))
    how = Drafting(BOUNDARY, 4, FixedGate(0.0), ExitHead(), None, notices.append, levels=levels)
    tokens = generated(Spoilt(successor, successor), how, params={"max_new_tokens": 5})
    assert [token.token_id for token in tokens] == [6, 7, 8, 9, 10]
    what = "logits" if of_logits else "confidences"
    assert notices == [f"exits' {what} are not finite; these tokens pass every layer one by one, as in mode full."]
    assert BOUNDARY not in depths


# What is remembered.


def of_exits(*exits: int) -> list[int]:
    """Active levels of a text with these exits, of a model of 32 layers with every level, of which 10 is scheduled."""
    active = many_levels()
    for depth in exits:
        active.exited(0, depth)
    return active.of(0)


def many_levels() -> ActiveLevels:
    level = ExitLevel(ExitHead(), 0.5, lambda *_: 0.0)
    return ActiveLevels(ExitLevels(dict.fromkeys(range(1, 30), level), (10,)), 32)


def test_levels_are_active_near_the_last_five_exits() -> None:
    assert of_exits() == [10]
    assert of_exits(20) == [10, 18, 19, 20, 21, 22]
    assert of_exits(20, 4, 4, 4, 4) == [2, 3, 4, 5, 6, 10, 18, 19, 20, 21, 22]
    assert of_exits(20, 4, 4, 4, 4, 4) == [2, 3, 4, 5, 6, 10]


@given(st.lists(st.integers(1, 32), max_size=12), st.lists(st.integers(1, 29), max_size=6), st.data())
def test_exits_of_rejected_drafts_leave_no_trace(before: list[int], drafts: list[int], data: st.DataObject) -> None:
    active = many_levels()
    for depth in [*before, *drafts]:
        active.exited(0, depth)
    n_accepted = data.draw(st.integers(0, len(drafts)))
    active.settle(0, len(drafts), n_accepted, n_accepted + 1)
    assert active.of(0) == of_exits(*before, *drafts[:n_accepted], 32)


def test_texts_do_not_share_their_exits_and_end_with_them() -> None:
    active = many_levels()
    active.exited(1, 20)
    assert active.of(0) == [10] and len(active.of(1)) == 6
    active.close(1)
    assert active.of(1) == [10]


@pytest.mark.parametrize("name", ["run", "lm_head", "sliced"])
def test_an_interruption_on_the_way_leaves_what_was_said_to_go_on_from(name: str) -> None:
    """Rows of a round lie at different depths then; whoever goes on cuts the cache to what was said."""
    depth: Depth = {3: 1, 4: 3, 5: 1, 6: 3, 7: 4, 8: 1}.get  # type: ignore[assignment]
    n_interrupted = 0
    for at in range(1, 40):
        model = ScriptedModel(successor, wrong_at(6))
        sequence, said = model.cache.open_new(), list(PROMPT)
        arguments: Any = (SamplingParams(9), Ending(frozenset(), 200), str, lambda: 0.0)
        called, calls = getattr(model, name), iter(range(1, 10**6))

        def interrupted(*given: Any, called: Any = called, calls: Any = calls, at: int = at) -> Any:
            if next(calls) == at:
                raise KeyboardInterrupt
            return called(*given)

        setattr(model, name, interrupted)
        try:
            for token in generate_exact_from(model, sequence, said[:], *arguments, drafting_with(depth, (1, 3, 4))):  # type: ignore[arg-type]
                said.append(token.token_id)
        except KeyboardInterrupt:
            n_interrupted += 1
            known = min(model.cache.length(sequence), len(said) - 1)
            model.cache.truncate(sequence, known)
            for token in generate_exact_from(model, sequence, said[:], *arguments, drafting_with(depth, (1, 3, 4))):  # type: ignore[arg-type]
                said.append(token.token_id)
        assert said == list(range(3, 3 + len(said))) and len(said) >= 12
        assert {model.cache.length_at(sequence, layer) for layer in range(N_LAYERS)} == {len(said) - 1}
    assert n_interrupted >= 3
