"""Plans of mixtures of experts: costs by the experts that tokens should need, placements by expert, prompts, drafts."""

import re
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from hetero_ee.costs.experts import ExpertRows
from hetero_ee.decoding.simulation import of_shapes
from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import gpu_cache
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.reports.explanation import explained
from hetero_ee.planning.reports.pins import pins
from hetero_ee.planning.statistics import DraftRates, Statistics
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.prediction import step_times
from hetero_ee.planning.times.prompts import Placements, prompt_s
from hetero_ee.runtime.executors.dummy import dummy_weights
from hetero_ee.speculation.stop_rule import MarginalRule
from hetero_ee_profiles.reference import reference_profile
from hetero_ee_profiles.units import GIB
from tests.command_line import Cli
from tests.emulation import LAPTOP

MODEL, MACHINE = "qwen3.6-35b-a3b", "rtx-3060-12gb"
SPEC, PROFILE = known_spec(MODEL), reference_profile(MACHINE)
PARTS = model_parts(SPEC, "fp16")
MOE = next(part for part in PARTS if part.has_experts)
# U(m) / k for k of E experts and m tokens that choose independently. Source: derived.
UNIONS = {(128, 8): {1: 1.0, 2: 1.94, 4: 3.64, 8: 6.45}, (256, 8): {1: 1.0, 2: 1.97, 4: 3.82, 8: 7.18}}
PLACES = {
    "the planner's choice": Limits(context_tokens=2048),
    "no experts on the GPU": Limits(context_tokens=2048, gpu_layers=40, n_cpu_moe=40),
    "some of each layer": Limits(context_tokens=2048, overrides=((".*moe", "hot-9"), (".*", "gpu"))),
    "layers on the CPU": Limits(context_tokens=2048, gpu_layers=9),
    "streamed": Limits(context_tokens=2048, overrides=((r"layers\.[0-4]\.moe", "stream"), (".*moe", "cpu"))),
    "no GPU": Limits(context_tokens=2048, gpu_layers=0),
    "long prompts": Limits(context_tokens=2048, gpu_layers=40, n_cpu_moe=30, chunk_tokens=1024),
    "experts on the disk": Limits(context_tokens=2048, gpu_layers=40, n_cpu_moe=40, ram_budget_bytes=8 * GIB),
    "layers on the disk": Limits(context_tokens=2048, gpu_layers=0, ram_budget_bytes=8 * GIB),
    "shared prompts": Limits(context_tokens=2048, gpu_layers=40, n_cpu_moe=40, chunk_tokens=512),
}


def planned(**limits: object) -> Plan:
    return make_plan(SPEC, PROFILE, Limits(**({"context_tokens": 4096, "mode": "full"} | limits)))  # type: ignore[arg-type]


def experts_of(made: Plan) -> list[Placement]:
    return [part.decode_placement for part in made.parts if part.kind == "moe"]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", MODEL])
def test_tokens_read_the_union_of_their_experts(name: str) -> None:
    spec = known_spec(name)
    part = next(part for part in model_parts(spec, "fp16") if part.has_experts)
    units = part.cost.units
    assert isinstance(units, ExpertRows)
    one_bytes, whole = units.n_bytes // units.n_units, part.cost.product_bytes
    for m, ratio in UNIONS[units.n_units, units.n_active].items():
        n_experts = (part.cost.work("moe", m).read_bytes - whole) / one_bytes
        assert n_experts == pytest.approx(units.n_active * ratio, rel=0.005)
    assert part.cost.work("moe", 512).read_bytes == pytest.approx(part.weight_bytes, rel=0.01)
    assert sum(each.weight_bytes for each in model_parts(spec, "fp16")) == dummy_weights(spec).n_bytes


def test_a_token_takes_the_time_of_a_dense_ffn_of_as_many_bytes() -> None:
    times = PROFILE.cpu[-1]
    work = MOE.cost.work("moe", 1)
    assert work.products_s(times) == pytest.approx(work.read_bytes / (0.68 * times.read_bytes_per_s.value), rel=0.1)


