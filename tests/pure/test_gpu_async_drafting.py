"""Asynchronous drafting by everything that runs a plan's GPU but the card: nobody waits for the guesses, and they take
nothing from the tokens that wait."""

from typing import Any

import pytest
import torch

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.drafted_generation import generate_exact
from tests.emulation import planned
from tests.executor_support import Model, model_of
from tests.stand_in_cuda import StandInCuda
from tests.stand_in_machine import PLENTY, on_stand_in, stand_in_gpu

CONTEXT_TOKENS = 512
PROMPTS = [[1, 17, 30, 3, 99, 42, 42], [7, 12], [77, 101, 5]]
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "head on the CPU": ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu"), ("head", "cpu")),
    "head on the GPU": ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu"), ("head", "gpu")),
    "two layers": ((r"layers\.[01]\..*", "gpu"), ("layers.*", "cpu"), ("head", "gpu")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))


def opened(model: Model, places: str, driver: StandInCuda | None = None) -> PlannedExecutor:
    plan = planned(model[0], overrides=PLACES[places], context_tokens=CONTEXT_TOKENS)
    return on_stand_in(*model, plan, stand_in_gpu(driver))


@pytest.mark.parametrize("n_tokens", [1, 3, 16])
def test_a_guess_takes_nothing_from_tokens_that_wait(model: Model, n_tokens: int) -> None:
    """Buffers that hidden states cross in are used again, alternately."""
    driver = StandInCuda(PLENTY)
    executor, n_layers = opened(model, "head on the CPU", driver), model[0].n_layers
    assert executor.overlap == Overlap(1, 1)
    sequence = executor.cache.open_new()
    executor.prompt([Batch.of_sequence(sequence, 0, PROMPTS[0])])
    first = len(PROMPTS[0])
    batch = Batch.of_sequence(sequence, first, list(range(2, 2 + n_tokens)))
    guess = Batch.of_sequence(sequence, first + n_tokens, [50])

    def passed(*, is_async: bool) -> tuple[torch.Tensor, torch.Tensor]:
        executor.cache.truncate(sequence, first)
        waiting = executor.on_cpu(executor.run(batch, None, range(1)))
        before, n_logged = waiting.clone(), len(driver.log)
        early = executor.run(guess, None, range(1)) if is_async else None
        last = executor.run(batch, waiting, range(1, n_layers))
        assert torch.equal(waiting, before)
        if early is None:
            return last, executor.run(guess, executor.run(guess, None, range(1)), range(1, n_layers))
        assert not any(entry[:2] == ("host", "waits for") for entry in driver.log[n_logged:])
        return last, executor.run(guess, early, range(1, n_layers))

    for found, expected in zip(passed(is_async=True), passed(is_async=False), strict=True):
        assert torch.equal(found, expected)
    executor.close()


@pytest.mark.parametrize("places", sorted(PLACES))
@pytest.mark.parametrize("exit_layer", [1, 2])
@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.sample(2)
def test_texts_are_those_of_full_mode(model: Model, places: str, exit_layer: int, threshold: float) -> None:
    executor, counts = opened(model, places), DraftCounts()
    how = Drafting(exit_layer, 2, FixedThreshold(threshold), DraftEnd(), async_layers=exit_layer)
    params, ending = SamplingParams(40, temperature=0.7, seed=2, top_k=3), Ending(frozenset(), CONTEXT_TOKENS)
    common: Any = executor, PROMPTS, params, ending, str, lambda: 0.0
    expected, found = list(generate(*common)), list(generate_exact(*common, how, counts))
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert 0 < counts.n_ahead_kept < counts.n_ahead
    executor.cache.check()
    executor.close()
