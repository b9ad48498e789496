"""Draft trees in mode specee: the full text if nothing exits, exact keys and values if all does, and what is judged."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero_ee
from hetero_ee import Engine
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Continuation, Ending
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.speculation import tree_exits
from hetero_ee.speculation.early_exit import EarlyExits
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.statistics import ExitCounts, ExitStatistics
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule
from hetero_ee.speculation.tree_exits import TreeExitMode
from hetero_ee_profiles.reference import reference_profile
from tests.drafted_generation import generate_early
from tests.emulation import LAPTOP
from tests.kv_contents import read_back

DEMO = Path(hetero_ee.__file__).parent / "assets" / "demo"
PROMPT, N_NEW, MAX_PENDING = "Once upon a time, there was a little dog", 32, 11
NEVER, ALWAYS = 2.0, -1.0


@pytest.fixture
def engine(converted_demo: None) -> Iterator[Engine]:
    limits = Limits(mode="specee", gpu_layers=0, draft_tree=4, draft_length=MAX_PENDING + 1)
    with Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), limits=limits) as engine:
        yield engine


def exits_with(engine: Engine, threshold: float | None) -> EarlyExits:
    calibration = engine.calibrations.find_or_warn(pytest.fail)  # type: ignore[union-attr]
    assert calibration is not None and engine.plan is not None
    head = open_draft_head(DEMO / "draft_head", engine.executor)
    candidates = DraftCandidates(head, pytest.fail)
    policy = SpecEE.of(calibration, candidates, compiled=True)
    if threshold is not None:
        policy.heads = {at: replace(each, later_threshold=threshold) for at, each in policy.heads.items()}
    return EarlyExits(policy, MAX_PENDING, candidates, tree_width=4, rule=FixedThreshold(0.0))


def run(
    engine: Engine, threshold: float | None, sequence: int, changes: dict[str, Any] | None = None, **sampling: Any
) -> tuple[list[int], ExitStatistics]:
    counts, executor = ExitCounts(), engine.executor
    exits = replace(exits_with(engine, threshold), **(changes or {}))
    params = SamplingParams(N_NEW, **sampling)
    common = params, Ending(engine._eos_token_ids, 512), engine._tokenizer.decode, lambda: 0.0
    prompt = Continuation(sequence, engine._prompt_ids(PROMPT))
    mode = TreeExitMode(executor, exits, counts, lambda: 0.0)
    tokens = [token.token_id for token in generate(executor, prompt, *common, mode)]
    mode.close(sequence)
    return tokens, counts.statistics(engine.spec.n_layers)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "sampled"])
def test_a_tree_that_never_exits_gives_the_full_text(engine: Engine, sampling: dict[str, Any]) -> None:
    executor, sequence = engine.executor, engine.executor.cache.open_new()
    tokens, found = run(engine, NEVER, sequence, **sampling)
    executor.cache.close(sequence)
    params = SamplingParams(N_NEW, **sampling)
    ending = Ending(engine._eos_token_ids, 512)
    full = generate(executor, [engine._prompt_ids(PROMPT)], params, ending, engine._tokenizer.decode, lambda: 0.0)
    assert tokens == [token.token_id for token in full]
    assert found.n_exited == 0 and found.judged_per_token > 0
    assert sum(found.reached) < len(tokens) - 1  # a pass gives several tokens


def test_tokens_before_one_that_is_not_finite_are_emitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, sequence = engine.executor, engine.executor.cache.open_new()
    expected, _ = run(engine, NEVER, sequence)
    executor.cache.close(sequence)
    to_logits = executor.to_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = to_logits(hidden).clone()
        logits[1:] = torch.nan  # of drafts
        return logits

    monkeypatch.setattr(executor, "to_logits", broken)
    sequence = executor.cache.open_new()
    assert run(engine, NEVER, sequence)[0] == expected
    executor.cache.close(sequence)


def test_keys_and_values_are_exact_when_paths_exit(engine: Engine) -> None:
    executor, sequence = engine.executor, engine.executor.cache.open_new()
    tokens, found = run(engine, ALWAYS, sequence)
    assert found.n_exited > 0 and found.mean_depth < engine.spec.n_layers
    ids, n_held = [*engine._prompt_ids(PROMPT), *tokens], executor.cache.length(sequence)
    plain = executor.cache.open_new()
    executor.hidden(Batch.of_sequence(plain, 0, ids[:n_held]))
    for layer in range(engine.spec.n_layers):
        pairs = zip(*(read_back(executor.cache, layer, each, 0, n_held) for each in (sequence, plain)), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    executor.cache.close(sequence)
    executor.cache.close(plain)


def test_each_path_is_judged_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, judge = list[tuple[int, int]](), tree_exits.path_confidences

    def counted(*arguments: Any) -> Any:
        found = judge(*arguments)
        assert len(found) == len(arguments[-1]) and len({tuple(path) for path in arguments[-1]}) == len(found)
        seen.append((len(arguments[3]), len(found)))  # nodes and paths
        return found

    monkeypatch.setattr(tree_exits, "path_confidences", counted)
    sequence = engine.executor.cache.open_new()
    _, found = run(engine, NEVER, sequence)
    engine.executor.cache.close(sequence)
    assert sum(found.judged) == sum(n_paths for _, n_paths in seen) > 0
    assert max(n_paths for _, n_paths in seen) > 1


@pytest.mark.parametrize("threshold", [NEVER, ALWAYS])
def test_trees_teach_the_stop_rule(engine: Engine, threshold: float) -> None:
    rule, sequence = MarginalRule(0.0, lambda m: 1 + 0.1 * m), engine.executor.cache.open_new()
    before = rule.mean_chance, rule.seconds_per_token
    run(engine, threshold, sequence, {"rule": rule})
    engine.executor.cache.close(sequence)
    assert rule.mean_chance != before[0] and rule.seconds_per_token != before[1]


def test_an_exit_also_teaches_the_first_token_that_disagrees(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rule would learn only from drafts that were right."""
    learned, exits, exited = list[int | None](), list[tuple[int, list[int | None]]](), TreeExitMode._exited

    def noted(mode: TreeExitMode, tree: Any, index: int, token_id: int) -> None:
        learned.append(tree.child(index, token_id))

    def noting(*arguments: Any) -> Any:
        n_before, tokens = len(learned), exited(*arguments)
        exits.append((len(tokens), learned[n_before:]))
        return tokens

    monkeypatch.setattr(TreeExitMode, "_learn", noted)
    monkeypatch.setattr(TreeExitMode, "_exited", noting)
    sequence = engine.executor.cache.open_new()
    run(engine, ALWAYS, sequence)
    engine.executor.cache.close(sequence)
    disagreed = [n_tokens for n_tokens, children in exits if None in children]
    assert disagreed and all(len(children) in (0, n_tokens, n_tokens + 1) for n_tokens, children in exits)


