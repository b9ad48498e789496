"""What must hold of every plan, whatever the model, the machine and the wishes."""

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.schedule import WORTH_IT
from hetero_ee.planning.statistics import ExitRates, ExitStatistics, Statistics
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.memory import rounded
from hetero_ee_profiles.data_sheets import DataSheet
from hetero_ee_profiles.hardware import HardwareProfile, LinkTimes
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import derived_profile
from hetero_ee_profiles.units import GIB
from tests.published_exits import published_statistics
from tests.shipped import DATA_SHEETS

ROUNDING = 1 + 2e-2  # the places are within a hundredth of the best, so two of them are within two


def spec_of(n_layers: int = 32, hidden: int = 4096, ffn: int = 11008, tied: bool = False) -> ModelSpec:
    return read_spec(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": n_layers,
            "num_attention_heads": hidden // 128,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
        }
    )


specs = st.builds(
    spec_of,
    n_layers=st.integers(2, 40),
    hidden=st.sampled_from([1024, 2048, 4096, 5120]),
    ffn=st.sampled_from([2816, 5632, 11008, 13824]),
    tied=st.booleans(),
)
sheets = st.builds(
    DataSheet,
    name=st.just("drawn"),
    cpu_model=st.just("cpu"),
    n_cores=st.integers(2, 32),
    ghz=st.floats(2, 6),
    vector_bytes=st.sampled_from([32, 64]),
    has_dot=st.booleans(),
    ram_gib=st.integers(8, 128),
    ram_gb_s=st.floats(20, 100),  # if RAM is twice as fast as the GPU's memory, plans miss up to 7 %
    gpu_model=st.just("gpu"),
    vram_gib=st.integers(2, 48),
    vram_gb_s=st.floats(100, 2000),
    fp32_tflops=st.floats(2, 100),
    link_gb_s=st.floats(2, 64),
    disk_gb_s=st.floats(0.5, 10),
)
profiles = st.builds(derived_profile, sheets, date=st.just("2026-11-21"))


@st.composite
def statistics_of(draw: Any, n_layers: int) -> Statistics:
    exit_layers = sorted(draw(st.sets(st.integers(1, n_layers - 1), min_size=1, max_size=6)))
    rates = st.builds(ExitRates, exit_rate=st.floats(0, 1), precision=st.floats(0, 1))
    return Statistics(ExitStatistics("drawn", n_layers, {exit_layer: draw(rates) for exit_layer in exit_layers}))


@st.composite
def problems(draw: Any) -> tuple[ModelSpec, HardwareProfile, Limits, Statistics | None]:
    spec, profile = draw(specs), draw(profiles)
    limits = Limits(
        vram_margin_bytes=draw(st.integers(0, GIB)),
        context_tokens=draw(st.integers(16, 4096)),
        gpu_layers=draw(st.none() | st.integers(0, spec.n_layers)),
        ram_budget_bytes=draw(st.none() | st.integers(GIB, 64 * GIB)),
        kv_type=draw(st.sampled_from(["fp32", "fp16", "int8"])),
    )
    return spec, profile, limits, draw(st.none() | statistics_of(spec.n_layers))


def made(problem: tuple[ModelSpec, HardwareProfile, Limits, Statistics | None]) -> Plan | None:
    """The plan, None where the request is refused."""
    try:
        return plan(*problem)
    except UsageError:
        return None


@settings(max_examples=30)
@given(problems())
def test_budgets_hold_pins_hold_and_the_head_comes_first(problem: Any) -> None:
    spec, _, limits, _ = problem
    found = made(problem)
    if found is None:
        return
    assert found.n_bytes("gpu") <= found.vram_budget_bytes
    assert found.n_bytes("cpu") <= found.ram_budget_bytes
    on_gpu = {
        part.layer for part in found.parts if part.layer is not None and part.decode_placement in ("gpu", "stream")
    }
    assert not on_gpu or found.parts[-1].decode_placement == "gpu"
    if limits.gpu_layers is not None:
        for part in found.parts:
            if part.layer is not None:
                assert (part.decode_placement == "gpu") == (part.layer < limits.gpu_layers)
    assert found.parts[0].name == "embedding" and len(found.parts) == 2 * spec.n_layers + 2
    assert found.mode == "full" or problem[3] is not None
    assert from_json(Plan, to_json(found)) == found


