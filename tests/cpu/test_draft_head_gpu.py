"""A draft head on a GPU, by everything that runs it there but the card: the CPU's drafts, within the plan's memory, and
little over the link."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending, Request
from hetero_ee.errors import DeviceMemoryError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.memory import DRAFT_HEAD, MemoryTerm
from hetero_ee.runtime.devices.cpu import host_machine
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.replanning import ReplanningExecutor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.sources.draft_head import DraftHeadSource, StateRows
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts
from hetero_ee.speculation.sources.draft_head_opening import DraftHeadOpener, draft_vocabulary, head_weights
from hetero_ee.speculation.sources.source import Choose, Draft
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee_profiles.reference import reference_profile
from tests.device_support import held_bytes
from tests.draft_heads import random_head
from tests.drafted_generation import generate_exact
from tests.emulation import LAPTOP, planned
from tests.executor_support import Model, model_of, on_kernels
from tests.stand_in_machine import on_stand_in

CONTEXT_TOKENS, N_TOKENS, N_DRAFTS = 256, 20, 6
PROMPTS = [[1, 17, 30, 3, 99, 42, 42], [7, 12]]
ENDING = Ending(frozenset(), CONTEXT_TOKENS)
GREEDY, SAMPLED = SamplingParams(40), SamplingParams(40, temperature=0.8, seed=5)
BIASED = GREEDY.changed(presence_penalty=2.0, frequency_penalty=1.0, logit_bias={7: 3.0})
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "half": ((r"layers\.0\..*", "gpu"), ("layers.*|embedding", "cpu"), ("head", "gpu")),
    "all": (("layers.*|head", "gpu"),),
}


class WatchedLink:
    """A link that notes what is transferred: (name, bytes)."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.transfers = inner, list[tuple[str, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def transfer(self, name: str, n_rows: int, row_bytes: int, *rest: Any) -> Any:
        self.transfers.append((name, n_rows * row_bytes))
        return self._inner.transfer(name, n_rows, row_bytes, *rest)


def watched(machine: Machine) -> Machine:
    return machine if machine.link is None else replace(machine, link=WatchedLink(machine.link))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(model: Model, kernels: Any) -> Iterator[Executor]:
    executor = on_kernels(model)
    yield executor
    executor.close()


def plan_of(model: Model, places: str = "half", n_bytes: int = 2**20) -> Plan:
    """With room for the head on the GPU."""
    plan = planned(model[0], overrides=PLACES[places], context_tokens=CONTEXT_TOKENS)
    return replace(plan, memory=(*plan.memory, MemoryTerm("gpu", DRAFT_HEAD, n_bytes)))


def opener_for(executor: Executor, running: Any, seed: int = 0, warn: Any = pytest.fail) -> DraftHeadOpener:
    head = random_head(executor.spec, seed)
    return DraftHeadOpener(head.spec, head_weights(head, compiled=True), executor, running, warn)


def source_for(
    executor: Executor, running: Any = None, trimmed: bool = True, seed: int = 0, warn: Any = pytest.fail
) -> DraftHeadSource:
    head, opener = random_head(executor.spec, seed), opener_for(executor, running, seed, warn)
    vocabulary = draft_vocabulary(executor, head.draft_token_ids) if head.draft_token_ids is not None else None
    return DraftHeadSource(opener, executor, vocabulary if trimmed else None, pytest.fail)


