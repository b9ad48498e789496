"""Draft sequences: whose drafts make a step's, how far they go, and what several sources bring together."""

import random
from collections.abc import Generator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from hetero_ee.decoding.requests import Ending, Request
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.pending import PendingToken
from hetero_ee.speculation.sequence_drafter import SequenceDrafter
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.sources.source import Choose, Draft
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule, StopRule
from tests.draft_sources import ScriptedSource
from tests.scripted_model import HIDDEN, N_LAYERS, VOCABULARY, Next, ScriptedModel, decoding, numbers

TEXT, END, DRAFT_S, N_TOKENS = [1, 2, 3, 4, 1, 2], 9, 0.2, 150
DRAWN = random.Random(4).choices(range(VOCABULARY), k=200)
FREE, COMPUTED = "free", "computed"


class Said(ScriptedSource):
    """Drafts these tokens, of these chances."""

    def __init__(self, name: str, drafts: dict[int, float]) -> None:
        super().__init__(lambda _: list(drafts), HIDDEN, is_free=name == FREE, draft_s=0.0 if name == FREE else DRAFT_S)
        self.name, self._chances = name, list(drafts.values())
        self.observed[0] = TEXT[:-1]

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        for draft, chance in zip(super().drafts(sequence, token_ids, choose), self._chances, strict=True):
            yield Draft(draft.token_id, chance)


def marginal() -> MarginalRule:
    """Full mode's token takes a second, another one in its pass 0.05."""
    return MarginalRule(0.0, lambda m: 1 + 0.05 * (m - 1))


def drafted(rule: StopRule, *sources: Said, max_drafts: int = 4) -> DraftStep:
    params = SamplingParams(20, stop_token_ids=(END,))
    text = Request.of_prompt(0, TEXT, params, Ending(frozenset(), 200), numbers, kv_sequence=0)
    step = DraftStep(text, max_drafts, [PendingToken(TEXT[-1], 0, len(TEXT) - 1)])
    sampler, warnings = DraftSampler(), list[str]()
    model: Any = ScriptedModel(cycle, cycle)
    SequenceDrafter(model, sources, rule, sampler, warnings.append).draft([step])
    assert warnings == [] and all(source.observed == {0: TEXT[:-1]} for source in sources)
    assert [token.position for token in step.tokens] == list(range(len(TEXT) - 1, len(TEXT) + len(step.origins)))
    return step


SURE, UNSURE = 0.995, 0.02


@pytest.mark.parametrize(
    ("free", "computed", "expected"),
    [
        ({3: SURE, 4: SURE, 1: SURE, 2: SURE}, {3: SURE, 7: SURE}, [3, 4, 1, 2]),  # free ones save more: none computed
        ({3: SURE, 4: SURE, 1: SURE, 5: UNSURE}, {7: SURE}, [3, 4, 1]),
        ({3: UNSURE}, {3: SURE, 7: SURE, 8: SURE, 10: SURE}, [3, 7, 8, 10]),
        ({3: UNSURE}, {3: SURE, 7: UNSURE, 8: SURE}, [3, 7]),  # what comes after an unsure one does not pay
        ({}, {3: UNSURE, 7: SURE}, [3]),  # the first is computed in any case
        ({5: 0.3, 6: UNSURE}, {3: SURE}, [3, 5]),  # free ones follow while they are worth their token
        ({5: UNSURE}, {}, []),
        ({3: 0.2, 4: 0.9}, {}, [3, 4]),
        ({}, {}, []),
    ],
)
def test_whose_drafts_make_the_sequence(
    free: dict[int, float], computed: dict[int, float], expected: list[int]
) -> None:
    sources = Said(FREE, free), Said(COMPUTED, computed)
    step = drafted(marginal(), *sources)
    assert [token.token_id for token in step.tokens[1:]] == expected
    n_computed = sources[1].n_drafts
    assert step.origins == [COMPUTED] * n_computed + [FREE] * (len(expected) - n_computed)
    assert [judged for [judged] in step.judged.values()] == list(computed.items())[
        :n_computed
    ]  # free ones are no rule's to learn from


def test_the_rule_is_told_what_computed_drafts_took() -> None:
    rule = marginal()
    before_s = rule.seconds_per_token * 32
    drafted(rule, Said(FREE, {}), Said(COMPUTED, {3: SURE, 7: SURE}))
    assert rule.seconds_per_token * 32 == pytest.approx(before_s + 2 * DRAFT_S)


@pytest.mark.parametrize("rule", [marginal(), FixedThreshold(0.0)])
@pytest.mark.parametrize("names", [(FREE, FREE), (FREE, COMPUTED), (COMPUTED, FREE), (COMPUTED, COMPUTED)])
def test_no_draft_of_any_source_follows_an_end_token(rule: Any, names: tuple[str, str]) -> None:
    chance = SURE if names[0] == FREE else UNSURE  # of what the other would begin with
    step = drafted(rule, Said(names[0], {3: SURE, END: SURE, 4: SURE}), Said(names[1], {8: chance}), Said(COMPUTED, {}))
    expected = [8, 3] if names == (FREE, COMPUTED) and isinstance(rule, FixedThreshold) else [3]
    assert [token.token_id for token in step.tokens[1:]] == expected  # without a rule, computed ones come first


