"""Faults at every point of asynchronous drafting: the text goes on, or ends with one error; no guess is left."""

from typing import Any

import pytest

from hetero_ee.decoding.requests import Continuation, Ending
from hetero_ee.errors import DeviceLostError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.opening import open_on_cpu
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.device_support import no_memory
from tests.drafted_generation import generate_exact
from tests.e2e import test_runtime_faults as faults
from tests.e2e.test_placements import of_family
from tests.e2e.test_runtime_faults import CONTEXT_TOKENS, EVERY_OR_SOME, PROMPTS, KernelError, Model, Points, opened

N_TOKENS = 6
WHERE = ["gpu", "cpu", "transfer"]
PARAMS, ENDING = SamplingParams(max_new_tokens=N_TOKENS), Ending(frozenset(), CONTEXT_TOKENS)
HOW = Drafting(1, 2, FixedThreshold(2.0), DraftEnd(), async_layers=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return of_family("llama-tied", tmp_path_factory.mktemp("model"), "int4")


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    return faults.text_of(open_on_cpu(*model, CONTEXT_TOKENS, 1))


def text_of(executor: Any, counts: DraftCounts | None = None) -> list[list[int]]:
    """Six greedy tokens after each prompt; no token exits, so that every step has a guess."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for token in generate_exact(executor, PROMPTS, PARAMS, ENDING, str, lambda: 0.0, HOW, counts):
        found[token.sequence].append(token.token_id)
    return found


def n_points(model: Model, expected: Any, where: str) -> int:
    """How often a clean run passes there. Its guesses are right and wrong."""
    points, counts = Points(KernelError, 0, True, armed=True), DraftCounts()
    executor = opened(model, points, where, "split")
    assert text_of(executor, counts) == expected
    assert 0 < counts.n_ahead_kept < counts.n_ahead
    executor.close()
    return points.calls


@pytest.mark.parametrize("stride", EVERY_OR_SOME)
@pytest.mark.parametrize("where", ["gpu", "transfer"])
def test_out_of_memory_is_planned_around(model: Model, expected: Any, where: str, stride: int) -> None:
    for n in range(1, n_points(model, expected, where) + 1, stride):
        points = Points(no_memory, n, only_once=True)
        executor = opened(model, points, where, "split")
        points.armed = True
        assert text_of(executor) == expected, n
        executor.cache.check()
        assert executor.cache.sequences == () and len(points.notices) == 1
        assert text_of(executor) == expected
        executor.close()


@pytest.mark.parametrize("stride", EVERY_OR_SOME)
@pytest.mark.parametrize("error", [DeviceLostError, KernelError, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_other_faults_end_the_text_and_nothing_else(
    model: Model, expected: Any, where: str, error: Any, stride: int
) -> None:
    for n in range(1, n_points(model, expected, where) + 1, stride):
        points = Points(lambda: error("a test's fault"), n, only_once=True)
        executor = opened(model, points, where, "split")
        points.armed = True
        with pytest.raises(error):
            text_of(executor)
        executor.cache.check()
        assert executor.cache.sequences == ()
        assert text_of(executor) == expected, n
        executor.close()


@pytest.mark.parametrize("stride", EVERY_OR_SOME)
@pytest.mark.parametrize("where", WHERE)
def test_a_sequence_that_stays_open_goes_on_after_a_fault(model: Model, expected: Any, where: str, stride: int) -> None:
    """As a conversation does: from what is certain, the tokens before the last one seen."""
    for n in range(1, n_points(model, expected, where) + 1, stride):
        points = Points(KeyboardInterrupt, n, only_once=True, armed=True)
        executor = opened(model, points, where, "split")
        said, sequence = list(PROMPTS[0]), executor.cache.open_new()
        certain = 0
        while len(said) < len(PROMPTS[0]) + N_TOKENS:
            executor.cache.truncate(sequence, certain)
            left = PARAMS.changed(max_new_tokens=len(PROMPTS[0]) + N_TOKENS - len(said))
            try:
                tokens = generate_exact(executor, Continuation(sequence, said[:]), left, ENDING, str, lambda: 0.0, HOW)
                for token in tokens:
                    certain = len(said)
                    said.append(token.token_id)
            except KeyboardInterrupt:
                pass
        assert said[len(PROMPTS[0]) :] == expected[0]
        executor.cache.check()
        assert executor.cache.length(sequence) == len(said) - 1
        executor.close()
