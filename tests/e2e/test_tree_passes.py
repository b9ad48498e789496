"""A tree of tokens in one pass: each has the bits that it has after its own path alone, and the last path's keys and
values stay, on every executor and with every type of cache."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from tests.executor_support import executor_for, model_of, on_kernels
from tests.pure.test_gpu_plans import plan_of, visiting
from tests.stand_in_machine import on_stand_in
from tests.token_trees import PROMPT, Tree, check_trees

CASES = [("llama", "fp32", "fp32"), ("llama", "int4", "fp16"), ("mistral", "int4", "int8"), ("mistral", "fp32", "fp32"),
         ("qwen2-window", "int4", "fp32")]  # fmt: skip
N_TREES, N_SLOW_TREES = 4, 2000


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    family, weights, kind = request.param
    made = executor_for(model_of(family, weights, tmp_path_factory.mktemp(family)), weights, kind)
    yield made
    made.close()


def test_each_token_of_a_tree_sees_its_own_path(executor: Executor) -> None:
    check_trees(executor, 0, N_TREES)


@pytest.mark.slow
def test_each_token_of_many_trees_sees_its_own_path(executor: Executor) -> None:
    for seed in range(N_SLOW_TREES // 20):
        check_trees(executor, seed, 20)


def test_several_texts_trees_share_a_pass(executor: Executor) -> None:
    draw, numbers = random.Random(1), [executor.cache.open_new() for _ in range(3)]
    trees = [Tree.drawn(draw, n_nodes, executor.spec.vocab_size) for n_nodes in (9, 1, 14)]
    for number in numbers:
        executor.hidden(Batch.of_sequence(number, 0, PROMPT[:8]))
    parts = [tree.batch(number, 8) for tree, number in zip(trees, numbers, strict=True)]
    hidden = executor.hidden(Batch.joined(parts))
    for tree, found in zip(trees, hidden.split([len(part) for part in parts]), strict=True):
        alone = executor.cache.open_new()
        executor.hidden(Batch.of_sequence(alone, 0, PROMPT[:8]))
        assert torch.equal(found, executor.hidden(tree.batch(alone, 8)))
        executor.cache.close(alone)
    for number in numbers:
        executor.cache.close(number)


def test_another_order_than_depth_first_is_noticed(executor: Executor) -> None:
    """Controls: siblings before their children, and all keys before any query."""
    tree = Tree([5, 6, 7, 8], [-1, 0, 1, 0])
    broad = Batch((5, 6, 8, 7), (0,) * 4, (8, 9, 9, 10), is_tree=True)
    at_once = Batch((5, 6, 7, 8), (0,) * 4, (8, 9, 10, 9), is_tree=True)
    executor.cache.open(0)
    executor.hidden(Batch.of_sequence(0, 0, PROMPT[:8]))
    hidden = executor.hidden(tree.batch(0, 8))
    executor.cache.truncate(0, 8)
    assert not torch.equal(executor.hidden(broad)[3], hidden[2])
    executor.cache.truncate(0, 8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Batch, "runs", lambda self: [slice(0, len(self))])
        assert not torch.equal(executor.hidden(at_once)[1], hidden[1])
    executor.cache.close(0)


@pytest.mark.parametrize("positions", [(8, 10), (8, 9, 11), (8, 9, 7), (9, 8)])
@pytest.mark.parametrize("is_tree", [True, False])
def test_what_follows_no_path_is_refused(executor: Executor, positions: tuple[int, ...], is_tree: bool) -> None:
    executor.cache.open(0)
    executor.hidden(Batch.of_sequence(0, 0, PROMPT[:8]))
    batch = Batch((1,) * len(positions), (0,) * len(positions), positions, is_tree=is_tree)
    with pytest.raises(ValueError, match="can't follow"):
        executor.hidden(batch)
    with pytest.raises(ValueError, match="can't follow"):
        executor.hidden(Batch((1, 2, 3), (0,) * 3, (8, 9, 9)))
    assert executor.cache.lengths(0) == [8] * executor.spec.n_layers
    executor.cache.close(0)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bits(threads: int, tmp_path: Path) -> None:
    executor = on_kernels(model_of("llama", "int4", tmp_path), "fp16", threads)
    check_trees(executor, 3, 4)
    executor.close()


@pytest.mark.few(9)
@pytest.mark.parametrize("kv_type", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("placement", ["all on the GPU", "attention and FFN apart", "GPU, streamed, CPU"])
def test_trees_pass_a_gpu_too(placement: str, kv_type: str, tmp_path: Path) -> None:
    """Also with more rows than a launch takes, and prompts that visit."""
    model = model_of("mistral", "int4", tmp_path)
    executor = on_stand_in(*model, visiting(plan_of(model, placement, kv_type=kv_type)))
    check_trees(executor, 5, 3)
    executor.close()
