"""Drafts of a calibration's chunks: the same in every run, in one piece or resumed, and few tokens' partial logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.calibration.traces import ChunkDrafts, PartialLogits, fields_of
from hetero_ee.hub.config_file import read_spec
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.families import random_model, save_checkpoint

CHUNKS = [tuple(range(2 + number, 14 + 2 * number)) for number in range(12)]  # of 11 counted tokens, 12, 13, ...
Found = tuple[list[ChunkDrafts], list[PartialLogits]]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = save_checkpoint(random_model("llama", num_hidden_layers=4), tmp_path_factory.mktemp("model"))
    spec = read_spec(folder)
    return ReferenceExecutor(spec, load_dense(Checkpoint(folder, spec)), max(map(len, CHUNKS)))


def drafts_of(
    executor: Executor,
    steps: KeptSteps | None = None,
    n_schedule_tokens: int = 14,
    progress: Callable[[str, int, int], None] | None = None,
) -> Found:
    run = CalibrationRun(executor, CalibrationSettings(n_schedule_tokens=n_schedule_tokens), steps, progress)
    run._chunks = CHUNKS
    return run._drafts({})


def kept(folder: Path) -> KeptSteps:
    return KeptSteps(folder / "partial", "ab" * 32, clock=lambda: 0.0)


def same(one: Found, other: Found) -> None:
    for mine, theirs in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
        for array, expected in zip(fields_of(mine).values(), fields_of(theirs).values(), strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("n_before", [1, 2, 3, 7, 12])
def test_resumed_it_is_the_same_as_in_one_piece(executor: Executor, n_before: int, tmp_path: Path) -> None:
    calls = iter(range(n_before - 1))

    def interrupted(*_: object) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drafts_of(executor, kept(tmp_path), progress=interrupted)
    same(drafts_of(executor), drafts_of(executor, kept(tmp_path)))


@pytest.mark.parametrize(
    ("n_schedule_tokens", "kept"), [(13, [2]), (14, [2, 6]), (30, [2, 6]), (31, [2, 6, 10]), (10**6, [2, 6, 10])]
)
def test_partial_logits_are_kept_of_so_many_tokens_alone(
    executor: Executor, n_schedule_tokens: int, kept: list[int]
) -> None:
    found = drafts_of(executor, n_schedule_tokens=n_schedule_tokens)[1]
    assert [each.rank.shape[1] for each in found] == [len(CHUNKS[number]) - 1 for number in kept]
