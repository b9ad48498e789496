"""How often a GPU is asked for what, counted on the stand-in: launches of a prompt, graphs, what crosses the link."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.kv.batch import Batch
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.plan import EXIT, Plan
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.execution import warmed_up
from hetero_ee.runtime.executors import gpu as gpu_executor
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.gpu.segment import GpuSegment
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee_profiles.reference import reference_profile
from tests.drafted_generation import generate_exact
from tests.emulation import LAPTOP, emulated, planned
from tests.executor_support import Model, model_of
from tests.stand_in_machine import on_stand_in, stand_in_gpu, torch_operations

CONTEXT_TOKENS, CHUNK_TOKENS, DRAFT_LENGTH = 128, 40, 3
PROMPT = [1, 17, 30, 3, 99, 42, 42, 7, 12, 77] * 6  # two chunks
EVERYTHING = (("layers.*|head|embedding", "gpu"),)
FIRST_LAYER = ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu"), ("head|embedding", "gpu"))
PRODUCTS_A_LAYER = 4


@pytest.fixture(scope="module", params=["llama", "llama-tied", "opt"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, "int4", tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))


def plan_of(model: Model, overrides: Any, **changes: Any) -> Plan:
    plan = planned(model[0], overrides=overrides, context_tokens=CONTEXT_TOKENS)
    return replace(plan, prefill_chunk_tokens=CHUNK_TOKENS, **changes)


def exiting(plan: Plan) -> Plan:
    return replace(plan, mode="exact", drafts=EXIT, exit_layer=1, draft_length=DRAFT_LENGTH)


def counted(rows: Counter[tuple[str, int]]) -> GpuOperations:
    """Operations that count their calls by name and rows."""

    def counting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, *arguments: Any, **options: Any) -> Any:
            rows[name, len(x)] += 1
            return operation(x, *arguments, **options)

        return call

    real = torch_operations()
    names = ("matmul_int4", "attention", "kv_write", "rms_norm", "activate")
    return replace(real, **{name: counting(name, getattr(real, name)) for name in names})


@dataclass
class CountingLink:
    """The machine's own link, with the names and bytes of what crosses it."""

    inner: Any
    crossed: list[tuple[str, int]] = field(default_factory=list)

    def transfer(self, name: str, n_rows: int, row_bytes: int, *rest: Any) -> Any:
        self.crossed.append((name, n_rows * row_bytes))
        return self.inner.transfer(name, n_rows, row_bytes, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def counting_link(links: list[CountingLink]) -> Callable[[Machine], Machine]:
    def wrap(machine: Machine) -> Machine:
        links.append(CountingLink(machine.link))
        return replace(machine, link=links[-1])

    return wrap


def texts(executor: Executor, *, exact: bool) -> list[str]:
    params, ending = SamplingParams(30, temperature=0.7, seed=2, top_k=3), Ending(frozenset(), CONTEXT_TOKENS)
    common: Any = executor, [PROMPT], params, ending, str, lambda: 0.0
    how = Drafting(1, DRAFT_LENGTH, FixedThreshold(0.0), DraftEnd())
    made = generate_exact(*common, how, DraftCounts()) if exact else generate(*common)
    return sorted(map(str, made))


@pytest.mark.parametrize("place", ["gpu", "stream", "visit"])
def test_a_chunk_of_a_prompt_is_one_launch_of_each_operation(llama: Model, place: str) -> None:
    """Whether a layer's weights stay on the GPU, are streamed to it or visit it for prompts."""
    plan = plan_of(llama, (("layers.*", "cpu" if place == "visit" else place), ("head", "gpu")))
    if place == "visit":
        parts = [part if part.layer is None else replace(part, prefill_placement="visit") for part in plan.parts]
        plan = replace(plan, parts=tuple(parts))
    rows: Counter[tuple[str, int]] = Counter()
    executor, n_layers = on_stand_in(*llama, plan, stand_in_gpu(operations=counted(rows))), llama[0].n_layers
    sequence = executor.cache.open_new()
    executor.prompt([Batch.of_sequence(sequence, 0, PROMPT[:CHUNK_TOKENS])])
    assert rows["matmul_int4", CHUNK_TOKENS] == PRODUCTS_A_LAYER * n_layers
    for name in ("attention", "kv_write", "activate"):
        assert {key: n for key, n in rows.items() if key[0] == name} == {(name, CHUNK_TOKENS): n_layers}
    executor.close()


def test_the_warm_up_records_what_speculative_decoding_uses(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no prompt: afterwards a text records nothing."""
    recorded: list[Any] = []

    def recorder(work: Callable[[], None]) -> Callable[[], None]:
        recorded.append(work)
        return work

    monkeypatch.setattr(gpu_executor, "recorder_for", lambda device, operations: recorder)
    for plan, n_segments in ((plan_of(llama, EVERYTHING), 1), (exiting(plan_of(llama, EVERYTHING)), 2)):
        recorded.clear()
        executor = warmed_up(on_stand_in(*llama, plan))
        assert len(recorded) == n_segments * plan.draft_length
        n_before = len(recorded)
        texts(executor, exact=plan.mode == "exact")
        assert not any(is_of_layers(work) for work in recorded[n_before:])
        executor.close()


def is_of_layers(work: Callable[[], None]) -> bool:
    """Whether a segment made the recording; the end of drafts makes one when it is first asked."""
    return isinstance(getattr(inspect.getclosurevars(work).nonlocals["compute"], "__self__", None), GpuSegment)


@pytest.mark.sample(0)
def test_everything_on_the_gpu_is_one_composition(model: Model) -> None:
    """Full and exact mode give one text; embeddings are the reference's; only logits and drafts cross the link."""
    links: list[CountingLink] = []
    plan = exiting(plan_of(model, EVERYTHING))
    assert set(plan.decode_placements) == {"gpu"}
    for open_it in (on_stand_in, emulated):
        executor = open_it(*model, plan, wrap=counting_link(links))
        full = texts(executor, exact=False)
        assert texts(executor, exact=True) == full
        assert {name for name, _ in links[-1].crossed} == {"logits", "drafts"}
        executor.cache.check()
        executor.close()


def test_the_gpu_s_embedding_is_the_reference_s(model: Model) -> None:
    executor, batch = on_stand_in(*model, plan_of(model, FIRST_LAYER)), Batch((3, 99, 3), (0, 1, 0), (0, 5, 1))
    expected = ReferenceExecutor(*model, CONTEXT_TOKENS).embed(batch)
    assert torch.equal(executor.on_cpu(executor.run(batch, None, range(0))), expected)
    with pytest.raises(ValueError, match="are not all of the"):
        executor.run(Batch((model[0].vocab_size,), (0,), (0,)), None, range(0))
    executor.close()


def test_drafting_through_the_gpu_s_layers_waits_for_no_hidden_states(llama: Model) -> None:
    """A draft by exit there: a token's id and confidence come back, nothing else crosses."""
    links: list[CountingLink] = []
    executor = on_stand_in(*llama, exiting(plan_of(llama, FIRST_LAYER)), wrap=counting_link(links))
    sequence = executor.cache.open_new()
    executor.prompt([Batch.of_sequence(sequence, 0, PROMPT[:CHUNK_TOKENS])])
    links[-1].crossed.clear()
    hidden = executor.run(Batch.of_sequence(sequence, CHUNK_TOKENS, [4]), None, range(1))
    assert links[-1].crossed == []
    executor.draft(hidden, [DraftNoise(0.7, 1, 0, CHUNK_TOKENS)], DraftEnd())
    assert [name for name, _ in links[-1].crossed] == ["drafts"]
    executor.close()


def test_the_emulated_clock_charges_no_transfer_before_the_gpu_s_first_layer(llama: Model) -> None:
    seconds = []
    for embedding in ("cpu", "gpu"):
        timeline = Timeline()
        plan = plan_of(llama, (("layers.*|head", "gpu"), ("embedding", embedding)))
        executor = emulated(*llama, plan, timeline=timeline)
        sequence = executor.cache.open_new()
        executor.prompt([Batch.of_sequence(sequence, 0, PROMPT[:CHUNK_TOKENS])])
        before = timeline.now_s
        executor.logits(Batch.of_sequence(sequence, CHUNK_TOKENS, [4]), [0])
        seconds.append(timeline.now_s - before)
        executor.close()
    transfer_s = planned_transfer_s()
    assert seconds[0] - seconds[1] == pytest.approx(transfer_s, rel=0.01)


def planned_transfer_s() -> float:
    """One token's hidden states over the link."""
    link = reference_profile(LAPTOP).link
    assert link is not None
    return link.transfer.value
