"""Recurrent layers on a GPU: near the CPU in any placement, exact among themselves, and rolled back by their logs."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import DeviceMemoryError, HeteroError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.gpu_recurrent import SETTLED_TOKENS, GpuRecurrentCache
from hetero_ee.kv.recurrent import RecurrentCache
from hetero_ee.layers.state import RecurrentState
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.executors.replanning import ReplanningExecutor
from hetero_ee.runtime.gpu.segment import Recorder, Work
from tests.emulation import planned
from tests.executor_support import Model, model_of
from tests.placements import CONTEXT_TOKENS, PLACEMENTS, PROMPT, assert_rows_keep_their_bits
from tests.stand_in_machine import on_stand_in, stand_in_gpu, torch_operations

INT8_ACTIVATIONS = 1e-2  # normalised squared error: gates multiply those of other products
STATE = RecurrentState(n_key_heads=2, n_value_heads=4, key_dim=6, value_dim=18, n_channels=96, kernel=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("qwen3.5", "int4", tmp_path_factory.mktemp("qwen3.5"))


@pytest.fixture(scope="module", params=["qwen3.5", "nemotron-h", "granite-hybrid"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, "int4", tmp_path_factory.mktemp(request.param))


def opened(model: Model, placement: str) -> PlannedExecutor:
    return on_stand_in(*model, planned(model[0], overrides=PLACEMENTS[placement], context_tokens=CONTEXT_TOKENS))


def states(executor: Executor, tokens: list[int], sequence: int | None = None) -> torch.Tensor:
    sequence = executor.cache.open_new() if sequence is None else sequence
    first = executor.cache.length(sequence)
    return executor.hidden(Batch.of_sequence(sequence, first, tokens[first:])).cpu()


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
@pytest.mark.sample(1)
def test_any_placement(hybrid: Model, placement: str) -> None:
    expected = states(ReferenceExecutor(*hybrid, CONTEXT_TOKENS, BatchedTorchOps()), PROMPT)
    executor = opened(hybrid, placement)
    found = states(executor, PROMPT)
    assert (found - expected).square().sum() <= INT8_ACTIVATIONS * expected.square().sum()
    assert_rows_keep_their_bits(executor, (0, 3))
    executor.cache.check()
    executor.close()


@pytest.mark.sample(0)
def test_neighbours_drafts_and_snapshots_change_nothing(hybrid: Model) -> None:
    """On two devices, with more sequences than the state had memory for at first."""
    executor, text = opened(hybrid, "every other layer"), [(7 * i * i + 3) % 131 for i in range(110)]
    cache, alone = executor.cache, list[torch.Tensor]()
    for number in range(2):
        sequence = cache.open_new()
        alone.append(torch.cat([states(executor, text[number:end], sequence) for end in range(10, 110, 10)]))
        cache.close(sequence)
    sequences, lengths, marked = [cache.open_new() for _ in alone], [0, 0], [0, 0]
    for step in range(40):
        n_rows = step % 5 + 1
        rows = [(at, number) for at in range(n_rows) for number in (1, 0)]
        batch = Batch(
            tuple(text[number + lengths[number] + at] for at, number in rows),
            tuple(sequences[number] for _, number in rows),
            tuple(lengths[number] + at for at, number in rows),
        )
        for state, (at, number) in zip(executor.hidden(batch).cpu(), rows, strict=True):
            assert torch.equal(state, alone[number][lengths[number] + at])
        for number, sequence in enumerate(sequences):
            lengths[number] += n_rows
            if step == 12:
                cache.mark(sequence)
                marked[number] = lengths[number]
            length = 38 if step == 30 else lengths[number] - step % 3
            lengths[number] = cache.truncate(sequence, length)
            assert lengths[number] == (marked[number] if step == 30 else length)
            if step % 4 == 0:
                cache.settle(sequence, lengths[number] - 2)
        cache.check()


def test_settled_tokens_leave_the_log() -> None:
    """Every few tokens, since a store costs as much as repeating some of them."""
    cache = GpuRecurrentCache(STATE, 100, torch.device("cpu"), [1])
    cache.open(0)
    for position in range(40):
        cache.admit(Batch.of_sequence(0, position, [5]))
        cache.settle(0, position)
        with cache.passing([0], [position], [1]):
            pass
        (base,) = cache._sequences[0].bases
        assert base == position // SETTLED_TOKENS * SETTLED_TOKENS
    cache.cut(0, 33)
    assert cache.length(0) == 33


def test_a_change_of_plan_keeps_snapshots(model: Model) -> None:
    plan = planned(model[0], overrides=PLACEMENTS["every other layer"], context_tokens=CONTEXT_TOKENS)
    executor = ReplanningExecutor(plan, None, partial(on_stand_in, *model), lambda _: None)
    text, sequence = [(7 * i * i + 3) % 131 for i in range(90)], executor.cache.open_new()
    states(executor, text[:30], sequence)
    executor.cache.mark(sequence)
    expected = states(executor, text, sequence)
    executor._change(plan, executor._lengths())
    assert executor.cache.length(sequence) == 90 and executor.cache.truncate(sequence, 50) == 30
    assert torch.equal(states(executor, text, sequence), expected)
    executor.close()


def test_a_pass_that_fails_loses_the_state() -> None:
    cache = GpuRecurrentCache(STATE, 100, torch.device("cpu"), [1, 3])
    cache.open(0)
    cache.admit(Batch.of_sequence(0, 0, [5] * 30))
    with cache.passing([0] * 30, range(30), [1, 3]):
        pass
    assert cache.restorable(0, 29) == 29 and cache.restorable(0, 5) == 0
    cache.admit(Batch.of_sequence(0, 30, [5]))
    with pytest.raises(KeyboardInterrupt), cache.passing([0], [30], [3]):
        raise KeyboardInterrupt
    with pytest.raises(HeteroError, match="damaged"):
        cache.check()
    cache.cut(0, 30)
    assert cache.lengths(0) == [0, 0]
    cache.check()


def test_memory_that_runs_out_within_a_pass_loses_no_token(model: Model) -> None:
    """The failed layers lose their state; the sequence is read again before the step is repeated."""
    plan = planned(model[0], overrides=PLACEMENTS["every other layer"], context_tokens=CONTEXT_TOKENS)
    kernels, faults, notices = torch_operations(), list[DeviceMemoryError](), list[str]()

    def gated_delta(*operands: Any) -> Any:
        if faults:
            raise faults.pop()
        return kernels.gated_delta(*operands)

    gpu = stand_in_gpu(operations=replace(kernels, gated_delta=gated_delta))
    made = partial(on_stand_in, *model, gpu=gpu)
    executor = ReplanningExecutor(plan, lambda n_bytes, context: plan, made, notices.append)
    expected = states(executor, PROMPT)
    sequence = executor.cache.open_new()
    found = [states(executor, PROMPT[:3], sequence)]
    for n_known in (4, 15):  # by one token, and by more than one
        faults.append(DeviceMemoryError("the GPU is full."))
        found += [states(executor, PROMPT[:n_known], sequence), states(executor, PROMPT[: n_known + 1], sequence)]
    found.append(states(executor, PROMPT, sequence))
    assert (torch.cat(found) - expected).square().sum() <= INT8_ACTIVATIONS * expected.square().sum()
    assert len(notices) == 2
    executor.cache.check()
    executor.close()


def test_texts_whose_state_is_lost_end_with_the_error(model: Model) -> None:
    """Without a plan to fall back on."""
    plan = planned(model[0], overrides=PLACEMENTS["every other layer"], context_tokens=CONTEXT_TOKENS)
    kernels, n_calls = torch_operations(), itertools.count(1)

    def gated_delta(*operands: Any) -> Any:
        if next(n_calls) == 60:
            raise DeviceMemoryError("the GPU is full.")
        return kernels.gated_delta(*operands)

    executor = on_stand_in(*model, plan, gpu=stand_in_gpu(operations=replace(kernels, gated_delta=gated_delta)))
    request = executor, [[1, 2, 3], [4, 5]], SamplingParams(30), Ending(frozenset(), CONTEXT_TOKENS), str, lambda: 0.0
    with pytest.raises(DeviceMemoryError, match="the GPU is full"):
        list(generate(*request))
    assert executor.cache.sequences == () and len(list(generate(*request))) == 60
    executor.close()


def test_the_cpu_s_format_holds_a_gpu_s_state() -> None:
    here, there = GpuRecurrentCache(STATE, 100, torch.device("cpu"), [1]), RecurrentCache(STATE, 100, [1])
    for cache in (here, there):
        cache.open(0)
        cache.open(1)
    for number, part in enumerate(here._tensors()):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(number)))
    here.admit(Batch.of_sequence(1, 0, [1] * 30))
    with here.passing([1] * 30, range(30), [1]):
        pass
    there.store(1, 0, 0, here.stored(1, 1, 0, 30))
    here.store(1, 0, 0, there.stored(1, 0, 0, 30))
    for part in here._tensors():
        assert torch.equal(part[0], part[1])
    assert here._sequences[0].bases == here._sequences[1].bases == [13]


def test_recorded_launches_are_those_on_the_current_tensors(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording keeps the tensors that it was made with, as a CUDA graph does."""
    from hetero_ee.runtime.executors import gpu

    def recorder(*_: object) -> Recorder:
        def record(work: Work) -> Work:
            pools = {cache: cache.pool for cache in caches}

            def replay() -> None:
                assert all(cache.pool is pool for cache, pool in pools.items()), "launches on freed tensors"
                work()

            return replay

        return record

    monkeypatch.setattr(gpu, "recorder_for", recorder)
    executor = opened(model, "all on the GPU")
    caches = [part for part in executor.cache.parts if isinstance(part, GpuRecurrentCache)]
    first = executor.cache.open_new()
    expected = torch.cat([states(executor, PROMPT[:length], first) for length in range(1, 4)])
    other = executor.cache.open_new()
    for length in range(1, 4):
        assert torch.equal(states(executor, PROMPT[:length], other)[0], expected[length - 1])
    assert caches[0].version == 1