def drafts_of(executor: Executor, source: DraftHeadSource, params: SamplingParams, seed: int) -> list[Draft]:
    """After a text of random states, half of it read as a prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, executor.spec.vocab_size, (N_TOKENS + 1,), generator=generator).tolist()
    states = torch.randn(N_TOKENS, executor.spec.hidden_size, generator=generator)
    half = N_TOKENS // 2
    source.read_prompt(0, 0, tokens[:half], states[:half])
    source.observe(0, half, tokens[half:-1], states[half:])
    text = Request.of_prompt(0, tokens, params, ENDING, str, kv_sequence=0)
    sampler = DraftSampler()
    choose: Choose = lambda hidden, end, history: sampler.drafted(executor, hidden, end, [(text, history)])[0]  # noqa: E731
    with closing(source.drafts(0, tokens, choose)) as drafts:
        return list(islice(drafts, N_DRAFTS))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, repeat_penalty=1.3), BIASED], ids=str)
@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize("places", sorted(PLACES))
@pytest.mark.sample(1)
def test_the_cpus_drafts(model: Model, cpu: Executor, places: str, trimmed: bool, params: SamplingParams) -> None:
    executor = on_stand_in(*model, plan_of(model, places), wrap=watched)
    for seed in range(4):
        expected = drafts_of(cpu, source_for(cpu, None, trimmed, seed), params, seed)
        found = drafts_of(executor, source_for(executor, lambda: executor, trimmed, seed), params, seed)
        assert [draft.token_id for draft in found] == [draft.token_id for draft in expected]
        assert len(found) == N_DRAFTS
        close = pytest.approx([draft.confidence for draft in expected], rel=0.05)
        assert [draft.confidence for draft in found] == close
    executor.close()


def by_text(tokens: list[Any]) -> list[Any]:
    """Texts take turns, by tokens or by steps."""
    return sorted(tokens, key=lambda token: (token.sequence, token.position))


def exact_text(executor: Executor, source: DraftHeadSource, params: SamplingParams, counts: DraftCounts) -> list[Any]:
    how = Drafting(0, 4, FixedThreshold(0.0), None, (source,))
    return list(generate_exact(executor, PROMPTS, params, ENDING, str, lambda: 0.0, how, counts))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=str)
@pytest.mark.parametrize("places", sorted(PLACES))
@pytest.mark.sample(1)
def test_what_crosses_for_a_draft_is_an_id_and_how_sure_it_is(
    model: Model, places: str, params: SamplingParams
) -> None:
    """And the embedding of the token before where the model's is on the CPU; never a state that was verified, nor
    logits."""
    executor = on_stand_in(*model, plan_of(model, places), wrap=watched)
    link: Any = executor.machine.link
    expected = list(generate(executor, PROMPTS, params, ENDING, str, lambda: 0.0))
    source, counts = source_for(executor, lambda: executor), DraftCounts()
    source.close(0)  # opens the layer, which warms up
    link.transfers.clear()
    assert by_text(exact_text(executor, source, params, counts)) == by_text(expected)
    (origin,) = counts.statistics(executor.spec.n_layers, 0).origins
    names = Counter(name for name, _ in link.transfers)
    assert names["drafts"] == origin.n_drafted > 30
    assert {n_bytes for name, n_bytes in link.transfers if name == "drafts"} == {8}
    embeds_on_gpu = executor.plan.decode_placements[0] == "gpu"
    assert embeds_on_gpu == (places == "all")
    assert set(names) - {"hidden states", "logits"} == {"drafts"} | (set() if embeds_on_gpu else {"draft embedding"})
    assert names["logits"] == counts.n_passes + len(PROMPTS)
    embedded = sum(n_bytes for name, n_bytes in link.transfers if name == "draft embedding")
    n_guesses = origin.n_drafted + sum(map(len, PROMPTS)) + len(expected)
    assert embedded <= n_guesses * executor.spec.hidden_size * FLOAT_BYTES
    executor.close()


def test_it_takes_the_plans_memory_and_gives_it_back(model: Model) -> None:
    """What is allocated there is no more than what HeadCosts says."""
    spec = model[0]
    head = random_head(spec, 0)
    assert head.draft_token_ids is not None
    facts = DraftHeadFacts(head.spec, len(head.draft_token_ids), False, (0.5,))
    costs = HeadCosts(facts, spec, reference_profile(LAPTOP), 1)
    n_bytes = costs.memory_bytes(CONTEXT_TOKENS, on_gpu=True)
    executor = on_stand_in(*model, plan_of(model, n_bytes=n_bytes))
    source, gpu = source_for(executor, lambda: executor), executor.machine.gpu
    assert gpu is not None and held_bytes(gpu)[DRAFT_HEAD] == n_bytes
    drafts_of(executor, source, GREEDY, 0)
    (beside,) = executor.machine.opened_beside
    inner: Any = beside.inner  # type: ignore[attr-defined]
    weights = sum(each.matrix.tiles.nbytes + each.matrix.scales.nbytes for each in inner._resident.matrices.values())
    states = sum(piece.nbytes for piece in source._sequences[0].states._pieces)
    rows: Any = source.end.vocabulary
    assert 0 < weights + states + inner.cache.n_bytes + rows.rows.n_bytes <= n_bytes
    trimmed, whole = (
        costs.rates("a head"),
        replace(costs, facts=DraftHeadFacts(head.spec, spec.vocab_size, False, (0.5,))),
    )
    assert trimmed.by_gpu is not None and trimmed.by_gpu.head_rows_bytes == whole.rates("a head").head_rows_bytes == 0
    assert trimmed.head_rows_bytes >= rows.rows.n_bytes
    executor.close()
    assert held_bytes(gpu) == {} and inner.cache.n_bytes == 0


def test_another_plan_takes_the_head_along(model: Model) -> None:
    """From the GPU to the CPU and back while texts are generated, which do not change."""
    with_room = plan_of(model)
    plans = [replace(with_room, memory=with_room.memory[:-1]), with_room]
    executor = ReplanningExecutor(with_room, None, partial(on_stand_in, *model), pytest.fail)
    source = source_for(executor, lambda: executor.inner)
    expected = list(generate(executor, PROMPTS, SAMPLED, ENDING, str, lambda: 0.0))
    how, counts, devices = Drafting(0, 4, FixedThreshold(0.0), None, (source,)), DraftCounts(), []
    found = []
    for token in generate_exact(executor, PROMPTS, SAMPLED, ENDING, str, lambda: 0.0, how, counts):
        found.append(token)
        if len(found) in (20, 40):
            executor._change(plans[len(devices)], executor._lengths())
            layer = source._layer_now()
            assert layer is not None
            devices.append((layer._on_gpu, len(executor.inner.machine.opened_beside)))
    assert by_text(found) == by_text(expected) and devices == [(False, 0), (True, 1)]
    assert counts.statistics(executor.spec.n_layers, 0).origins[0].n_drafted > 30
    executor.close()


@pytest.mark.parametrize(
    ("seam", "at", "replaces"),
    [("draft_rows", 1, True), ("draft_rows", 3, True), ("run", 1, True), ("run", 2, False), ("run", 8, True)],
)
@pytest.mark.sample(1)
def test_the_plan_may_be_replaced_inside_a_draft(model: Model, seam: str, at: int, replaces: bool) -> None:
    """Where the model chooses a draft, and where it embeds a token for the head; not while it reads a prompt."""
    plan, warnings = plan_of(model), list[str]()
    smaller = replace(plan, memory=plan.memory[:-1])
    executor = ReplanningExecutor(plan, lambda *_: smaller, partial(on_stand_in, *model), warnings.append)
    expected = list(generate(executor, PROMPTS, SAMPLED, ENDING, str, lambda: 0.0))
    first: Any = executor.inner
    inner, calls = getattr(first, seam), list[int]()

    def failing(*arguments: Any) -> Any:
        if seam == "draft_rows" or not arguments[2]:
            calls.append(len(calls) + 1)
            if calls[-1] == at:
                raise DeviceMemoryError("the GPU is full.")
        return inner(*arguments)

    setattr(first, seam, failing)
    source, counts = source_for(executor, lambda: executor.inner), DraftCounts()
    assert by_text(exact_text(executor, source, SAMPLED, counts)) == by_text(expected)
    assert (executor.inner is not first) == (len(calls) == at) == bool(warnings) == replaces
    executor.close()


@pytest.mark.parametrize("part", ["opening", "warm-up"])
@pytest.mark.sample(1)
def test_a_head_that_finds_no_memory_costs_its_drafts_alone(model: Model, part: str) -> None:
    """It is tried once, and what was opened of it is given back."""
    opened, warnings = list[Any](), list[str]()

    def full(*_: Any) -> Any:
        raise DeviceMemoryError("the GPU is full.")

    def without_room(machine: Machine) -> Machine:
        open_beside: Any = machine.open_beside

        def failing(*arguments: Any) -> Any:
            opened.append(open_beside(*arguments))
            if part == "opening":
                full()
            opened[-1].inner.forward = full
            return opened[-1]

        return replace(machine, open_beside=failing)

    executor = on_stand_in(*model, plan_of(model), wrap=without_room)
    with pytest.raises(DeviceMemoryError):
        opener_for(executor, lambda: executor).open()
    opened.clear()
    source = source_for(executor, lambda: executor, warn=warnings.append)
    expected = list(generate(executor, PROMPTS, SAMPLED, ENDING, str, lambda: 0.0))
    assert by_text(exact_text(executor, source, SAMPLED, DraftCounts())) == by_text(expected)
    assert warnings == ["the GPU is full. Drafting without the draft head."]
    assert len(opened) == 1 and executor.machine.opened_beside == []
    assert part == "opening" or opened[0].inner.cache.n_bytes == 0
    executor.close()


def test_states_that_find_no_memory_are_the_devices_error(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = on_stand_in(*model, plan_of(model))
    source = source_for(executor, lambda: executor)

    def rows(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(StateRows, "rows", rows)
    with pytest.raises(DeviceMemoryError):
        source.read_prompt(0, 0, [1, 2, 3], torch.zeros(3, executor.spec.hidden_size))
    executor.close()


def test_on_the_same_machine_another_plan_has_another_layer(model: Model, cpu: Executor) -> None:
    """On a CPU that is traced, where what is closed with a plan are its threads."""
    machine = host_machine()
    plans: list[Any] = [SimpleNamespace(machine=machine, plan=SimpleNamespace(draft_device="cpu")) for _ in range(2)]
    running = plans[:1]
    opener = opener_for(cpu, lambda: running[0])
    first = opener()
    assert opener() is first
    running[0] = plans[1]
    assert opener() is not first