@pytest.mark.parametrize("n_hot", [0, 72, 256 - 8])
def test_devices_share_the_work_of_a_split_layer(n_hot: int) -> None:
    """The router comes first, and the shared expert is the GPU's."""
    whole = MOE.cost.work("moe", 3)
    first, hot, cold = split = whole.split(n_hot)
    assert sum(each.read_bytes for each in split) == pytest.approx(whole.read_bytes, abs=2)
    assert len(first.products) == 1 and len(hot.products) == 2 and not cold.products
    assert (hot.units is None) == (n_hot == 0) and cold.units is not None
    assert cold.units.n_units == 256 - n_hot
    assert split.input_values == SPEC.hidden_size + 2 * 8


def test_without_a_trace_the_last_layers_experts_are_on_the_cpu() -> None:
    made = planned()
    where = experts_of(made)
    n_whole = where.count(Placement.GPU)
    assert 8 < n_whole < 40 and set(where[:n_whole]) == {Placement.GPU}
    assert all(each.is_split for each in where[n_whole:])
    assert all(part.decode_placement.on_gpu for part in made.parts if part.kind in ("attention", "delta"))
    assert "h hot neurons or experts on the GPU" in explained(made)
    assert f"{40 - n_whole} FFNs are computed on both devices" in " ".join(made.reasons)


def test_experts_are_split_where_whole_layers_would_be_slower() -> None:
    made, by_layer = (
        planned(),
        max((planned(gpu_layers=n) for n in range(14, 19)), key=lambda one: one.prediction.generated_tokens_per_s),
    )
    assert made.prediction.generated_tokens_per_s > 1.2 * by_layer.prediction.generated_tokens_per_s


@pytest.mark.parametrize("place", PLACES)
def test_the_emulated_machine_takes_what_was_predicted(place: str) -> None:
    made = make_plan(SPEC, PROFILE, replace(PLACES[place], mode="full"))
    for n_prompt in (24, 1024):
        simulation, _ = of_shapes(SPEC, made, PROFILE, n_prompt, 48)
        assert simulation.prompt_s == pytest.approx(simulation.predicted_prompt_s, rel=0.02)
        assert simulation.generation_s == pytest.approx(simulation.predicted_generation_s, rel=0.02)


def test_ram_holds_only_what_the_cpu_computes_or_streams() -> None:
    def ram_bytes(made: Plan) -> int:
        return next(term.n_bytes for term in made.memory if (term.device, term.name) == ("cpu", "weights"))

    some = ((".*moe", "hot-12"), (".*", "gpu"))
    made = planned(overrides=some, chunk_tokens=128)
    assert {part.prefill_placement for part in made.parts if part.kind == "moe"} == {"hot-12"}
    whole = planned(gpu_layers=40, n_cpu_moe=40, chunk_tokens=128)
    assert ram_bytes(made) == pytest.approx(ram_bytes(whole) * 20 / 32, rel=0.05)


def test_short_prompts_are_computed_where_tokens_are_and_long_ones_streamed() -> None:
    made = planned(gpu_layers=40, n_cpu_moe=30, context_tokens=16384)
    assert made.prefill_chunk_tokens > 512 and made.prefill_least_tokens is not None
    assert not made.prefills(made.prefill_least_tokens - 1) and made.prefills(made.prefill_chunk_tokens)
    assert ("-ub", str(made.prefill_chunk_tokens)) in pins(made, Limits())
    usual = planned(gpu_layers=40, n_cpu_moe=30, context_tokens=16384, chunk_tokens=512)
    assert made.prediction.prompt_tokens_per_s > 1.5 * usual.prediction.prompt_tokens_per_s
    assert made.prediction.generated_tokens_per_s == usual.prediction.generated_tokens_per_s


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_cpu_computes_experts_of_some_layers_while_those_of_others_are_copied(name: str) -> None:
    """Where both take about as long, as for 512 tokens, that saves more than a quarter of the time."""
    spec, profile = known_spec(name), reference_profile("rtx-4090-24gb")
    made = make_plan(spec, profile, Limits(context_tokens=4096, gpu_layers=99, n_cpu_moe=99, chunk_tokens=512))
    places = [part.prefill_placement for part in made.parts if part.kind == "moe"]
    assert set(places) == {"hot-0", "visit"}
    assert max(len(list(group)) for place, group in groupby(places) if place == "hot-0") <= 2, "not spread"
    costs, parts, decode = Costs(spec, profile, made.threads), model_parts(spec, "fp16"), made.decode_placements
    chosen = [part.prefill_placement for part in made.parts]
    copied = [Placement.VISIT if one.is_split else one for one in decode]
    mixed_s, *others_s = (prompt_s(costs, parts, Placements(e, decode), 512, 512) for e in (chosen, decode, copied))
    assert mixed_s < 0.75 * min(others_s)