@settings(max_examples=15)
@given(specs, profiles, st.data())
def test_more_memory_on_the_gpu_is_never_slower(spec: ModelSpec, profile: HardwareProfile, data: Any) -> None:
    assert profile.gpu is not None
    statistics = data.draw(st.none() | statistics_of(spec.n_layers))
    budgets = sorted(data.draw(st.lists(st.integers(0, profile.gpu.free_bytes), min_size=2, max_size=3)))
    plans = [
        made((spec, profile, Limits(vram_budget_bytes=budget, context_tokens=512), statistics)) for budget in budgets
    ]
    times = [found.prediction.request_s for found in plans if found is not None]
    for smaller, larger in itertools.pairwise(times):
        assert larger <= smaller * ROUNDING


@settings(max_examples=15)
@given(specs, profiles, st.floats(1, 10))
def test_a_faster_link_never_hurts(spec: ModelSpec, profile: HardwareProfile, factor: float) -> None:
    assert profile.link is not None
    slow, fast = (made((spec, replace(profile, link=link), Limits(context_tokens=1024), None)) for link in (
        profile.link, faster(profile.link, factor)))  # fmt: skip
    if slow is not None and fast is not None:
        assert fast.prediction.request_s <= slow.prediction.request_s * ROUNDING


def faster(link: LinkTimes, factor: float) -> LinkTimes:
    def scaled(figure: Any) -> Any:
        by = factor if figure.unit == "B/s" else 1 / factor
        return replace(figure, value=figure.value * by, p20=figure.p20 * by, p80=figure.p80 * by)

    return LinkTimes(*(scaled(getattr(link, name)) for name in LinkTimes.__slots__))


def test_more_layers_on_the_gpu_than_there_are_are_all_of_them() -> None:
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    found = [plan(spec_of(8), profile, Limits(gpu_layers=n)).sha256 for n in (8, 99, 2**20)]
    assert len(set(found)) == 1


