"""Faults at every point a short text reaches: it goes on or ends with one error, and the next text is as ever."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.replanning import ReplanningExecutor
from hetero_ee.runtime.opening import open_on_cpu
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee_profiles.reference import reference_profile
from tests.device_support import FaultyDevice, FaultyLink, held_bytes, no_memory
from tests.e2e.test_placements import of_family
from tests.emulation import LAPTOP, emulated

CONTEXT_TOKENS = 128
PROMPTS = [[(7 * i) % 90 + 3 for i in range(60)], [2, 3]]  # the first in three chunks
CHUNK_TOKENS = 20
SPLITS = {
    "streamed": ((r"layers\.0\.attention", "gpu"), (r"layers\.[01]\.ffn", "stream"), ("layers.*", "cpu")),
    "split": ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu")),
}
Model = tuple[ModelSpec, ModelWeights]


class KernelError(Exception):
    """What a kernel might raise that nobody foresees."""


@dataclass
class Points:
    """Faults of one kind at each place that can fail. armed: struck only then, so that opening is not hit."""

    error: Callable[[], BaseException]
    n: int
    only_once: bool
    calls: int = 0
    armed: bool = False
    notices: list[str] = field(default_factory=list)

    def strike(self) -> None:
        if self.armed:
            self.calls += 1
            if self.n and (self.calls == self.n or (self.calls > self.n and not self.only_once)):
                raise self.error()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return of_family("llama-tied", tmp_path_factory.mktemp("model"), "int4")


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    return text_of(open_on_cpu(*model, CONTEXT_TOKENS, 1))


def text_of(executor: Any) -> list[list[int]]:
    """Six greedy tokens behind each prompt."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    params = SamplingParams(max_new_tokens=6)
    for token in generate(executor, PROMPTS, params, Ending(frozenset(), CONTEXT_TOKENS), str, lambda: 0.0):
        found[token.sequence].append(token.token_id)
    return found


def opened(model: Model, points: Points, where: str, split: str = "streamed") -> ReplanningExecutor:
    """The split plan on an emulated machine, one of whose parts (gpu, cpu, copy, cross or memory) strikes."""
    spec, weights = model
    profile = reference_profile(LAPTOP)

    def replan(vram_budget_bytes: int, context_tokens: int) -> Plan:
        limits = Limits(context_tokens=context_tokens, gpu_layers=None if vram_budget_bytes else 0)
        return make_plan(spec, profile, limits)

    def wrap(machine: Machine) -> Machine:
        assert machine.gpu is not None and machine.link is not None
        fault: Any = points
        gpu = FaultyDevice(machine.gpu, fault if where == "memory" else None, fault if where == "gpu" else None)
        cpu = FaultyDevice(machine.cpu, None, fault if where == "cpu" else None)
        link = FaultyLink(machine.link, *(fault if where == name else None for name in ("copy", "transfer")))
        return replace(machine, cpu=cpu, gpu=gpu, link=link)

    def open_plan(plan: Plan) -> PlannedExecutor:
        return emulated(spec, weights, plan, wrap=wrap if plan.n_bytes("gpu") else lambda machine: machine)

    made = make_plan(spec, profile, Limits(context_tokens=CONTEXT_TOKENS, overrides=SPLITS[split]))
    parts = tuple(replace(part, prefill_placement=part.decode_placement) for part in made.parts)
    first = replace(made, prefill_chunk_tokens=CHUNK_TOKENS, parts=parts)
    return ReplanningExecutor(first, replan, open_plan, points.notices.append)


def n_points(model: Model, where: str, split: str = "streamed") -> int:
    """How often a clean run passes there."""
    points = Points(KernelError, 0, True, armed=True)
    executor = opened(model, points, where, split)
    text_of(executor)
    executor.close()
    assert points.calls > 10
    return points.calls


EVERY_OR_SOME = [pytest.param(1, marks=pytest.mark.slow, id="every"), pytest.param(19, id="some")]


PLACES = [("gpu", "streamed"), ("gpu", "split"), ("copy", "streamed"), ("transfer", "streamed"), ("transfer", "split")]


@pytest.mark.parametrize("stride", EVERY_OR_SOME)
@pytest.mark.parametrize(("where", "split"), PLACES)
def test_out_of_memory_at_every_point_is_planned_around(
    model: Model, expected: Any, where: str, split: str, stride: int
) -> None:
    n_replanned = 0
    for n in range(1, n_points(model, where, split) + 1, stride):
        points = Points(no_memory, n, only_once=True)
        executor = opened(model, points, where, split)
        points.armed = True
        assert text_of(executor) == expected, n
        executor.cache.check()
        assert all("continuing" in text.lower() for text in points.notices)
        n_replanned += len(points.notices)  # none where the copy that failed was ahead of its time, and not needed
        assert text_of(executor) == expected
        executor.close()
    assert n_replanned > 0


