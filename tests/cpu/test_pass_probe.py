"""Passes timed part by part: with kernels whose times are known, the parts are those times and add up to the pass."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import pytest
import torch

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.lanes import pass_time
from hetero_ee.planning.times.prompts import Placements, prompt_s
from hetero_ee.profiling import cpu as cpu_profiling
from hetero_ee.profiling.cpu import measured_cpu, probed_model, speed_since
from hetero_ee.profiling.pass_probe import N_LONG_HEADS, PassSamples, probe_pass
from hetero_ee.profiling.preset import MOST_PASSES, QUICK, USUAL_PASSES, PassSampling, product_shapes
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.weights.random_weights import random_weights
from hetero_ee.weights.weight import TileWeight
from hetero_ee_cpu_ops.attention.attention import Attention
from hetero_ee_profiles.hardware import MEASURED, HardwareProfile
from hetero_ee_profiles.measurement import Origin
from hetero_ee_profiles.reference import derived_profile
from tests.families import config_of
from tests.shipped import DATA_SHEETS
from tests.stand_in_cpu import BYTE_S, EMBED_S, PLACE_S, PLACES_S, POSITION_S, WRITE_S, WorkClock

ORIGIN = Origin("a test", "2026-11-21", "versions")
N_LAYERS, MAX_TOKENS = 3, 600
USUALLY = PassSampling(0.0)
POINTS = [(1, 16), (1, 300), (4, 16), (20, 20), (20, 90)]


def spec_of(family: str, n_layers: int = N_LAYERS) -> ModelSpec:
    spec = read_spec(config_of(family))
    return replace(spec, n_layers=n_layers, sliding_windows=(None,) * n_layers)


@pytest.fixture
def executor() -> Iterator[CpuExecutor]:
    spec = spec_of("llama")
    made = CpuExecutor(spec, random_weights(spec), MAX_TOKENS, 1)
    yield made
    made.close()


def parts_s(found: PassSamples) -> float:
    """All of them together."""
    layer_s = found.besides_attention_s + median(found.attention_s)
    return found.n_layers * layer_s + found.besides_layers_s


@pytest.mark.parametrize("m, context_tokens", [(1, 16), (1, 300), (4, 16)])
def test_parts_are_what_the_kernels_take_and_add_up(
    executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch, m: int, context_tokens: int
) -> None:
    clock = WorkClock(monkeypatch)
    found = probe_pass(executor, m, context_tokens, USUALLY, clock)
    assert found.pass_s == pytest.approx([parts_s(found)] * USUAL_PASSES)
    assert found.layer_s == pytest.approx([WRITE_S + PLACE_S] * USUAL_PASSES)
    assert found.executor_s == pytest.approx([PLACE_S] * USUAL_PASSES)
    assert found.outside_s == pytest.approx([EMBED_S + PLACES_S] * USUAL_PASSES)
    positions = sum(range(context_tokens - m + 1, context_tokens + 1))
    assert found.attention_s == pytest.approx([positions * POSITION_S] * USUAL_PASSES)
    for shape in product_shapes(executor.spec):
        key = shape.layout, shape.n_rows, shape.n_columns
        seconds = found.head_s if key == found.head else found.products[key]
        assert seconds[-1] == pytest.approx(clock.product_s(shape.n_bytes, m))
        assert key == found.head or found.per_layer[key] == shape.n_layers / N_LAYERS


def test_the_head_of_many_rows_is_timed_apart(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_pass(executor, 20, 20, USUALLY, WorkClock(monkeypatch))
    head_bytes = product_shapes(executor.spec)[-1].n_bytes
    assert found.head_s == pytest.approx([20 * BYTE_S * head_bytes] * N_LONG_HEADS)
    assert found.pass_s == pytest.approx([parts_s(found) + BYTE_S * head_bytes] * USUAL_PASSES)


@pytest.mark.parametrize("m", [1, 20])
def test_looking_at_the_clock_is_not_counted(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    look_s = 1e-7
    clock = WorkClock(monkeypatch, look_s)
    found = probe_pass(executor, m, 20, USUALLY, clock)
    for shape in product_shapes(executor.spec)[:-1]:
        seconds = found.products[shape.layout, shape.n_rows, shape.n_columns]
        assert seconds[-1] == pytest.approx(clock.product_s(shape.n_bytes, m))
    if m == 1:  # some twenty looks a layer by the stop watches, and next to none of them is left
        assert found.layer_s[-1] == pytest.approx(WRITE_S + PLACE_S, abs=2.1 * look_s)


def test_short_passes_are_repeated_for_some_time(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WorkClock(monkeypatch)
    once_s = probe_pass(executor, 1, 16, USUALLY, clock).pass_s[0]
    n_passes = len(probe_pass(executor, 1, 16, PassSampling(2 * 20.5 * once_s), clock).pass_s)
    assert n_passes == 21  # with stop watches and without
    assert len(probe_pass(executor, 1, 16, PassSampling(1e9), clock).pass_s) == MOST_PASSES


def test_keys_and_values_are_written_before(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were never written are all the same page, which sits in the cache."""
    real, unwritten = Attention.attend, []

    def attend(self: Attention, *arguments: object, **options: object) -> object:
        for layer in range(N_LAYERS):
            unwritten.extend(int((part == 0).all(-1).sum()) for part in executor.cache.read(layer, 0, 0, 299))
        return real(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Attention, "attend", attend)
    probe_pass(executor, 1, 300, USUALLY, lambda: 0.0)
    assert len(unwritten) > 2 * N_LAYERS and not any(unwritten)


