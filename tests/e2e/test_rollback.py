"""Cutting a sequence anywhere, inside a sliding window or far behind it, leaves the bits of a run that never went on.

The cache keeps every position, whatever the window: a rollback can't meet an entry that was written over.
"""

from collections.abc import Iterator

import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from tests.executor_support import contents, executor_for, hidden_alone, model_of

WINDOWS = {"mistral": (7, 7, 7), "qwen2-window": (None, 9, 9), "phi3-partial": (11, 11, 11)}
TEXT = [(7 * i * i + 3) % 131 for i in range(48)]
OTHER = [(5 * i + 11) % 131 for i in range(48)]
STORED = (("fp32", "fp32"), ("int4", "fp32"), ("int4", "fp16"), ("int4", "int8"))  # weights, cache
CASES = [(family, weights, kind) for family in WINDOWS for weights, kind in STORED]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    family, weights, kind = request.param
    made = executor_for(model_of(family, weights, tmp_path_factory.mktemp(family)), weights, kind)
    assert made.spec.sliding_windows == WINDOWS[family]
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(executor: Executor) -> torch.Tensor:
    return hidden_alone(executor, TEXT)


def test_a_cut_is_as_if_nothing_had_followed(executor: Executor, expected: torch.Tensor) -> None:
    """Of 48 tokens, by few of them, by a window's and by many windows'."""
    cache, sequence, fresh = executor.cache, executor.cache.open_new(), executor.cache.open_new()
    executor.hidden(Batch.of_sequence(fresh, 0, TEXT))
    for kept in (46, 41, 38, 30, 8, 7, 1, 0):
        executor.hidden(Batch.of_sequence(sequence, 0, TEXT[:kept] + OTHER[kept:]))
        cache.truncate(sequence, kept)
        assert torch.equal(executor.hidden(Batch.of_sequence(sequence, kept, TEXT[kept:])), expected[kept:])
        for found, wanted in zip(contents(executor, sequence), contents(executor, fresh), strict=True):
            assert torch.equal(found, wanted)
        cache.truncate(sequence, 0)
    cache.check()
    for number in (sequence, fresh):
        cache.close(number)


def test_repeated_short_cuts_add_nothing_up(executor: Executor, expected: torch.Tensor) -> None:
    """As drafts are rejected: after each token three others come and go."""
    sequence = executor.cache.open_new()
    for position, token in enumerate(TEXT):
        hidden = executor.hidden(Batch.of_sequence(sequence, position, [token, *OTHER[:3]]))
        assert torch.equal(hidden[0], expected[position])
        executor.cache.truncate(sequence, position + 1)
    executor.cache.close(sequence)