def test_overrides_win_and_the_first_that_matches_counts() -> None:
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    limits = Limits(overrides=((r"layers\.3\.ffn", "cpu"), (r"layers\..*\.ffn", "stream"), ("head", "cpu")))
    found = {part.name: part.decode_placement for part in plan(spec_of(8), profile, limits).parts}
    assert found["layers.3.ffn"] == "cpu" and found["layers.4.ffn"] == "stream" and found["head"] == "cpu"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(vram_budget_bytes=100 * GIB), r"100\.00 GiB is more than the 7\.44 GiB"),
        (Limits(gpu_layers=32, vram_budget_bytes=GIB), r"needs \d\.\d\d GiB and the budget is 1\.00 GiB"),
        (Limits(ram_budget_bytes=2**20, vram_budget_bytes=GIB), "of RAM"),
        (Limits(vram_budget_bytes=0, overrides=((".*ffn", "gpu"),)), "pinned to gpu"),
        (Limits(mode="exact"), "drafts were measured"),
    ],
    ids=range(5),
)
def test_the_impossible_is_refused_with_numbers(limits: Limits, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(spec_of(), derived_profile(DATA_SHEETS[0], "2026-11-21"), limits)


def test_without_a_gpu_everything_is_on_the_cpu() -> None:
    profile = replace(derived_profile(DATA_SHEETS[1], "2026-11-21"), gpu=None, link=None)
    found = plan(spec_of(), profile)
    assert {part.decode_placement for part in found.parts} == {"cpu"} and found.n_bytes("gpu") == 0
    with pytest.raises(UsageError, match=r"has no GPU; drop vram_budget, or plan"):
        plan(spec_of(), profile, Limits(vram_budget_bytes=GIB, gpu_layers=3))
    assert plan(spec_of(), profile, Limits(gpu_layers=3)).sha256 == found.sha256
    assert any(reason.startswith("Nothing is on the GPU: this machine has none.") for reason in found.reasons)


def test_why_nothing_is_on_a_gpu_that_is_there() -> None:
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    for limits, why in ((Limits(gpu_layers=0), "-ngl 0 says so"), (Limits(vram_budget_bytes=0), "it has no budget")):
        found = plan(spec_of(), profile, limits)
        assert any(reason.startswith(f"Nothing is on the GPU: {why}") for reason in found.reasons)


def test_what_ram_cannot_hold_is_read_from_the_disk() -> None:
    profile = replace(derived_profile(DATA_SHEETS[1], "2026-11-21"), gpu=None, link=None)
    whole = plan(spec_of(), profile, Limits(context_tokens=512))
    short = plan(spec_of(), profile, Limits(context_tokens=512, ram_budget_bytes=2 * GIB))
    assert any(part.decode_placement == "disk" for part in short.parts) and short.n_bytes("cpu") <= 2 * GIB
    assert short.prediction.generated_tokens_per_s < whole.prediction.generated_tokens_per_s / 2


def test_exact_mode_is_planned_where_it_pays_and_declined_where_not() -> None:
    spec, profile = spec_of(), derived_profile(DATA_SHEETS[0], "2026-11-21")
    limits = Limits(vram_budget_bytes=3 * GIB, context_tokens=512)
    good = Statistics(ExitStatistics("good", 32, {12: ExitRates(0.8, 0.95)}))
    bad = Statistics(ExitStatistics("bad", 32, {12: ExitRates(0.8, 0.2)}))
    full, pays, declined = (plan(spec, profile, limits, statistics) for statistics in (None, good, bad))
    assert pays.mode == "exact" and pays.exit_layer is not None and pays.draft_length > 1
    assert pays.prediction.generated_tokens_per_s > 1.1 * full.prediction.generated_tokens_per_s
    assert declined.mode == "full" and full.prediction.other_mode_tokens_per_s is None
    other = declined.prediction.other_mode_tokens_per_s
    assert other is not None and other < full.prediction.generated_tokens_per_s / WORTH_IT
    assert replace(declined.prediction, other_mode_tokens_per_s=None) == full.prediction
    (reason,) = [reason for reason in declined.reasons if reason.startswith("Exact mode was declined")]
    assert f"with bad it would reach {other:.2f} tokens/s at best" in reason and "full mode" in reason
    assert pays.prediction.other_mode_tokens_per_s == pytest.approx(full.prediction.generated_tokens_per_s, rel=0.08)
    assert plan(spec, profile, replace(limits, mode="exact", draft_length=3), bad).draft_length == 3


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_lies_on_the_gpu_where_there_is_room(tied: bool) -> None:
    """A tied one takes none; tokens then enter without hidden states on the link."""
    spec, profile = spec_of(tied=tied), derived_profile(DATA_SHEETS[0], "2026-11-21")
    limits = Limits(context_tokens=512)
    free = plan(spec, profile, limits)
    on_cpu = plan(spec, profile, replace(limits, overrides=(("embedding", "cpu"),)))
    assert set(free.decode_placements) == {"gpu"} and on_cpu.decode_placements == ("cpu", *free.decode_placements[1:])
    taken = [term.n_bytes for term in free.memory if term.name == "embedding"]
    assert taken == ([] if tied else [rounded(free.parts[0].weight_bytes)])
    assert free.n_bytes("gpu") == on_cpu.n_bytes("gpu") + sum(taken)
    assert profile.link is not None
    saved_s = 1 / on_cpu.prediction.generated_tokens_per_s - 1 / free.prediction.generated_tokens_per_s
    assert saved_s == pytest.approx(profile.link.transfer.value)
    cramped = plan(spec, profile, replace(limits, vram_budget_bytes=on_cpu.n_bytes("gpu")))
    assert cramped.n_bytes("gpu") <= on_cpu.n_bytes("gpu") and set(cramped.decode_placements) == {"gpu"}
    assert (cramped.prefill_chunk_tokens < on_cpu.prefill_chunk_tokens) == (not tied)  # where the room comes from


def test_an_embedding_pinned_to_the_gpu_takes_room_from_layers() -> None:
    spec, profile = spec_of(), derived_profile(DATA_SHEETS[0], "2026-11-21")
    limits = Limits(context_tokens=512, vram_budget_bytes=5 * GIB // 2)
    free, pinned = (plan(spec, profile, replace(limits, overrides=pins)) for pins in ((), (("embedding", "gpu"),)))
    assert (free.decode_placements[0], pinned.decode_placements[0]) == ("cpu", "gpu")
    parts = [each.decode_placements.count("gpu") for each in (free, pinned)]
    assert parts[1] - 1 < parts[0] and pinned.n_bytes("gpu") <= 5 * GIB // 2
    with pytest.raises(UsageError, match="the embedding can't be streamed"):
        plan(spec, profile, replace(limits, overrides=(("embedding", "stream"),)))


def test_pins_to_streaming_keep_the_budget() -> None:
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    for pattern in (r"layers\.\d+\.ffn", r"layers\.\d+\.attention", r"layers\..*"):
        for budget in (GIB // 2, GIB, 3 * GIB):
            found = made((spec_of(), profile, Limits(vram_budget_bytes=budget, overrides=((pattern, "stream"),)), None))
            assert found is None or found.n_bytes("gpu") <= budget


def test_pinned_buffers_of_streamed_weights_are_counted() -> None:
    """Three of the largest part that is streamed, be it for prompts alone."""
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    for limits in (Limits(overrides=((".*attention", "stream"),)), Limits(vram_budget_bytes=3 * GIB)):
        found = plan(spec_of(), profile, limits)
        streamed = [
            part for part in found.parts if {part.decode_placement, part.prefill_placement} & {"stream", "visit"}
        ]
        terms = {term.name: term.n_bytes for term in found.memory if term.device == "cpu"}
        assert streamed and terms["pinned buffers"] == 3 * max(part.weight_bytes for part in streamed)
    assert "pinned buffers" not in [term.name for term in plan(spec_of(), profile, Limits(gpu_layers=0)).memory]


def test_little_ram_is_no_matter_where_the_gpu_holds_everything() -> None:
    profile = derived_profile(DATA_SHEETS[3], "2026-11-21")
    found = plan(spec_of(), profile, Limits(ram_budget_bytes=GIB))
    assert found.gpu_layers == 32 and found.n_bytes("cpu") <= GIB


def test_visiting_keys_and_values_are_counted() -> None:
    """A prompt's attention parts may visit the GPU with what they keep, or stay where they are."""
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    for budget in (2 * GIB, 3 * GIB, 4 * GIB):
        found = plan(spec_of(), profile, Limits(vram_budget_bytes=budget, context_tokens=4096))
        visiting = [part for part in found.parts if part.prefill_placement == "visit"]
        assert all(part.decode_placement == "cpu" for part in visiting) and found.n_bytes("gpu") <= budget
        buffers = [term.n_bytes for term in found.memory if term.name == "stream buffers"]
        assert not visiting or buffers[0] >= 2 * max(part.weight_bytes + part.kv_bytes for part in visiting)


def test_fewer_key_heads_and_smaller_types_take_less_time_on_paper() -> None:
    profile = derived_profile(DATA_SHEETS[0], "2026-11-21")
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8}
    config |= {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}
    rates = [
        plan(read_spec(config | {"num_key_value_heads": heads}), profile, Limits(kv_type=kind, gpu_layers=0))
        for heads, kind in ((32, "fp32"), (32, "fp16"), (8, "fp16"))
    ]
    times = [1 / found.prediction.generated_tokens_per_s for found in rates]
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize("timed", ["fp32", "fp16", "int8"])
def test_a_cache_of_another_type_than_was_timed_takes_time_by_its_bytes(timed: str) -> None:
    """Of measured profiles as of derived ones, on either device; of many rows the computing counts."""
    spec, profile = spec_of(8), derived_profile(DATA_SHEETS[0], "2026-11-21")
    assert profile.gpu is not None and profile.gpu.kv_type == "fp32"
    profile = replace(profile, kind="measured", cpu=tuple(map(timed_with(timed), profile.cpu)))
    profile = replace(profile, gpu=timed_with(timed)(derived_profile(DATA_SHEETS[0], "2026-11-21").gpu))
    token_bytes = {"fp32": 4 * 128, "fp16": 2 * 128, "int8": 128 + 4}
    for place, times in ((Placement.CPU, profile.cpu_with(0)), (Placement.GPU, profile.gpu)):
        assert times is not None
        few, many, call_s = {}, {}, times.call.value
        for kind in token_bytes:
            attention = model_parts(spec, kind)[1]
            without = replace(attention, cost=replace(attention.cost, state=None))
            costs = [Costs(spec, profile) for _ in range(2)]
            few[kind], many[kind] = (
                costs[0].part_s(attention, place, m, 2048) - costs[1].part_s(without, place, m, 2048) for m in (1, 512)
            )
        for kind, n_bytes in token_bytes.items():
            assert few[kind] - call_s == pytest.approx((few[timed] - call_s) * n_bytes / token_bytes[timed])
            assert many[kind] == pytest.approx(many[timed])


def timed_with(kv_type: str) -> Any:
    """What makes a device's times those of another type of cache."""
    return lambda times: replace(times, attentions=tuple(replace(row, kv_type=kv_type) for row in times.attentions))


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True])
def test_eighty_layers_are_planned_in_less_than_a_tenth_of_a_second(is_known: bool) -> None:
    """The time of the process, the best of several: other programs may be running."""
    config = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000}
    spec = read_spec(config | {"max_position_embeddings": 4096})
    profile, statistics = derived_profile(DATA_SHEETS[3], "2026-11-21"), Statistics()
    if is_known:
        statistics = Statistics(published_statistics(80))
    assert profile.name == "rtx-4090-24gb"
    times = []
    for _ in range(20):
        start = time.process_time()
        plan(spec, profile, statistics=statistics)
        times.append(time.process_time() - start)
    assert min(times) < 0.1


@pytest.mark.parametrize(("gpu_layers", "is_shared"), [(32, False), (16, True)])
def test_a_streamed_layer_shares_the_ram_with_a_cpu_that_reads(gpu_layers: int, is_shared: bool) -> None:
    spec, profile = spec_of(), derived_profile(DATA_SHEETS[3], "2026-11-21")
    assert profile.link is not None
    slow = replace(profile.link.to_gpu_bytes_per_s, value=2e9, p20=2e9, p80=2e9)
    profile = replace(profile, link=replace(profile.link, beside_cpu_bytes_per_s=slow))
    found = plan(spec, profile, Limits(mode="full", gpu_layers=gpu_layers))
    costs = Costs(spec, profile, found.threads)
    layer = [part for part in model_parts(spec, found.kv_type) if part.layer == 0]
    copied_s = sum(costs.copy_s(part, beside_cpu=is_shared) for part in layer)
    (streamed,) = [term.seconds for term in found.prediction.layer_terms if term.name == "streamed"]
    assert found.gpu_layers == gpu_layers and streamed == pytest.approx(copied_s)