def test_the_executor_is_as_before(executor: CpuExecutor) -> None:
    executor.cache.open(0)
    before = executor.logits(Batch.of_sequence(0, 0, [1, 2, 3]), (2,))
    probe_pass(executor, 4, 16, USUALLY, lambda: 0.0)
    with pytest.raises(ValueError, match="can't follow"):
        probe_pass(executor, 1, MAX_TOKENS + 1, USUALLY, lambda: 0.0)
    executor.cache.truncate(0, 0)
    assert torch.equal(executor.logits(Batch.of_sequence(0, 0, [1, 2, 3]), (2,)), before)
    executor.cache.check()
    assert executor.cache.sequences == (0,)


def profile_of(spec: ModelSpec, max_bytes: int, clock: WorkClock) -> HardwareProfile:
    model = probed_model(spec, product_shapes(spec), max_bytes, MAX_TOKENS)
    times = measured_cpu(model, POINTS, 1, 2**30, replace(QUICK, pass_sample_s=0.0), 1e9, ORIGIN, clock)
    return replace(derived_profile(DATA_SHEETS[0], "2026-11-21"), kind=MEASURED, cpu=(times,), gpu=None, link=None)


@pytest.mark.parametrize("max_bytes", [2**30, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_a_measured_profile_predicts_the_passes_that_it_was_measured_from(
    monkeypatch: pytest.MonkeyPatch, family: str, max_bytes: int
) -> None:
    """Of all layers or of one, and with weights that a long context has pushed out of the caches."""
    monkeypatch.setattr(cpu_profiling, "_read_bytes_per_s", lambda *arguments: [1e9])
    spec, clock = spec_of(family), WorkClock(monkeypatch)
    costs, parts = Costs(spec, profile_of(spec, max_bytes, clock), 1), model_parts(spec, KV_TYPE)
    for m, context_tokens in POINTS:
        clock.kept = context_tokens - m
        products_s = sum(s.n_layers * clock.product_s(s.n_bytes, m) for s in product_shapes(spec))
        attention_s = POSITION_S * sum(range(context_tokens - m + 1, context_tokens + 1))
        expected_s = products_s + N_LAYERS * (attention_s + WRITE_S + PLACE_S) + EMBED_S + PLACES_S
        found = pass_time(costs, parts, [Placement.CPU] * len(parts), m, context_tokens)
        assert found.seconds == pytest.approx(expected_s, rel=1e-3)


@pytest.mark.parametrize("m, before", [(20, 0), (40, 100), (100, 0), (100, 400)])
def test_longer_chunks_in_sliding_windows_are_predicted(monkeypatch: pytest.MonkeyPatch, m: int, before: int) -> None:
    """As of Gemma 3: two layers of three see 30 positions. Chunks of 20 tokens were measured, without windows."""
    monkeypatch.setattr(cpu_profiling, "_read_bytes_per_s", lambda *arguments: [1e9])
    spec, clock = spec_of("gemma3"), WorkClock(monkeypatch)
    windows = (30, 30, None)
    profile, parts = profile_of(spec, 2**30, clock), model_parts(replace(spec, sliding_windows=windows), KV_TYPE)
    seen = [min(position, window or position) for window in windows for position in range(before + 1, before + m + 1)]
    found = sum(
        part.cost.state.read_s(profile.cpu[0], m, before + m, KV_TYPE) for part in parts if part.cost.state is not None
    )
    assert found == pytest.approx(POSITION_S * sum(seen), rel=0.02)


@pytest.mark.parametrize("max_bytes", [2**30, 1])
def test_a_whole_prompt_takes_what_its_parts_were_measured_to_take(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """In chunks of another size than the measured ones, with sliding windows and a vocabulary that is cut."""
    monkeypatch.setattr(cpu_profiling, "_read_bytes_per_s", lambda *arguments: [1e9])
    monkeypatch.setattr(cpu_profiling, "MIN_HEAD_BYTES", 2**18)
    monkeypatch.setattr(WorkClock, "product_s", lambda self, n_bytes, m: n_bytes * BYTE_S * m)
    spec, clock = replace(spec_of("gemma3"), vocab_size=2**14), WorkClock(monkeypatch)
    profile, spec = profile_of(spec, max_bytes, clock), replace(spec, sliding_windows=(30, 30, None))
    parts, n_tokens, chunk = model_parts(spec, KV_TYPE), 200, 60
    everywhere = [Placement.CPU] * len(parts)
    predicted_s = prompt_s(Costs(spec, profile, 1), parts, Placements(everywhere, everywhere), n_tokens, chunk)
    executor = CpuExecutor(spec, random_weights(spec), MAX_TOKENS, 1)
    start_s, sequence = clock.now_s, executor.cache.open_new()
    for first in range(0, n_tokens, chunk):
        batch = Batch.of_sequence(sequence, first, [1] * min(chunk, n_tokens - first))
        hidden = executor.run(batch, None, range(spec.n_layers))
    executor.to_logits(hidden[-1:])
    executor.close()
    assert predicted_s == pytest.approx(clock.now_s - start_s, rel=0.02)


@pytest.mark.parametrize("n_kept, room", [(3, 3.0), (2, 2.9), (1, 1.0), (1, 0.0)])
def test_as_many_layers_as_there_is_room_for(n_kept: int, room: float) -> None:
    spec = spec_of("llama")
    *layer, head = product_shapes(spec)
    layer_bytes = sum(shape.n_bytes for shape in layer)
    model = probed_model(spec, [*layer, head], head.n_bytes + int(room * layer_bytes), 16)
    assert (model.spec.n_layers, len(model.spec.sliding_windows), model.n_layers) == (n_kept, n_kept, 3)
    matrices = sum(shape.n_bytes for shape in layer) * n_kept + head.n_bytes
    assert model.weights.n_bytes == pytest.approx(matrices, rel=0.05)  # norms are weights too


def test_keys_and_values_need_room_too() -> None:
    spec = spec_of("llama")
    assert probed_model(spec, product_shapes(spec), 2**20, 16).spec.n_layers == 3
    assert probed_model(spec, product_shapes(spec), 2**20, 12_000).spec.n_layers == 1


def test_profiles_are_of_activations_of_one_term() -> None:
    """The planner counts others, and all plans of a model's shapes share a profile."""
    spec = replace(spec_of("llama"), activation_terms=2)
    model = probed_model(spec, product_shapes(spec), 2**20, 16)
    assert {each.n_terms for each in model.weights.matrices.values() if isinstance(each, TileWeight)} == {1}


def test_the_speed_since_then(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    then = profile.cpu[0].read_bytes_per_s.value
    monkeypatch.setattr(cpu_profiling, "probe_read_bytes_per_s", lambda *rest: [0.1, 0.5 * then, 9e99])
    assert speed_since(profile, profile.cpu[0].threads, lambda: 0.0) == pytest.approx(0.5)