@pytest.mark.parametrize("max_drafts", [0, 1, 3])
def test_without_costs_there_is_as_much_as_there_is_room_for(max_drafts: int) -> None:
    sources = Said(FREE, dict.fromkeys((5, 6, 7), UNSURE)), Said(COMPUTED, {3: UNSURE})
    step = drafted(FixedThreshold(0.0), *sources, max_drafts=max_drafts)
    assert [token.token_id for token in step.tokens[1:]] == [3, 5, 6][:max_drafts]
    assert sources[1].n_drafts == min(1, max_drafts)


# Whole texts.


def cycle(token: int, position: int) -> int:
    return (token + 1) % 7


def no_repetition(token: int, position: int) -> int:
    """Whatever comes, as drawn beforehand."""
    return DRAWN[position]


class Knowing(ScriptedSource):
    """Computes drafts of which every sixth is wrong."""

    name = COMPUTED

    def __init__(self, truth: Next) -> None:
        super().__init__(lambda _: [], HIDDEN, lambda: 0.97, draft_s=DRAFT_S)
        self._truth = truth

    def _drafted(self, token_ids: Sequence[int], choose: Choose) -> Generator[int]:
        history = list(token_ids)
        while True:
            position = len(history) - 1
            history.append(self._truth(history[-1], position) ^ (position % 6 == 5))
            yield history[-1]


def statistics_of(truth: Next, *, with_ngrams: bool) -> dict[str, tuple[int, int]]:
    """By origin, drafts made and drafts right, of a text that is full mode's."""
    counts, computed = DraftCounts(), Knowing(truth)
    sources = (NgramSource(), computed) if with_ngrams else (computed,)
    how, model = Drafting(0, 8, marginal(), None, sources), ScriptedModel(truth, truth)
    found = list(decoding(model, how, [[3, 4, 5]], N_TOKENS, counts))
    assert found == list(decoding(model, None, [[3, 4, 5]], N_TOKENS))
    statistics = counts.statistics(N_LAYERS, 0)
    return {"passes": (counts.n_passes, 0)} | {
        each.origin: (each.n_drafted, each.n_accepted) for each in statistics.origins
    }


def test_a_text_that_repeats_itself_is_drafted_from_ngrams() -> None:
    found, without = (statistics_of(cycle, with_ngrams=with_ngrams) for with_ngrams in (True, False))
    n_drafted, n_right = found[NgramSource.name]
    assert n_right > 0.95 * n_drafted and n_drafted > 5 * found[COMPUTED][0]
    assert NgramSource.name not in without and found["passes"][0] < 0.8 * without["passes"][0]


def test_where_nothing_repeats_it_is_computed_as_without_them() -> None:
    found, without = (statistics_of(no_repetition, with_ngrams=with_ngrams) for with_ngrams in (True, False))
    assert found[COMPUTED] == pytest.approx(without[COMPUTED], rel=0.1)
    assert found[COMPUTED][1] > 5 * found.get(NgramSource.name, (0, 0))[1]
    assert found["passes"][0] <= without["passes"][0] + 2


class Counting:
    """A grammar of the numbers from here on, up to the last: one alone may follow each, but for where there are two."""

    def __init__(self, numbers: Sequence[Sequence[int]]) -> None:
        self._numbers = numbers

    def allowed(self, generated: Sequence[int]) -> Any:
        assert all(each in self._numbers[n] for n, each in enumerate(generated)), "only what may follow is asked about"
        mask = np.zeros(VOCABULARY, np.bool_)
        mask[list(self._numbers[len(generated)])] = True
        return mask

    def forced(self, generated: Sequence[int]) -> list[int]:
        return [each[0] for each in takewhile(lambda each: len(each) == 1, self._numbers[len(generated) :])]

    def is_complete(self, generated: Sequence[int]) -> bool:
        return len(generated) == len(self._numbers)


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([5, 6], [3, 4, 5, 8, 7]),  # the source begins again after what is forced, and says nothing that may follow
        ([1, 2], [3, 4]),  # no draft is one that may not follow
        ([5, VOCABULARY], [3, 4, 5, 8, 7]),  # nor one that the model does not have
    ],
)
def test_forced_drafts_come_between_and_no_other_is_illegal(drafts: list[int], expected: list[int]) -> None:
    grammar: Any = Counting([[3], [4], [5, 6], [8], [7]])
    text = Request.of_prompt(0, TEXT, SamplingParams(20), Ending(frozenset(), 200, None, lambda _: grammar), numbers, 0)
    step = DraftStep(text, 8, [PendingToken(TEXT[-1], 0, len(TEXT) - 1)])
    step.add_forced()
    model: Any = ScriptedModel(cycle, cycle)
    source = Said(FREE, dict.fromkeys(drafts, SURE))
    SequenceDrafter(model, [source], FixedThreshold(0.0), DraftSampler(), lambda _: None).draft([step])
    assert [token.token_id for token in step.tokens[1:]] == expected
    assert not step.has_room or expected == [3, 4]  # nothing follows the grammar's end
    assert set(step.origins) == ({"grammar"} if expected == [3, 4] else {"grammar", source.name})
