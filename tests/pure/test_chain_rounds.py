"""Chains of two sources in rounds of exact mode, on a model whose answers are scripted."""

import random
from collections.abc import Sequence

import pytest
from torch import Tensor

from hetero_ee.decoding.full import generate
from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending
from hetero_ee.planning.plan import NGRAM, SEQUENCE
from hetero_ee.speculation.chain_rule import ChainRule
from hetero_ee.speculation.draft_gate import AdaptiveGate
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exact import generate_exact
from hetero_ee.speculation.sources.candidates import ChainJudge, Choose
from hetero_ee.speculation.sources.combined import CombinedSource
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.statistics import DraftCounts
from tests.draft_sources import ScriptedSource
from tests.scripted_model import N_LAYERS, VOCABULARY, Next, ScriptedModel

N_TOKENS, ROW_S, DRAFT_S = 150, 0.05, 0.2
DRAWN = random.Random(4).choices(range(VOCABULARY), k=200)


def cycle(token: int, position: int) -> int:
    return (token + 1) % 7


def no_repetition(token: int, position: int) -> int:
    """Whatever comes, as drawn beforehand."""
    return DRAWN[position]


class Knowing(ScriptedSource):
    """Computes drafts of which every sixth is wrong, as far as its judge wants them."""

    def __init__(self, truth: Next) -> None:
        super().__init__(lambda *_: [], 3)
        self._truth = truth
        self._model = ScriptedModel(truth, truth)

    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        history = list(token_ids)
        while len(history) < len(token_ids) + n_tokens:
            history.append(choose(self._logits(history), history))
            if judge is not None and not judge.goes_on():
                break
        return history[len(token_ids) :]

    def _logits(self, history: Sequence[int]) -> Tensor:
        position = len(history) - 1
        token_id = self._truth(history[-1], position) ^ (position % 6 == 5)
        logits = Tensor([0.0] * VOCABULARY)
        logits[token_id] = 5.0
        return logits


def statistics_of(truth: Next, *, with_ngrams: bool) -> dict[str, tuple[int, int]]:
    """By origin, drafts made and drafts right, of a text that is full mode's."""
    model, counts, source = ScriptedModel(truth, truth), DraftCounts(), Knowing(truth)
    gate = AdaptiveGate(0.0, lambda m: 1 + ROW_S * (m - 1))
    how = Drafting(
        0, 8, gate, source=CombinedSource(NgramSource(), source) if with_ngrams else source,
        chain_rule=ChainRule(gate, DRAFT_S),
    )  # fmt: skip
    common = [[3, 4, 5]], SamplingParams(N_TOKENS), Ending(frozenset(), 200), lambda ids: "." * len(ids), lambda: 0.0
    found = [token.token_id for token in generate_exact(model, *common, how, counts)]  # type: ignore[arg-type]
    assert found == [token.token_id for token in generate(model, *common)]  # type: ignore[arg-type]
    statistics = counts.statistics(N_LAYERS, 0)
    return {"passes": (counts.n_passes, 0)} | {
        each.origin: (each.n_drafted, each.n_accepted) for each in statistics.origins
    }


def test_a_text_that_repeats_itself_is_drafted_from_ngrams() -> None:
    found, without = (statistics_of(cycle, with_ngrams=with_ngrams) for with_ngrams in (True, False))
    assert found[NGRAM][1] > 0.95 * found[NGRAM][0] and found[NGRAM][0] > 5 * found[SEQUENCE][0]
    assert NGRAM not in without and found["passes"][0] < 0.8 * without["passes"][0]


def test_where_nothing_repeats_it_is_computed_as_without_them() -> None:
    found, without = (statistics_of(no_repetition, with_ngrams=with_ngrams) for with_ngrams in (True, False))
    assert found[SEQUENCE] == pytest.approx(without[SEQUENCE], rel=0.1)
    assert found[SEQUENCE][1] > 5 * found.get(NGRAM, (0, 0))[1]
    assert found["passes"][0] <= without["passes"][0] + 2
