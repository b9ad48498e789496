"""Trees of drafts: exact mode says what full mode says, and the KV cache holds what it holds after a plain run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Continuation, Ending
from hetero_ee.planning.limits import Limits
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold, StopRule
from hetero_ee_profiles.reference import reference_profile
from tests.draft_sources import ScriptedTree
from tests.drafted_generation import generate_exact
from tests.e2e.test_trained_models import OPENINGS
from tests.emulation import LAPTOP
from tests.exact_cases import Run, check_identity, several
from tests.kv_contents import read_back

N_TOKENS, N_CASES, N_SLOW_CASES = 24, 10, 500
Several = Callable[[Sequence[int]], Sequence[int]]


@pytest.fixture(scope="module", params=["fp16", pytest.param("int8", marks=pytest.mark.slow)])
def engine(demo: Path, kernels: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    limits = Limits(gpu_layers=0, mode="full", kv_type=request.param)
    profile = reference_profile(LAPTOP)
    with Engine.from_pretrained(demo, quantizer="codebook", threads=1, profile=profile, limits=limits) as engine:
        yield engine


def run_of(engine: Engine, n_prompts: int = 1, **sampling: Any) -> Run:
    prompts = [engine._tokenizer.encode(text) for text in OPENINGS[:n_prompts]]
    return Run(
        engine, prompts, SamplingParams(N_TOKENS, **sampling), Ending(engine._eos_token_ids, engine.context_tokens)
    )


def texts_of(run: Run) -> list[list[int]]:
    return [
        prompt + [token.token_id for token in tokens] for prompt, tokens in zip(run.prompts, run.full(), strict=True)
    ]


def drafting_with(*sources: DraftSource, rule: StopRule | None = None, width: int = 4, length: int = 16) -> Drafting:
    return Drafting(0, length, rule or FixedThreshold(0.0), None, sources, tree_width=width)


def checked(run: Run, several: Several, **options: Any) -> DraftCounts:
    """Run the case with a tree that is scripted, and return its counts."""
    counts, source = DraftCounts(), ScriptedTree(several, run.engine.spec.hidden_size)
    check_identity(run.full(), run.exact(drafting_with(source, **options), counts=counts))
    return counts


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0], ids=["all wrong", "mixed", "one of each right"])
def test_adversarial_trees(engine: Engine, right: float) -> None:
    run = run_of(engine, 2)
    counts = checked(run, several(texts_of(run), 1, right))
    found = counts.statistics(engine.spec.n_layers, 0)
    assert found.n_drafted > 8 * found.n_steps  # trees, not chains
    assert (found.n_accepted > 0) == (right > 0)


def test_only_duplicates(engine: Engine) -> None:
    checked(run_of(engine), lambda history: [history[-1]] * 3)


@pytest.mark.parametrize("n_left", [1, 2, 5, 17])
def test_the_context_ends_inside_a_tree(engine: Engine, n_left: int) -> None:
    run = run_of(engine)
    run = replace(run, ending=replace(run.ending, context_tokens=len(run.prompts[0]) + n_left))
    assert run.full()[0][-1].finish_reason is not None
    checked(run, several(texts_of(run), 2, 0.8))


def test_the_text_ends_inside_a_tree(engine: Engine) -> None:
    run, texts = run_of(engine), texts_of(run_of(engine))
    for end in texts[0][-N_TOKENS + 3 :: 7]:
        ended = replace(run, ending=replace(run.ending, eos_token_ids=frozenset({end})))
        checked(ended, several(texts, 3, 0.9))


def test_a_stop_string_across_drafts(engine: Engine) -> None:
    run, texts = run_of(engine), texts_of(run_of(engine))
    text = "".join(token.text for token in run.full()[0])
    for start in (5, 20, 33):
        stopped = replace(run, params=run.params.changed(stop=(text[start : start + 7],)))
        checked(stopped, several(texts, 4, 0.9))


def test_the_cache_holds_what_a_plain_run_holds(engine: Engine) -> None:
    """After each step, the path that was accepted has the keys and values of full mode, bit by bit."""
    run, executor, decode = run_of(engine), engine.executor, engine._tokenizer.decode
    texts = texts_of(run)
    contents = []
    for mode in ("full", "tree"):
        sequence, kept = executor.cache.open_new(), list[Any]()
        source = ScriptedTree(several(texts, 5, 0.8), engine.spec.hidden_size)
        common = executor, Continuation(sequence, run.prompts[0]), run.params, run.ending, decode, lambda: 0.0
        tokens = generate(*common) if mode == "full" else generate_exact(*common, drafting_with(source))
        for _ in tokens:
            n = executor.cache.length(sequence)
            kept.append([read_back(executor.cache, layer, sequence, 0, n) for layer in range(engine.spec.n_layers)])
            kept[-1] = [tuple(part.clone() for part in pair) for pair in kept[-1]]
        executor.cache.close(sequence)
        contents.append(kept)
    plain = contents[0][-1]
    for held in contents[1]:
        for mine, theirs in zip(held, plain, strict=True):
            for part, expected in zip(mine, theirs, strict=True):
                assert torch.equal(part, expected[:, : part.shape[1]])
