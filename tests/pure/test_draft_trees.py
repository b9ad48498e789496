"""Branches beside a draft sequence: whatever they hold, the text is full mode's, and each right one brings a token."""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.statistics import BRANCH, DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule
from tests.draft_sources import ScriptedSource, following
from tests.scripted_model import HIDDEN, N_LAYERS, PROMPT, VOCABULARY, Next, ScriptedModel, decoding, successor

N_TOKENS, WRONG = 60, 17
Others = Callable[[Sequence[int], int], Sequence[int]]


def right(token_ids: Sequence[int], token_id: int) -> list[int]:
    return [successor(token_ids[-1], 0)]


def wrong(token_ids: Sequence[int], token_id: int) -> list[int]:
    return [(token_ids[-1] + WRONG) % VOCABULARY]


def twice(token_ids: Sequence[int], token_id: int) -> list[int]:
    return [token_id, successor(token_ids[-1], 0), token_id, successor(token_ids[-1], 0)]


def always_wrong(token_id: int, position: int) -> int:
    return (token_id + 7) % VOCABULARY


def often_wrong(token_id: int, position: int) -> int:
    return (token_id + (7 if position % 3 == 0 else 1)) % VOCABULARY


def drafting(drafts: Next, others: Others, tree_tokens: int, draft_length: int = 6, rule: Any = None) -> Drafting:
    source = ScriptedSource(following(drafts), HIDDEN, others=others)
    rule = rule or FixedThreshold(0.0)
    return Drafting(0, draft_length, rule, None, (source,), tree_tokens=tree_tokens)


def run(how: Drafting, n_tokens: int = N_TOKENS, prompts: Any = None, **params: Any) -> tuple[Any, Any]:
    """Statistics, and the model that was asked; the text is full mode's."""
    model, counts, prompts = ScriptedModel(successor, successor), DraftCounts(), prompts or [PROMPT]
    found = list(decoding(model, how, prompts, n_tokens, counts, **params))
    expected = list(decoding(ScriptedModel(successor, successor), None, prompts, n_tokens, **params))
    assert sorted(found, key=lambda token: token.sequence) == sorted(expected, key=lambda token: token.sequence)
    assert model.cache.sequences == ()
    return counts.statistics(N_LAYERS, 0), model


TREES = [*product((successor, often_wrong, always_wrong), (right, wrong, twice), (2, 7, 32))]


@pytest.mark.parametrize(("drafts", "others", "tree_tokens"), TREES)
@pytest.mark.parametrize("ending", [{}, {"eos": frozenset({20})}, {"context_tokens": 37}, {"stop": ("19,2",)}])
def test_trees_change_no_token(drafts: Next, others: Others, tree_tokens: int, ending: dict[str, Any]) -> None:
    """All right, all wrong, the same tokens twice; ends of text, context and stop strings inside."""
    _, model = run(drafting(drafts, others, tree_tokens), **ending)
    assert max(len(one.batch) for one in model.verifications) <= tree_tokens + 6


def test_several_texts_share_passes() -> None:
    _, model = run(drafting(often_wrong, right, 32), prompts=[PROMPT, [9, 2], [1]])
    assert any(len(set(one.batch.sequences)) == 3 and one.batch.is_tree for one in model.verifications)


def test_a_right_branch_brings_a_token_and_is_verified_once_more() -> None:
    """Every step's first draft is wrong: two tokens a step with branches, one without. What was on a branch is in the
    next step's pass again, as its keys and values were overwritten by those of the sequence."""
    chain, _ = run(drafting(always_wrong, right, 0))
    tree, model = run(drafting(always_wrong, right, 32))
    assert chain.tokens_per_pass == pytest.approx(1, abs=0.05) and tree.tokens_per_pass == pytest.approx(2, abs=0.1)
    branches = next(each for each in tree.origins if each.origin == BRANCH)
    assert branches.n_accepted == pytest.approx(tree.n_passes, abs=2) and branches.n_accepted < branches.n_drafted
    first, second = (one.batch for one in model.verifications[:2])
    assert second.positions[0] == first.positions[0] + 1  # not 2
    assert tree.n_verified == sum(len(one.batch) for one in model.verifications)