def test_buffers_for_prompts_are_weighed_against_experts_in_their_place() -> None:
    made = make_plan(SPEC, reference_profile(LAPTOP), Limits(context_tokens=8192, mode="full"))
    small = make_plan(SPEC, reference_profile(LAPTOP), Limits(context_tokens=8192, mode="full", chunk_tokens=128))
    assert made.prefill_chunk_tokens >= 1024 and "visit" in {part.prefill_placement for part in made.parts}
    assert made.prediction.prompt_tokens_per_s > 3 * small.prediction.prompt_tokens_per_s
    assert made.prediction.generated_tokens_per_s > 0.9 * small.prediction.generated_tokens_per_s


def test_experts_that_exceed_ram_are_read_from_the_disk_one_by_one() -> None:
    """All else stays where it was, and a token reads only the experts that it uses."""
    every = {"gpu_layers": 40, "n_cpu_moe": 40}
    whole, made = planned(**every), planned(**every, ram_budget_bytes=8 * GIB)
    n_on_disk = [part.decode_placement for part in made.parts].count("disk-0")
    assert 0 < n_on_disk < 40 and [place.in_ram for place in made.decode_placements] == list(whole.decode_placements)
    units, rate = MOE.cost.units, PROFILE.disk_read_bytes_per_s.value
    least, most = (8 * GIB - n_bytes for n_bytes in (MOE.weight_bytes, 0))
    assert least < made.n_bytes("cpu") <= most, "an embedding on the GPU leaves RAM to experts"
    pinned = [[pin for pin in pins(each, Limits()) if pin[0] not in ("--ram-budget", "-ub")] for each in (made, whole)]
    assert pinned[0] == pinned[1], "the planner moves experts to the disk again"
    assert isinstance(units, ExpertRows)
    read_s = n_on_disk * units.n_bytes * units.n_active / units.n_units / rate
    token_s, whole_s = (1 / each.prediction.generated_tokens_per_s for each in (made, whole))
    assert token_s == pytest.approx(read_s + whole_s * (40 - n_on_disk) / 40, rel=0.1)
    assert made.disk_weight_bytes == pytest.approx(n_on_disk * units.n_bytes, rel=0.01)
    [said] = [reason for reason in made.reasons if "exceed the RAM budget" in reason]
    assert f"{n_on_disk} parts" in said and f"in {read_s:.3g} s" in said


def test_flags_of_llama_cpp_mean_the_same(cli: Cli) -> None:
    def hashed(*flags: str) -> str:
        shapes = ("--random-weights", MODEL, "--hardware", LAPTOP, "-c", "1024", "-ngl", "99")
        return next(line for line in cli("plan", *shapes, *flags).out.splitlines() if line.startswith("hash"))

    every = hashed("-cmoe")
    assert every == hashed("--n-cpu-moe", "40") == hashed("-ot", "exps=CPU") == hashed("-ot", r"\.ffn_.*_exps\.=CPU")
    some = hashed("-ncmoe", "38")
    assert some != every
    assert some == hashed("-ot", r"blk\.(\d|[12]\d|3[0-7])\.ffn_(gate|up|down)_exps=CPU")
    assert some == hashed("-ot", r"blk\.3[89]\.ffn_.*_exps=CUDA0,exps=CPU")


