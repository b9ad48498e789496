"""The stage of the drafts: the same in every run, in one piece or resumed, and few tokens' partial logits kept."""

import numpy as np
import pytest

from hetero_ee.calibration.stages import DraftStage
from hetero_ee.calibration.traces import fields_of
from hetero_ee.hub.config_file import read_spec
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.families import random_model, save_checkpoint

CHUNKS = [tuple(range(2 + number, 14 + 2 * number)) for number in range(12)]  # of 11 counted tokens, 12, 13, ...


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = save_checkpoint(random_model("llama", num_hidden_layers=4), tmp_path_factory.mktemp("model"))
    spec = read_spec(folder)
    return ReferenceExecutor(spec, load_dense(Checkpoint(folder, spec)), max(map(len, CHUNKS)))


def stage_of(executor: Executor, n_chunks: int, n_schedule_tokens: int = 14) -> DraftStage:
    stage = DraftStage(executor, CHUNKS, {}, n_schedule_tokens)
    for number in stage.numbers[:n_chunks]:
        stage.add(number, CHUNKS[number])
    return stage


def same(one: DraftStage, other: DraftStage) -> None:
    for mine, theirs in zip([*one.chunks, *one.partial], [*other.chunks, *other.partial], strict=True):
        for array, expected in zip(fields_of(mine).values(), fields_of(theirs).values(), strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("n_before", [0, 1, 2, 3, 7, 12])
def test_resumed_it_is_the_same_as_in_one_piece(executor: Executor, n_before: int) -> None:
    whole, before = stage_of(executor, len(CHUNKS)), stage_of(executor, n_before)
    after = stage_of(executor, 0)
    if n_before:
        after.restore(before.arrays(), n_before == len(CHUNKS))
    for number in after.numbers[n_before:]:
        after.add(number, CHUNKS[number])
    same(whole, after)
    arrays = whole.arrays()
    assert all(np.array_equal(array, after.arrays()[name]) for name, array in arrays.items())


@pytest.mark.parametrize(
    ("n_schedule_tokens", "kept"), [(13, [2]), (14, [2, 6]), (30, [2, 6]), (31, [2, 6, 10]), (10**6, [2, 6, 10])]
)
def test_partial_logits_are_kept_of_so_many_tokens_alone(
    executor: Executor, n_schedule_tokens: int, kept: list[int]
) -> None:
    found = stage_of(executor, len(CHUNKS), n_schedule_tokens).partial
    assert [each.rank.shape[1] for each in found] == [len(CHUNKS[number]) - 1 for number in kept]