def test_the_likeliest_path_is_last_so_that_it_stays() -> None:
    _, model = run(drafting(successor, wrong, 32), 20)
    for one in model.verifications:
        assert one.batch.positions[-1] == max(one.batch.positions)
        assert one.batch.token_ids[-1] == one.batch.positions[-1] - len(PROMPT) + 6
    assert [one.batch.positions[0] for one in model.verifications] == list(range(3, 22, 6))[: len(model.verifications)]


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_change_no_token(seed: int) -> None:
    draw = random.Random(seed)

    def others(token_ids: Sequence[int], token_id: int) -> list[int]:
        known = [successor(token_ids[-1], 0), token_id, draw.randrange(VOCABULARY), VOCABULARY + 5]
        return draw.choices(known, k=draw.randrange(5))

    for _ in range(25):
        source = ScriptedSource(following(lambda token, at: draw.choice((successor, always_wrong))(token, at)), HIDDEN,
                                draw.random, others=others)  # fmt: skip
        rule = draw.choice([FixedThreshold(0.0), MarginalRule(0.0, lambda m: 1 + 0.02 * m, 0.01)])
        sources = draw.choice([(source,), (NgramSource(), source)])
        run(Drafting(0, draw.randint(2, 9), rule, None, sources, tree_tokens=draw.randint(0, 32)), draw.randint(1, 50),
            context_tokens=draw.randint(10, 200), stop_token_ids=(draw.randrange(VOCABULARY),))  # fmt: skip


def test_n_grams_that_contradict_the_sequence_become_a_branch() -> None:
    """The text repeats itself every 32 tokens, which the look-up finds out and the other source never does."""
    source = ScriptedSource(following(always_wrong), HIDDEN, lambda: 0.9)
    rule = MarginalRule(0.0, lambda m: 1 + 0.001 * m)
    found = {}
    for tree_tokens in (0, 32):
        how = Drafting(0, 6, rule, None, (_Unsure(), source), tree_tokens=tree_tokens)
        found[tree_tokens] = run(how, 120)[0]
    assert found[32].n_passes < 0.6 * found[0].n_passes


class _Unsure(ScriptedSource):
    """A free source that is always right, though not sure enough to begin a step."""

    def __init__(self) -> None:
        super().__init__(following(successor), HIDDEN, lambda: 0.05, is_free=True)


def test_branches_cost_what_they_are_worth() -> None:
    """Where a row takes half a token's time, an unlikely second choice is none; where it takes none, it is one."""
    for row_s, are_there in ((0.5, False), (0.001, True)):
        source = ScriptedSource(following(often_wrong), HIDDEN, lambda: 0.5, others=right)
        rule = MarginalRule(0.0, lambda m, row_s=row_s: 1 + row_s * m)  # type: ignore[misc]
        statistics, _ = run(Drafting(0, 6, rule, None, (source,), tree_tokens=16))
        assert any(each.origin == BRANCH and each.n_drafted > 5 for each in statistics.origins) == are_there


def test_a_wrong_verification_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with keys and values taken for kept that were overwritten, the text's tokens are not all in the cache
    as they were; the scripted model, which reads no cache, is told other positions."""
    monkeypatch.setattr("hetero_ee.speculation.drafts.DraftStep.n_kept", lambda self, path: len(path))
    _, model = run(drafting(always_wrong, right, 32))
    first, second = (one.batch for one in model.verifications[:2])
    assert second.positions[0] == first.positions[0] + 2


@pytest.mark.parametrize("tree_tokens", [-1, 33])
def test_trees_have_a_size(tree_tokens: int) -> None:
    with pytest.raises(UsageError, match="expected 0 to 32"):
        drafting(successor, right, tree_tokens)