@pytest.mark.parametrize(
    ("model", "limits", "problem"),
    [
        (MODEL, {"overrides": (("ffn_up_exps", "cpu"),)}, r"matches blk.0.ffn_up_exps.weight and not blk.0.ffn_gate"),
        ("qwen3-8b", {"n_cpu_moe": 3}, "this model has none"),
        (MODEL, {"overrides": ((r".*delta", "hot-1"),)}, "divides layers.0.delta, which has no experts"),
        (MODEL, {"overrides": (("exps", "hot-0"), ("blk.*(attn|ssm)", "cpu"), ("nothing", "cpu"))}, "matches no part"),
    ],
)
def test_overrides_that_mean_nothing_are_refused(model: str, limits: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        make_plan(known_spec(model), PROFILE, Limits(context_tokens=1024, **limits))  # type: ignore[arg-type]


def test_reasons_speak_of_experts_that_the_model_has_and_the_planner_may_move() -> None:
    for name, with_shared in ((MODEL, True), ("qwen3-30b-a3b", False)):
        for n_cpu_moe, elsewhere in ((99, "The split is as it was pinned."), (12, r"layers\.[1-3]\d\.moe would take")):
            limits = Limits(context_tokens=4096, n_cpu_moe=n_cpu_moe)
            said = " ".join(make_plan(known_spec(name), reference_profile(LAPTOP), limits).reasons)
            assert "their routers" in said and ("shared experts" in said) == with_shared
            assert re.search(elsewhere, said), said


def test_overrides_of_dense_tensors_pin_whole_parts() -> None:
    overrides = (("blk.1[0-9].ffn_", "cpu"), ("blk.*attn", "gpu"))
    limits = Limits(context_tokens=1024, mode="full", overrides=overrides)
    made = make_plan(known_spec("qwen3-8b"), PROFILE, limits)
    where = {part.name: part.decode_placement for part in made.parts}
    assert {where[f"layers.{n}.ffn"] for n in range(10, 20)} == {"cpu"} and where["layers.9.ffn"] == "gpu"


def test_drafts_are_priced_by_the_union_of_their_experts() -> None:
    """The same drafts that pay for a dense model are declined, or fewer, for one whose experts the CPU reads."""
    limits, source = Limits(context_tokens=2048, gpu_layers=99, n_cpu_moe=99), DraftRates("a source", (0.6,) * 4, 1e-4)
    dense = replace(limits, n_cpu_moe=None, gpu_layers=None, vram_budget_bytes=5 * GIB)
    known, chances = Statistics(drafts=source), [0.6, 0.6, 0.6]
    lengths, modes = [], []
    for name, each in ((MODEL, limits), ("qwen3-14b", dense)):
        spec = known_spec(name)
        made = make_plan(spec, PROFILE, each, known)
        modes.append(made.mode)
        times = step_times(spec, PROFILE, made)
        lengths.append(MarginalRule(0.0, lambda m, times=times: times.verify_s(0, m)).best_length(chances, 1e-4)[0])
    assert modes == ["full", "exact"] and lengths[0] < lengths[1]


def test_a_verification_grows_by_the_union() -> None:
    made = planned(gpu_layers=40, n_cpu_moe=40)
    times = step_times(SPEC, PROFILE, made)
    costs = Costs(SPEC, PROFILE)
    cold = [costs.split_s(MOE, Placement.hot(0), m)[2] for m in (1, 4)]
    assert times.verify_s(0, 4) - times.verify_s(0, 1) > 0.9 * 40 * (cold[1] - cold[0])
    assert 2.5 < cold[1] / cold[0] < 3.82  # the constant part are transfers


@pytest.mark.parametrize("chunk_tokens", [512, 4096])
def test_plans_count_what_a_large_chunk_adds_to_the_keys_of_sliding_windows(chunk_tokens: int) -> None:
    spec = known_spec("gpt-oss-20b")
    limits = {"context_tokens": 8192, "gpu_layers": 24, "n_cpu_moe": 24, "chunk_tokens": chunk_tokens, "mode": "full"}
    made = make_plan(spec, PROFILE, Limits(**limits))  # type: ignore[arg-type]
    counted = sum(term.n_bytes for term in made.memory if term.device == "gpu" and "large chunks" in term.name)
    windowed = [layer for layer, window in enumerate(spec.sliding_windows) if window is not None]
    caches = [
        gpu_cache(spec, 8192, "fp16", torch.device("cpu"), windowed[:1], n_slots=1, pass_tokens=pass_tokens)
        for pass_tokens in (0, chunk_tokens)
    ]
    small, large = (cache.n_bytes for cache in caches)
    assert 0 <= counted - len(windowed) * (large - small) < 2**21
    assert (counted > 0) == (chunk_tokens > 512)
    caches[1].open(0)
    for first in (0, chunk_tokens):
        caches[1].admit(Batch.of_sequence(0, first, [0] * chunk_tokens))
    assert caches[1].n_bytes == large
