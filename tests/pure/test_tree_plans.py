"""Trees of drafts in plans: chosen where a verified row is nearly free, and compared with chains in a sentence."""

from dataclasses import replace
from typing import Any

import pytest

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.reports.pins import pins
from hetero_ee.planning.reports.reasons import NO_TREES
from hetero_ee.planning.statistics import DraftRates, ExitRates, ExitStatistics, Statistics
from hetero_ee.planning.times.prediction import predicted_step
from hetero_ee.planning.times.steps import tree_step
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts
from hetero_ee_profiles.reference import reference_profile

SPEC, PROFILE = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
STREAMED, ON_CPU = (("layers.*", "stream"),), (("layers.*|head", "cpu"),)
HEAD = DraftRates("a head", (0.7, 0.66, 0.63), 0.004, others=(0.4, 0.2, 0.1), placed_level_s=lambda *_: 0.006)


def planned(overrides: Any = (), drafts: DraftRates = HEAD, **limits: Any) -> Plan:
    return plan(SPEC, PROFILE, Limits(overrides=overrides, context_tokens=1024, **limits), Statistics(drafts=drafts))


def test_streamed_layers_get_a_tree_and_the_cpu_a_chain() -> None:
    tree, chain = planned(STREAMED), planned(ON_CPU)
    assert (tree.tree_width, tree.draft_length, chain.tree_width) == (4, 16, 1)
    assert "as a chain of" in " ".join(tree.reasons) and "as a tree of" in " ".join(chain.reasons)
    assert (
        tree.prediction.generated_tokens_per_s > 1.1 * planned(STREAMED, draft_tree=1).prediction.generated_tokens_per_s
    )
    assert ("--draft-tree", "4") in pins(tree, Limits()) and "--draft-tree" not in dict(pins(chain, Limits()))
    assert tree.sha256 != replace(tree, tree_width=3).sha256


def test_a_source_without_trees_and_a_request_for_chains_get_chains() -> None:
    assert planned(STREAMED, replace(HEAD, others=())).tree_width == 1
    refused = planned(STREAMED, replace(HEAD, others=()), draft_tree=4, mode="exact")
    assert refused.tree_width == 1 and NO_TREES in refused.reasons
    assert planned(STREAMED, draft_tree=1).tree_width == 1
    assert NO_TREES not in planned(STREAMED, draft_tree=4).reasons + planned(STREAMED, draft_tree=1).reasons


def test_trees_that_are_asked_for_are_used_even_if_exits_draft_sooner() -> None:
    rates = dict.fromkeys(range(1, SPEC.n_layers), ExitRates(0.95, 0.99, 0.9))
    known = Statistics(exits=ExitStatistics("a test", SPEC.n_layers, rates), drafts=HEAD)
    limits = Limits(overrides=ON_CPU, context_tokens=1024, mode="exact")
    assert plan(SPEC, PROFILE, limits, known).drafts == "exit"
    asked = plan(SPEC, PROFILE, replace(limits, draft_tree=4), known)
    assert asked.tree_width == 4 and NO_TREES not in asked.reasons


def test_a_tree_is_predicted_by_its_own_plan() -> None:
    tree = planned(STREAMED, draft_tree=3, draft_length=8)
    step = predicted_step(SPEC, PROFILE, tree, Statistics(drafts=HEAD), tree.prediction.context_tokens)
    assert (tree.tree_width, tree.draft_length) == (3, 8) and step is not None
    assert step.tokens == pytest.approx(tree.prediction.tokens_per_pass)


def test_a_tree_step_counts_the_likeliest_paths() -> None:
    """With 2 drafts after each token: 0.6 and 0.2 at the first level; after the first, 0.36 and 0.12."""
    step = tree_step(4, 2, lambda _: 0.6, (0.5,), lambda m: float(m), lambda m: 10.0 * m)
    assert step.tokens == pytest.approx(1 + 0.6 + 0.36 + 0.2160)
    assert tree_step(3, 2, lambda _: 0.4, (0.5,), lambda _: 1.0, lambda _: 1.0).tokens == pytest.approx(1 + 0.4 + 0.3)
    assert step.seconds == 40 + 1 + 2 + 2


def test_a_head_that_is_right_more_often_has_likelier_alternatives() -> None:
    seconds = []
    for acceptance in (0.3, 0.56, 0.82):
        facts = DraftHeadFacts(replace(SPEC, n_layers=1), SPEC.vocab_size, False, (acceptance,))
        seconds.append(HeadCosts(facts, SPEC, PROFILE, 1).rates("a head").others[0])
    assert seconds == sorted(seconds) and seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
