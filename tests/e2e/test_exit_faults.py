"""Out of memory while tokens exit early is planned around."""

from typing import Any

import pytest

from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.opening import open_on_cpu
from tests.device_support import no_memory
from tests.e2e.test_runtime_faults import CONTEXT_TOKENS, KernelError, Model, Points, model, opened
from tests.exit_patterns import Exiting, end_sequence, run_exiting

__all__ = ["model"]  # a fixture
N_LAYERS, IDS = 3, [3, 17, 30, 3, 99, 42, 8, 7]
DEPTHS = [3, 1, 2, 2, 3, 1, 1, 3]


def run(executor: Any) -> list[Any]:
    """The states that tokens exit with; the text is over then, and its sequence goes on."""
    sequence = executor.cache.open_new()
    try:
        states = run_exiting(executor, {sequence: Exiting(IDS, DEPTHS)})[sequence]
        end_sequence(executor, sequence)
        executor.cache.check()
        n_kept = executor.cache.length(sequence)
        assert executor.cache.lengths(sequence) == [n_kept] * N_LAYERS
        executor.hidden(Batch.of_sequence(sequence, n_kept, [5, 6]))
        return [state.tolist() for state in states]
    finally:
        executor.cache.close(sequence)


@pytest.mark.parametrize(("where", "split"), [("gpu", "split"), ("copy", "streamed"), ("transfer", "split")])
@pytest.mark.sample(1)
def test_out_of_memory_while_tokens_exit(model: Model, where: str, split: str) -> None:
    expected = run(open_on_cpu(*model, CONTEXT_TOKENS, 1))
    clean = Points(KernelError, 0, True, armed=True)
    executor = opened(model, clean, where, split)
    assert run(executor) == expected
    executor.close()
    n_replanned = 0
    for n in range(1, clean.calls + 1, 3):
        points = Points(no_memory, n, only_once=True)
        executor = opened(model, points, where, split)
        points.armed = True
        assert run(executor) == expected
        n_replanned += len(points.notices)
        assert executor.cache.sequences == ()
        executor.close()
    assert n_replanned > 0