def test_out_of_memory_inside_a_pruned_tree_changes_no_state(model: Model) -> None:
    """A root with three drafts after it; the first leaves the tree, and the second gets one more after it."""
    tree = Batch((5, 6, 7, 8, 9), (0,) * 5, (20, 21, 21, 21, 22), paths=((), (), (22,), (23,), (22, 24)))
    pruned = Batch((5, 7, 8, 9), (0,) * 4, (20, 21, 21, 22), paths=((), (), (22,), (21, 23)))
    found = list[Any]()
    for n in (0, 1):
        points = Points(no_memory, n, only_once=True)
        executor = opened(model, points, "gpu")
        executor.cache.open(0)
        executor.hidden(Batch.of_sequence(0, 0, PROMPTS[0][:20]))
        before = executor.run(tree, None, range(1))
        executor.keep_path(0, 20, [20, 22, 23, 24])
        points.armed = True
        states = executor.run(pruned, before[[0, 2, 3, 4]], range(1, executor.spec.n_layers))
        assert len(points.notices) == n
        executor.keep_path(0, 20, [20, 21, 23])
        found.append((states.cpu(), executor.hidden(Batch.of_sequence(0, 23, [11])).cpu()))
        executor.close()
    for expected, states in zip(*found, strict=True):
        assert torch.equal(states, expected)


@pytest.mark.parametrize("stride", EVERY_OR_SOME)
@pytest.mark.parametrize("where", ["gpu", "copy", "transfer"])
def test_out_of_memory_again_ends_the_text_and_nothing_else(
    model: Model, expected: Any, where: str, stride: int
) -> None:
    for n in range(2, n_points(model, where) + 1, stride):
        points = Points(no_memory, n, only_once=False)
        executor = opened(model, points, where)
        points.armed = True
        try:
            assert text_of(executor) == expected  # where the new plan has no such point
        except DeviceMemoryError:
            executor.cache.check()
        points.armed = False
        assert executor.cache.sequences == ()
        assert text_of(executor) == expected
        executor.close()


@pytest.mark.parametrize("stride", EVERY_OR_SOME)
@pytest.mark.parametrize("error", [DeviceLostError, KernelError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["gpu", "cpu", "copy", "transfer"])
def test_other_faults_at_every_point_end_the_text_and_nothing_else(
    model: Model, expected: Any, where: str, error: Any, stride: int
) -> None:
    n_raised = 0
    for n in range(1, n_points(model, where) + 1, stride):
        points = Points(lambda: error("a test's fault"), n, only_once=True)
        executor = opened(model, points, where)
        points.armed = True
        for _ in range(2 if where == "copy" else 1):  # a copy ahead of its time may be the next text's
            try:
                assert text_of(executor) == expected and where == "copy"
            except error:
                n_raised += 1
                break
        executor.cache.check()
        assert executor.cache.sequences == ()
        assert text_of(executor) == expected, n
        executor.close()
    assert n_raised > 0


def test_a_lost_device_is_not_used_again(model: Model, expected: Any) -> None:
    points = Points(lambda: DeviceLostError("the GPU fell off the bus."), 3, only_once=False)
    executor = opened(model, points, "gpu")
    points.armed = True
    with pytest.raises(DeviceLostError, match="on the CPU alone"):
        text_of(executor)
    assert executor.plan.n_bytes("gpu") == 0
    assert text_of(executor) == expected


def test_no_room_at_opening_goes_on_without_the_gpu(model: Model, expected: Any) -> None:
    for n in itertools.count(1):
        points = Points(no_memory, n, only_once=True, armed=True)
        executor = opened(model, points, "memory")
        assert text_of(executor) == expected
        executor.close()
        if points.calls < n:
            break
        assert executor.plan.n_bytes("gpu") == 0 and "without the GPU" in points.notices[0]
    assert n > 3


def test_two_hundred_faults_lose_no_memory(model: Model) -> None:
    """The claims of one engine after each: what it held at the beginning."""
    points = Points(KernelError, 0, only_once=True)
    executor = opened(model, points, "gpu")
    gpu: Any = executor.inner.machine.gpu
    before, cached = held_bytes(gpu), executor.cache.n_bytes
    for n in range(200):
        points.n, points.calls, points.armed = 1 + n % 9, 0, True
        with pytest.raises(KernelError):
            text_of(executor)
        assert held_bytes(gpu) == before and executor.cache.n_bytes == cached
    executor.close()
    assert held_bytes(gpu) == {}
