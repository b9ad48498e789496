"""A second model as a draft source: full mode's tokens whatever it drafts, wherever it runs; no token is read twice."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import DeviceMemoryError
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import BlockKind, decoder_blocks
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.memory import DRAFT_MODEL, MemoryTerm
from hetero_ee.runtime.devices.machine import BESIDE_ROWS
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.replanning import ReplanningExecutor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.head_check import check_draft_model
from hetero_ee.speculation.sources.draft_model import DraftModelRunner, DraftModelSource
from hetero_ee.speculation.sources.draft_model_opening import DraftModel, DraftModelOpener
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee_profiles.reference import reference_profile
from tests.device_support import held_bytes
from tests.drafted_generation import generate_exact
from tests.emulation import LAPTOP, emulated, planned
from tests.executor_support import Model, model_of, on_kernels
from tests.stand_in_machine import on_stand_in

CONTEXT_TOKENS, VOCABULARY = 256, 131
PROMPTS = [[1, 17, 30, 3, 99, 42, 42], [7, 12]]
ENDING = Ending(frozenset(), CONTEXT_TOKENS)
SAMPLINGS = {
    "greedy": SamplingParams(40),
    "sampled": SamplingParams(40, temperature=0.8, seed=5, top_k=30),
    "biased": SamplingParams(40, presence_penalty=2.0, frequency_penalty=1.0, logit_bias={7: 3.0}),
}
HALF = ((r"layers\.0\..*", "gpu"), ("layers.*|embedding", "cpu"), ("head", "gpu"))
NO_TOKENIZER: Any = None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The target, and models that draft for it: itself, one that knows nothing, and smaller and larger vocabularies."""
    folder = tmp_path_factory.mktemp("models")
    made = {"itself": model_of("llama-tied", "int4", folder / "target")}
    for name, n_tokens in {"another": VOCABULARY, "fewer": VOCABULARY - 9, "more": VOCABULARY + 9}.items():
        made[name] = model_of("qwen3", "int4", folder / name, num_hidden_layers=1, vocab_size=n_tokens)
    return made


def draft_model(models: dict[str, Model], name: str) -> DraftModel:
    return DraftModel(name, *models[name], NO_TOKENIZER)


def source_of(model: DraftModel, executor: Executor, running: Any = None, warn: Any = pytest.fail) -> DraftModelSource:
    return DraftModelSource(DraftModelOpener(model, executor, running, warn), warn)


def plan_of(spec: Any, device: str, n_bytes: int = 2**20) -> Plan:
    """Half of the layers on the GPU, and the draft model on this device."""
    plan = planned(spec, overrides=HALF, context_tokens=CONTEXT_TOKENS)
    return replace(plan, memory=(*plan.memory, MemoryTerm(device, DRAFT_MODEL, n_bytes)))


def texts(executor: Executor, params: SamplingParams, *drafting: Any) -> list[Any]:
    """Each prompt's tokens, in full mode or with this drafting."""
    way: Any = generate_exact if drafting else generate
    found = way(executor, PROMPTS, params, ENDING, str, lambda: 0.0, *drafting)
    return sorted(found, key=lambda token: (token.sequence, token.position))


def drafting_by(source: DraftModelSource) -> Drafting:
    return Drafting(0, 4, FixedThreshold(0.0), None, (source,))


@pytest.fixture(params=["cpu", "emulated cpu", "emulated gpu", "gpu"])
def opened(request: pytest.FixtureRequest, models: dict[str, Model], kernels: Any) -> Iterator[tuple[Executor, Any]]:
    """The target's executor, and what runs its plan."""
    model, where = models["itself"], request.param
    if where == "cpu":
        alone = on_kernels(model)
        yield alone, None
        alone.close()
        return
    plan = plan_of(model[0], where.split()[-1])
    planned_one = on_stand_in(*model, plan) if where == "gpu" else emulated(*model, plan)
    yield planned_one, lambda: planned_one
    planned_one.close()


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
@pytest.mark.parametrize("drafts", ["itself", "another", "fewer", "more"])
@pytest.mark.sample(6)
def test_texts_are_full_modes(
    models: dict[str, Model], opened: tuple[Executor, Any], drafts: str, sampling: str
) -> None:
    executor, running = opened
    params, counts = SAMPLINGS[sampling], DraftCounts()
    expected, warnings = texts(executor, params), list[str]()
    source = source_of(draft_model(models, drafts), executor, running, warnings.append)
    assert texts(executor, params, drafting_by(source), counts) == expected
    (origin,) = counts.statistics(executor.spec.n_layers, 0).origins
    assert origin.n_drafted > 20
    if drafts == "itself":
        assert origin.n_accepted > 0.6 * origin.n_checked
    assert all("which this model does not have" in warning for warning in warnings)


