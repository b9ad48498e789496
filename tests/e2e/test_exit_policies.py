"""The neighbours of SpecEE on the demo model, as the engine opens them: tokens exit, and texts of a batch are alone."""

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_ee import Engine
from hetero_ee.decoding.requests import Ending
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.speculation.early_exit import EarlyExits, score_early
from hetero_ee.speculation.exits_opening import POLICIES, PolicyRequest
from hetero_ee.speculation.statistics import ExitCounts, ExitStatistics
from tests.drafted_generation import generate_early

PROMPTS = ["Once upon a time there was a little boy named Ben.", "Lily and her mom went to the park.", "The dog"]
NEIGHBOURS = [mode for mode in POLICIES if mode not in ("specee", "certified")]
N_NEW = 48
FILTERED = {"temperature": 0.9, "top_k": 20, "repeat_penalty": 1.1, "seed": 7}


@pytest.fixture(scope="module")
def engine(demo: Any) -> Iterator[Engine]:
    with Engine.from_pretrained(threads=1, profile="off") as engine:
        yield engine


def exits_of(engine: Engine, mode: str) -> EarlyExits:
    assert engine.calibrations is not None
    calibration = engine.calibrations.find()
    assert calibration is not None
    plan: Any = type("Plan", (), {"exit_layers": ()})
    return EarlyExits(POLICIES[mode](PolicyRequest(calibration, plan, compiled=True)), 16)


def texts_of(engine: Engine, mode: str, prompts: list[str], **sampling: Any) -> tuple[list[list[int]], ExitStatistics]:
    counts, params = ExitCounts(), SamplingParams(N_NEW, ignore_eos=True).changed(**sampling)
    ending, ids = Ending(frozenset(), engine.context_tokens), [engine._tokenizer.encode(prompt) for prompt in prompts]
    exits = exits_of(engine, mode)
    found: list[GeneratedToken] = [
        *generate_early(engine.executor, ids, params, ending, lambda ids: "", lambda: 0.0, exits, counts)
    ]
    texts = [[token.token_id for token in found if token.sequence == number] for number in range(len(prompts))]
    return texts, counts.statistics(engine.spec.n_layers)


@pytest.mark.parametrize("mode", NEIGHBOURS)
def test_tokens_exit_and_texts_of_a_batch_are_what_they_are_alone(engine: Engine, mode: str) -> None:
    together, statistics = texts_of(engine, mode, PROMPTS)
    assert statistics.n_tokens == len(PROMPTS) * (N_NEW - 1)
    assert statistics.n_exited > 0.1 * statistics.n_tokens
    assert statistics.mean_depth < engine.spec.n_layers - 0.5
    assert texts_of(engine, mode, PROMPTS[:1])[0] == together[:1]


@pytest.mark.parametrize("mode", ["calm", "skipdecode"])
def test_a_text_is_scored_as_it_was_made(engine: Engine, mode: str) -> None:
    """Where exits go by how far a text is."""
    [text], statistics = texts_of(engine, mode, PROMPTS[:1])
    ids = engine._tokenizer.encode(PROMPTS[0])
    scored = [*score_early(engine.executor, [*ids, *text], len(ids), exits_of(engine, mode), ExitCounts())]
    assert [int(logits.argmax()) for logits, _ in scored] == text
    depths = [depth for _, depth in scored[1:]]
    assert tuple(map(depths.count, range(engine.spec.n_layers + 1))) == statistics.depths


@pytest.mark.parametrize("mode", NEIGHBOURS)
@pytest.mark.sample(1)
def test_sampled_texts_come_again(engine: Engine, mode: str) -> None:
    ours, theirs = (texts_of(engine, mode, PROMPTS, **FILTERED) for _ in range(2))
    assert ours == theirs
    assert ours[1].n_exited > 0
    assert ours[0] != texts_of(engine, mode, PROMPTS)[0]
