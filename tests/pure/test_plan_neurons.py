"""Plans that split FFNs: chosen where they beat whole ones, their bytes counted, told in words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero_ee.errors import UsageError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.explanation import explained
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.pins import placement_pins
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import ExitRates, ExitStatistics, NeuronStatistics, Statistics, published_statistics
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.memory import rounded
from hetero_ee.planning.times.prediction import predicted_run_s
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import reference_profile

GIB = 2**30
SPEC, PROFILE = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
LIMITS = Limits(vram_budget_bytes=3 * GIB, context_tokens=512)
SHAPE = (SPEC.n_layers, SPEC.ffn_size)


def neurons(steepness: float, block_neurons: int = 32) -> NeuronStatistics:
    """Frequencies that fall from 1; steepness 0: every neuron is always active."""
    random = np.random.default_rng(0)
    return NeuronStatistics("a drawing", random.random(SHAPE).astype(np.float32) ** steepness, block_neurons)


STEEP = Statistics(neurons=neurons(6.0))


@pytest.fixture(scope="module")
def split() -> Plan:
    return plan(SPEC, PROFILE, LIMITS, STEEP)


def test_neurons_that_are_rarely_active_are_left_on_the_cpu(split: Plan) -> None:
    whole = plan(SPEC, PROFILE, LIMITS)
    found = [part for part in split.parts if part.decode_placement == "split"]
    assert found and all(part.name.endswith("ffn") for part in found)
    assert split.prediction.request_s < whole.prediction.request_s
    assert split.prediction.generated_tokens_per_s > 1.2 * whole.prediction.generated_tokens_per_s
    for part in found:
        assert part.gpu_neurons is not None and part.cpu_active_share is not None
        assert part.gpu_neurons % 32 == 0 and 0 < part.gpu_neurons < SPEC.ffn_size
        hot = np.sort(STEEP.neurons.frequencies[part.layer].astype(float))[::-1][part.gpu_neurons :]  # type: ignore[union-attr]
        assert part.cpu_active_share == pytest.approx(hot.mean())
    assert all(part.gpu_neurons is None for part in split.parts if part.decode_placement != "split")


def test_every_byte_of_both_halves_is_counted(split: Plan) -> None:
    """By the tiles of docs/FORMAT.md: 18 bytes for 32 columns of a row; the norm lies on both devices."""
    terms = {(term.device, term.name): term.n_bytes for term in split.memory}
    gpu_bytes = cpu_bytes = 0
    for part in split.parts:
        n_gpu = {"gpu": SPEC.ffn_size, "split": part.gpu_neurons or 0}.get(part.decode_placement, 0)
        if part.name.endswith("ffn"):
            halves = [3 * n * SPEC.hidden_size // 32 * (16 + 2) for n in (n_gpu, SPEC.ffn_size - n_gpu)]
            norm_bytes = 4 * SPEC.hidden_size
            gpu_bytes += rounded(halves[0] + norm_bytes) if n_gpu else 0
            cpu_bytes += halves[1] + norm_bytes if part.decode_placement != "gpu" else 0
        elif part.layer is not None and part.decode_placement == "gpu":
            gpu_bytes += rounded(part.weight_bytes)
        elif part.decode_placement == "cpu":
            cpu_bytes += part.weight_bytes
    assert terms["gpu", "weights"] == gpu_bytes and terms["cpu", "weights"] == cpu_bytes
    assert split.n_bytes("gpu") <= split.vram_budget_bytes and split.n_bytes("cpu") <= split.ram_budget_bytes


def test_blocks_of_a_part_add_up_to_the_part() -> None:
    part = next(part for part in model_parts(SPEC, "fp32") if part.name == "layers.0.ffn")
    assert part.bytes_of_neurons(SPEC.ffn_size) == part.weight_bytes
    vectors = part.weight_bytes - part.product_bytes
    for n in (32, 320, SPEC.ffn_size - 32):
        assert part.bytes_of_neurons(n) + part.bytes_of_neurons(SPEC.ffn_size - n) == part.weight_bytes + vectors


def test_it_is_told_in_words_and_read_back(split: Plan) -> None:
    assert from_json(Plan, to_json(split)) == split
    (sentence,) = [reason for reason in split.reasons if "are split" in reason]
    assert f"of their {SPEC.ffn_size} neurons lie on the GPU, the most often active first, with a drawing" in sentence
    assert "b both, some neurons each" in explained(split) and "ffn on both" in explained(split)
    assert all("split" not in value for _, value in placement_pins(split.parts))


def test_a_run_is_predicted_from_the_plan_alone(split: Plan) -> None:
    context = split.prediction.context_tokens
    seconds = predicted_run_s(SPEC, PROFILE, split, 0, 1, context - 1)
    assert 1 / seconds == pytest.approx(split.prediction.generated_tokens_per_s)


def test_where_crossings_cost_too_much_nothing_is_split() -> None:
    slow = replace(PROFILE.link, transfer=replace(PROFILE.link.transfer, value=1.0, p20=1.0, p80=1.0))  # type: ignore[type-var,union-attr]
    far = replace(PROFILE, link=slow)
    assert plan(SPEC, far, LIMITS, STEEP) == plan(SPEC, far, LIMITS)


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        (replace(LIMITS, overrides=((r"layers\.\d+\.ffn", "cpu"),)), set()),
        (replace(LIMITS, gpu_layers=8), set()),
        (replace(LIMITS, overrides=(("head", "cpu"),)), set()),
        (replace(LIMITS, vram_budget_bytes=0), set()),
        (replace(LIMITS, overrides=((r"layers\.[1-9]\d*\.ffn", "cpu"),)), {"layers.0.ffn"}),
    ],
)
def test_pins_win(limits: Limits, names: set[str]) -> None:
    found = plan(SPEC, PROFILE, limits, STEEP)
    assert {part.name for part in found.parts if part.decode_placement == "split"} <= names


def test_full_mode_alone_splits() -> None:
    known = replace(STEEP, exits=published_statistics(SPEC.n_layers))
    exact = plan(SPEC, PROFILE, replace(LIMITS, mode="exact"), known)
    assert exact.mode == "exact" and all(part.gpu_neurons is None for part in exact.parts)
    sure = ExitStatistics("sure", SPEC.n_layers, {4: ExitRates(0.95, 1.0)})
    for exits in (known.exits, sure):
        found = plan(SPEC, PROFILE, LIMITS, replace(STEEP, exits=exits))
        assert found.mode == "full" or all(part.gpu_neurons is None for part in found.parts)


def test_larger_blocks_are_kept_whole() -> None:
    found = plan(SPEC, PROFILE, LIMITS, Statistics(neurons=neurons(6.0, block_neurons=SPEC.ffn_size // 4)))
    sizes = {part.gpu_neurons for part in found.parts if part.gpu_neurons}
    assert sizes and all(size % (SPEC.ffn_size // 4) == 0 for size in sizes)


def test_neurons_come_in_order_of_how_often_they_are_active() -> None:
    found = NeuronStatistics("a drawing", np.array([[0.2, 0.9] * 32, [0.5] * 64]), 32)
    assert found.order(0).tolist() == [*range(1, 64, 2), *range(0, 64, 2)]
    assert found.order(1).tolist() == list(range(64))
    assert found.active_after(0) == pytest.approx([32 * 1.1, 32 * 0.2, 0.0])


@pytest.mark.parametrize(
    ("frequencies", "block_neurons", "words"),
    [
        (np.ones(64), 32, "layers x neurons"),
        (np.ones((2, 64), np.int64), 32, "expected floats"),
        (np.full((2, 64), 1.5), 32, "must be 0 to 1"),
        (np.full((2, 64), np.nan), 32, "must be 0 to 1"),
        (np.full((2, 64), -0.1), 32, "must be 0 to 1"),
        (np.ones((2, 64)), 48, "multiple of 32"),
        (np.ones((2, 64)), 0, "multiple of 32"),
        (np.ones((2, 96)), 64, "divides 96"),
    ],
    ids=range(8),
)
def test_statistics_that_cannot_be(frequencies: Any, block_neurons: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NeuronStatistics("drawn", frequencies, block_neurons)


def test_statistics_of_another_model_are_refused() -> None:
    other = NeuronStatistics("drawn", np.ones((4, 64)))
    with pytest.raises(UsageError, match="4 layers of 64 neurons, this model has 32 of 11008"):
        plan(SPEC, PROFILE, LIMITS, Statistics(neurons=other))


@pytest.mark.parametrize(
    "change",
    [{"gpu_neurons": None}, {"gpu_neurons": 0}, {"cpu_active_share": None}, {"cpu_active_share": 1.5}],
)
def test_a_part_that_contradicts_itself_is_refused(split: Plan, change: dict[str, Any]) -> None:
    part = next(part for part in split.parts if part.decode_placement == "split")
    with pytest.raises(ValueError, match=r"gpu_neurons|cpu_active_share"):
        replace(part, **change)
    with pytest.raises(ValueError, match="belong to parts that are split"):
        replace(split.parts[0], gpu_neurons=32, cpu_active_share=0.5)


def test_a_device_with_none_of_the_neurons_is_charged_no_calls() -> None:
    costs = Costs(SPEC, PROFILE)
    ffn = next(part for part in model_parts(SPEC, "fp16") if part.name == "layers.0.ffn")
    assert PROFILE.gpu is not None
    for index, times, share in ((0, PROFILE.gpu, 0.0), (1, costs.cpu, 1.0)):
        overhead_s = times.layer_overhead_s(SPEC.hidden_size, SPEC.ffn_size, 1) / 2
        assert costs.split_s(ffn, share, 1.0, 1)[index] == overhead_s
    calls_s = sum(
        min(costs.cpu.call.value, costs.cpu.matmul_s(p.layout, p.n_rows, p.n_columns, 1)) for p in ffn.products
    )
    few_s = costs.split_s(ffn, 0.5, 1e-9, 1)[1] - costs.split_s(ffn, 0.5, 0.0, 1)[1]
    assert few_s == pytest.approx(calls_s, rel=1e-3)
