"""The stage of the rows: the same in every run, in one piece or gone on with, and few tokens' sliced logits kept."""

import numpy as np
import pytest

from hetero_ee.calibration.row_stage import BY_CHUNK, RowStage
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


def stage_of(executor: Executor, n_chunks: int, n_walk_tokens: int = 14) -> RowStage:
    stage = RowStage(executor, CHUNKS, {}, n_walk_tokens)
    for number in stage.numbers[:n_chunks]:
        stage.add(number, CHUNKS[number])
    return stage


def same(one: RowStage, other: RowStage) -> None:
    for name in BY_CHUNK:
        for mine, theirs in zip(getattr(one, name), getattr(other, name), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert one.sliced.keys() == other.sliced.keys()
    for number, sliced in one.sliced.items():
        np.testing.assert_array_equal(sliced.values, other.sliced[number].values)
        np.testing.assert_array_equal(sliced.rank, other.sliced[number].rank)


@pytest.mark.parametrize("n_before", [0, 1, 2, 3, 7, 12])
def test_gone_on_with_it_is_the_same_as_in_one_piece(executor: Executor, n_before: int) -> None:
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
    ("n_walk_tokens", "kept"), [(13, [2, 3]), (14, [2, 3, 6]), (15, [2, 3, 6, 7]), (10**6, [2, 3, 6, 7, 10, 11])]
)
def test_sliced_logits_are_kept_of_so_many_tokens_alone(
    executor: Executor, n_walk_tokens: int, kept: list[int]
) -> None:
    assert sorted(stage_of(executor, len(CHUNKS), n_walk_tokens).sliced) == kept