def test_each_token_is_read_once(models: dict[str, Model], kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right drafts stay in the draft model's cache, and a prompt is read in pieces."""
    executor, batches = on_kernels(models["itself"]), list[Batch]()
    read = DraftModelRunner.read
    monkeypatch.setattr(DraftModelRunner, "read", lambda self, batch: batches.append(batch) or read(self, batch))
    source = source_of(draft_model(models, "itself"), executor)
    prompt = [number % VOCABULARY for number in range(BESIDE_ROWS + 5)]
    drafted = Drafting(0, 4, FixedThreshold(0.0), None, (source,))
    ending = Ending(frozenset(), executor.cache.max_tokens)
    tokens = list(generate_exact(executor, [prompt], SamplingParams(9), ending, str, lambda: 0.0, drafted))
    read_at = [position for batch in batches for position in batch.positions]
    assert len(tokens) == 9 and [len(batch) for batch in batches[:2]] == [BESIDE_ROWS, 5]
    assert len(read_at) <= len(prompt) + len(tokens) + 3  # at most a last draft of each of three steps twice
    executor.close()


def test_it_drafts_nothing_beyond_its_context_or_vocabulary(models: dict[str, Model], kernels: Any) -> None:
    executor = on_kernels(models["itself"])
    spec, weights = models["fewer"]
    short = DraftModel("short", replace(spec, max_context_tokens=4), weights, NO_TOKENIZER)
    choose: Any = lambda state, end, history, by: by.draft(state, [], end)  # noqa: E731
    assert list(source_of(short, executor).drafts(0, [1, 2, 3, 4, 5], choose)) == []
    fewer = source_of(draft_model(models, "fewer"), executor)
    assert list(fewer.drafts(0, [1, VOCABULARY - 1], choose)) == []
    executor.close()


def test_it_moves_with_the_plan(models: dict[str, Model], kernels: Any) -> None:
    """From the GPU to the CPU and back while texts are generated, which do not change."""
    model = models["itself"]
    plans = [plan_of(model[0], device) for device in ("cpu", "gpu")]
    executor = ReplanningExecutor(plans[1], None, partial(on_stand_in, *model), pytest.fail)
    source = source_of(draft_model(models, "itself"), executor, lambda: executor.inner)
    expected, found, places = texts(executor, SAMPLINGS["greedy"]), list[Any](), list[bool]()
    way = generate_exact(
        executor, PROMPTS, SAMPLINGS["greedy"], ENDING, str, lambda: 0.0, drafting_by(source), DraftCounts()
    )
    for token in way:
        found.append(token)
        if len(found) in (20, 40):
            executor._change(plans[len(places)], executor._lengths())
            runner = source._runner_now()
            assert runner is not None
            places.append(runner.head_on_gpu)
    assert sorted(found, key=lambda token: (token.sequence, token.position)) == expected and places == [False, True]
    executor.close()


def test_it_fits_the_memory_that_the_plan_reserves(models: dict[str, Model], kernels: Any) -> None:
    model, drafts = models["itself"], draft_model(models, "another")
    n_bytes = drafts.memory_bytes(CONTEXT_TOKENS, on_gpu=True)
    executor = on_stand_in(*model, plan_of(model[0], "gpu", n_bytes))
    opener = DraftModelOpener(drafts, executor, lambda: executor, pytest.fail)
    assert opener() is not None and executor.machine.gpu is not None
    assert held_bytes(executor.machine.gpu)[DRAFT_MODEL] == n_bytes
    (beside,) = executor.machine.opened_beside
    inner: Any = beside.inner  # type: ignore[attr-defined]
    weights = sum(each.matrix.tiles.nbytes + each.matrix.scales.nbytes for each in inner._resident.matrices.values())
    assert 0 < weights + inner.cache.n_bytes <= n_bytes
    executor.close()


def test_without_memory_only_its_drafts_are_lost(models: dict[str, Model], kernels: Any) -> None:
    def without_room(machine: Any) -> Any:
        def full(*_: Any) -> Any:
            raise DeviceMemoryError("the GPU is full.")

        return replace(machine, open_beside=full)

    model, warnings = models["itself"], list[str]()
    executor = on_stand_in(*model, plan_of(model[0], "gpu"), wrap=without_room)
    expected = texts(executor, SAMPLINGS["greedy"])
    source = source_of(draft_model(models, "itself"), executor, lambda: executor, warnings.append)
    assert texts(executor, SAMPLINGS["greedy"], drafting_by(source), DraftCounts()) == expected
    assert warnings == ["the GPU is full. Drafting without the draft model."]
    executor.close()


def test_a_draft_takes_the_time_that_the_planner_reckons(models: dict[str, Model], kernels: Any) -> None:
    """On an emulated machine, at the context at which a draft's seconds are reckoned."""
    (spec, weights), timeline = models["itself"], Timeline()
    plan = plan_of(spec, "gpu")
    executor = emulated(spec, weights, plan, timeline=timeline)
    drafts = DraftModel("itself", replace(spec, max_context_tokens=1024), weights, NO_TOKENIZER)
    rates = drafts.rates(reference_profile(LAPTOP), 1, (0.5,))
    opener = DraftModelOpener(drafts, executor, lambda: executor, pytest.fail)
    runner = opener()
    assert runner is not None and rates.by_gpu is not None and rates.by_gpu.draft_s != rates.draft_s
    runner.cache.open(0)
    runner.cache.max_tokens = 1024
    for first in range(0, 512, BESIDE_ROWS):
        runner.read(Batch.of_sequence(0, first, [1] * BESIDE_ROWS))
    n_before = len(timeline.spans)
    state = runner.read(Batch.of_sequence(0, 512, [1]))
    runner.draft(state, [DraftNoise(0.0, 0, 0, 513)], DraftEnd())
    seconds = sum(span.end_s - span.start_s for span in timeline.spans[n_before:] if span.name != "other work")
    assert seconds == pytest.approx(rates.by_gpu.draft_s, rel=0.01)
    executor.close()


def test_the_check_counts_right_drafts(models: dict[str, Model], kernels: Any) -> None:
    executor = on_kernels(models["itself"])
    found = check_draft_model(draft_model(models, "itself"), executor, PROMPTS[0])
    assert found.acceptance == pytest.approx((1.0,) * 4, abs=0.1) and found.n_tokens > 60  # of 64; its cache is fp16
    assert check_draft_model(draft_model(models, "another"), executor, PROMPTS[0]).acceptance[0] < 0.3
    assert executor.cache.sequences == ()
    executor.close()


def test_the_check_needs_some_context(models: dict[str, Model], kernels: Any) -> None:
    executor = on_kernels(models["itself"])
    executor.cache.max_tokens = 40
    assert check_draft_model(draft_model(models, "itself"), executor, PROMPTS[0]).n_tokens > 25
    executor.cache.max_tokens = 10
    with pytest.raises(UsageError, match="A context of 10 tokens is too short"):
        check_draft_model(draft_model(models, "itself"), executor, PROMPTS[0])
    executor.close()


def test_without_a_check_the_mode_is_still_the_callers(stories260k: Any, kernels: Any) -> None:
    options: Any = {"profile": LAPTOP, "emulate": True, "context_tokens": 12, "gpu_layers": 0, "quantizer": "rtn"}
    with (
        pytest.raises(UsageError, match="exact mode needs a model whose drafts were measured"),
        pytest.warns(UserWarning, match="A context of 12 tokens is too short to check drafts"),
    ):
        Engine.from_pretrained(stories260k, draft_model=stories260k, mode="exact", **options)


def test_a_table_of_per_layer_embeddings_takes_no_memory_of_the_gpu(tmp_path: Path) -> None:
    spec, weights = model_of("gemma4-e", "int4", tmp_path)
    table = next(block for block in decoder_blocks(spec) if block.kind is BlockKind.TABLE)
    found = list[str]()

    def open_beside(spec: Any, weights: Any, blocks: Any, max_tokens: int) -> Any:
        found.extend(block.name for block in blocks)

    executor: Any = SimpleNamespace(spec=spec, cache=SimpleNamespace(max_tokens=64))
    machine: Any = SimpleNamespace(open_beside=open_beside, opened_beside=[])
    with suppress(AttributeError):  # there is no executor
        DraftModelOpener(DraftModel("e", spec, weights, NO_TOKENIZER), executor, None, pytest.fail)._opened(
            machine, on_gpu=True
        )
    assert "head" in found and table.name not in found


class Pieces:
    def __init__(self, *pieces: str | None) -> None:
        self._pieces = pieces

    def pieces(self) -> list[str | None]:
        return list(self._pieces)


@pytest.mark.parametrize(
    ("mine", "n_mine", "problem"),
    [
        ("a b c d e f g h", 8, None),
        ("A B C D E f g h", 8, None),  # special tokens may be called differently
        ("a b c d e f g h i j", 10, None),
        ("a b c d e f g x", 8, "calls token 7 'x', the model 'h'"),
        ("a b c d e f g h", 200, "has 200 tokens and the model 8"),
    ],
)
def test_vocabularies_are_compared(mine: str, n_mine: int, problem: str | None, models: dict[str, Model]) -> None:
    spec, weights = models["itself"]
    tokenizer: Any = Pieces(*mine.split())
    target: Any = Pieces(*"abcdefgh")
    model = DraftModel("small", replace(spec, vocab_size=n_mine), weights, tokenizer)
    if problem is None:
        model.check_vocabulary(target, 8)
        return
    with pytest.raises(UsageError, match=problem):
        model.check_vocabulary(target, 8)


def test_a_head_and_a_model_contradict_each_other_before_anything_is_downloaded(stories260k: Any) -> None:
    with pytest.raises(UsageError, match="draft_head and draft_model both compute drafts"):
        Engine.from_pretrained(stories260k, draft_head="org/head", draft_model=stories260k)


def test_the_engine_drafts_with_it_where_the_plan_says(stories260k: Any, kernels: Any) -> None:
    """On an emulated laptop, whose GPU has room: the same text as without it, most drafts right."""
    options: Any = {"profile": LAPTOP, "emulate": True, "context_tokens": 256, "gpu_layers": 2}
    with Engine.from_pretrained(stories260k, mode="full", **options) as full:
        expected = full.generate("Once upon a time", max_new_tokens=32)
    with Engine.from_pretrained(stories260k, draft_model=stories260k, mode="exact", **options) as drafting:
        found = drafting.generate("Once upon a time", max_new_tokens=32)
        assert drafting.plan is not None and drafting.plan.draft_device == "gpu"
        assert drafting.draft_statistics is not None and drafting.draft_statistics.n_accepted > 5
        assert any(term.name == DRAFT_MODEL for term in drafting.plan.memory)
    assert found.token_ids == expected.token_ids


def test_mode_specee_takes_its_candidates_from_it(demo: Any, kernels: Any) -> None:
    """The model itself names the token that follows, so that no token which exits early differs."""
    options: Any = {"profile": LAPTOP, "emulate": True, "context_tokens": 256, "kv_type": "fp16"}
    with Engine.from_pretrained(demo, mode="full", **options) as full:
        expected = full.generate("Once upon a time", max_new_tokens=24)
    with Engine.from_pretrained(demo, draft_model=demo, mode="specee", **options) as early:
        found = early.generate("Once upon a time", max_new_tokens=24)
        assert early.exits is not None and early.exits.candidates is not None
    assert sum(map(int.__eq__, found.token_ids, expected.token_ids)) >= 20