def test_a_switch_turns_trees_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_exits, "path_confidences", lambda *arguments: pytest.fail("a tree was judged"))
    switch, sequence = SpeculationSwitch(drafts=False, _left=N_NEW), engine.executor.cache.open_new()
    run(engine, NEVER, sequence, {"switch": switch})
    engine.executor.cache.close(sequence)
    assert not switch.drafts


def test_a_token_that_the_whole_head_refuses_is_judged_no_more(engine: Engine) -> None:
    sequence = engine.executor.cache.open_new()
    exits = exits_with(engine, None)
    exits.policy.heads = {at: replace(each, later_threshold=ALWAYS) for at, each in exits.policy.heads.items()}  # type: ignore[attr-defined]
    counts, params = ExitCounts(), SamplingParams(N_NEW)
    prompt = Continuation(sequence, engine._prompt_ids(PROMPT))
    ending = Ending(engine._eos_token_ids, 512)
    list(generate_early(engine.executor, prompt, params, ending, engine._tokenizer.decode, lambda: 0.0, exits, counts))
    found = counts.statistics(engine.spec.n_layers)
    judged = sum(found.judged[at] for at, head in exits.policy.heads.items() if head.later is not None)  # type: ignore[attr-defined]
    assert 0 < found.n_exited < judged <= found.n_tokens
    exits.close(sequence)
    engine.executor.cache.close(sequence)


def test_the_engine_uses_trees_on_request(engine: Engine) -> None:
    text = engine.generate(PROMPT, max_new_tokens=N_NEW)
    found = engine.exit_statistics
    assert found is not None and found.n_tokens == text.n_generated_tokens - 1
    assert engine.plan is not None and engine.plan.tree_width == 4
