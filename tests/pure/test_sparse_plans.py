"""Plans of sparse FFNs: bytes as stored, seconds by the neurons that tokens should need, as emulated."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetero_ee.decoding.simulation import of_shapes
from hetero_ee.errors import UsageError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits, parse_override
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.planner import check_fits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.reports.explanation import explained
from hetero_ee.planning.reports.pins import placement_pins
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.prediction import predicted_run_s
from hetero_ee.sparsity.applied import expecting, planned_sparse
from hetero_ee.sparsity.curves import SHARES, SparsityCurves
from hetero_ee.sparsity.request import SparsityRequest
from hetero_ee.weights.random_weights import random_weights
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile, RowsTime, needed_share
from hetero_ee_profiles.measurement import derived
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import reference_profile
from tests.command_line import Cli
from tests.emulation import LAPTOP
from tests.sparse_models import sparse_model

BIG = replace(known_spec("llama-2-7b"), neuron_major=True)
SPARSE = replace(BIG, active_shares=(0.3, 1.0))
PROFILE = reference_profile(LAPTOP)
PLACES = {
    "CPU": Limits(gpu_layers=0, context_tokens=1024),
    "split": Limits(gpu_layers=12, context_tokens=1024),
    "GPU": Limits(gpu_layers=32, context_tokens=1024),
    "streamed": Limits(overrides=((r"layers\.([0-9]|1\d)\..*", "stream"), ("layers.*", "cpu")), context_tokens=1024),
}
CURVE = tuple((i / 32) ** 0.2 for i in range(1, 33))  # a third of the neurons takes 0.8 of the activations
HOT = replace(SPARSE, hot_curve=CURVE, active_shares=(0.1, 1.0))
PREDICTED = replace(HOT, first_in_rows=True, predictor_rank=512, predicted_share=0.2)
FACTOR = 1.4  # of rows over tiles


def with_rows(times: DeviceTimes) -> DeviceTimes:
    """As if sparse FFNs had been measured: a seventh of the time whatever is active, the rest in proportion."""
    measured_as = partial(derived, unit="s", origin=times.call.origin)
    whole, n_rows, n_columns = times.matmul_s("int4", 22016, 4096, 1), 22016, 4096
    rows = tuple(
        RowsTime(n_rows, n_columns, m, share, measured_as(FACTOR * whole * m * (1 + 6 * share) / 7))
        for m in (1, 8)
        for share in (0.1, 0.5, 1.0)
    )
    return replace(times, rows=rows)


def measured() -> HardwareProfile:
    assert PROFILE.gpu is not None
    return replace(PROFILE, cpu=tuple(map(with_rows, PROFILE.cpu)), gpu=with_rows(PROFILE.gpu))


@pytest.mark.parametrize("family", ["llama-relu", "opt"])
def test_parts_have_the_bytes_of_their_weights(family: str) -> None:
    spec, _ = sparse_model(family)
    n_bytes = sum(part.weight_bytes for part in model_parts(spec, "fp16"))
    assert n_bytes == random_weights(spec).n_bytes


@pytest.mark.parametrize("profile", [PROFILE, measured()], ids=["derived", "measured"])
@pytest.mark.parametrize("place", PLACES)
def test_the_emulated_machine_takes_what_was_predicted(place: str, profile: HardwareProfile) -> None:
    made = make_plan(SPARSE, profile, PLACES[place])
    simulation, _ = of_shapes(SPARSE, made, profile, 512, 16)
    assert simulation.prompt_s == pytest.approx(simulation.predicted_prompt_s, rel=0.05)
    assert simulation.generation_s == pytest.approx(simulation.predicted_generation_s, rel=0.05)


@pytest.mark.parametrize("profile", [PROFILE, measured()], ids=["derived", "measured"])
@pytest.mark.parametrize("spec", [HOT, PREDICTED], ids=["exact", "predicted"])
@pytest.mark.sample(1)
def test_hot_neurons_on_the_gpu_beat_whole_ffns_there(spec: ModelSpec, profile: HardwareProfile) -> None:
    """As predicted, and as emulated; the plan says what it does, and its pins make it again."""
    limits = Limits(vram_budget_bytes=int(2.4 * 2**30), context_tokens=1024, mode="full")
    whole, made = (make_plan(replace(spec, hot_curve=curve), profile, limits) for curve in ((), CURVE))
    n_split = sum(each.is_split for each in made.decode_placements)
    assert n_split > 8 and f"{n_split} FFNs are computed on both devices at once" in " ".join(made.reasons)
    assert "h hot neurons or experts on the GPU" in explained(made)
    simulations = [of_shapes(spec, each, profile, 512, 16)[0] for each in (whole, made)]
    for simulation in simulations:
        assert simulation.prompt_s == pytest.approx(simulation.predicted_prompt_s, rel=0.05)
        assert simulation.generation_s == pytest.approx(simulation.predicted_generation_s, rel=0.05)
    assert simulations[1].generation_s < (0.97 if spec is PREDICTED else 1) * simulations[0].generation_s
    overrides = tuple(parse_override(value) for option, value in placement_pins(made.parts) if option == "-ot")
    again = make_plan(spec, profile, replace(limits, overrides=overrides))
    assert again.decode_placements == made.decode_placements and again.sha256 == made.sha256


@pytest.mark.parametrize("placement", ["hot-6", "hot-26"])
def test_neither_device_waits_for_the_other_s_neurons(placement: str) -> None:
    """Not even where the GPU's take longer than the CPU's, but no longer than those and their way."""
    limits = Limits(overrides=((r".*\.ffn", placement), ("layers.*|head", "gpu")), context_tokens=64, mode="full")
    simulation, _ = of_shapes(HOT, make_plan(HOT, measured(), limits), measured(), 8, 8)
    assert simulation.generation_s == pytest.approx(simulation.predicted_generation_s, rel=0.001)


def test_only_sparse_ffns_of_enough_sections_are_divided() -> None:
    for spec, pattern, placement, problem in (
        (SPARSE, r"layers\.0\.attention", "hot-1", "layers.0.attention, which has no experts"),
        (replace(SPARSE, neuron_major=False), r".*\.ffn", "hot-1", "layers.0.ffn, which has no experts"),
        (SPARSE, r".*\.ffn", "hot-29", "neurons of layers.0.ffn, at most hot-28 does"),
    ):
        with pytest.raises(UsageError, match=problem):
            make_plan(spec, PROFILE, Limits(overrides=((pattern, placement),), context_tokens=64))
    with pytest.raises(UsageError, match="names no placement"):
        Limits(overrides=((".*", "hot-32"),))


@pytest.mark.parametrize("place", ["CPU", "GPU"])
def test_fewer_neurons_take_less_time_of_texts_alone(place: str) -> None:
    made = make_plan(SPARSE, PROFILE, PLACES[place])
    specs = [replace(BIG, active_shares=(share, 1.0)) for share in (1.0, 0.5, 0.1)]
    texts, prompts = (
        [predicted_run_s(spec, PROFILE, made, *counts, 0) for spec in specs] for counts in ((0, 1), (512, 0))
    )
    assert texts == sorted(texts, reverse=True) and texts[2] < 0.8 * texts[0]
    assert len(set(prompts)) == 1
    check_fits(made, BIG)  # what is expected is no shape
    check_fits(make_plan(PREDICTED, PROFILE, PLACES[place]), replace(PREDICTED, predicted_share=0.3, hot_curve=()))


def test_several_tokens_need_more_neurons_than_one() -> None:
    assert needed_share(0.5, 1) == 0.5 and needed_share(0.5, 3) == 0.875 and needed_share(1.0, 9) == 1
    times = PROFILE.cpu[-1]
    assert times.rows_s(22016, 4096, 1, 0.5) == times.matmul_s("int4", 22016, 4096, 1, 0.5)
    assert times.rows_s(22016, 4096, 4, 0.1) == times.matmul_s("int4", 22016, 4096, 4, needed_share(0.1, 4))


def test_measured_rows_count_and_say_from_where_on_sparsity_pays() -> None:
    profile, part = measured(), model_parts(SPARSE, "fp16")[2]
    times = profile.cpu[-1]
    whole_s = times.rows_s(22016, 4096, 1, 1.0)
    assert times.rows_s(22016, 4096, 1, 0.3) == pytest.approx(whole_s * (1 + 6 * 0.3) / 7)
    assert times.rows_s(22016, 4096, 4, 0.5) == pytest.approx(4 * whole_s * 4 / 7, rel=1e-3)
    gain, even = Costs(SPARSE, profile).sparse_gain(part, Placement.CPU)
    assert 0.6 < gain < 0.8 and 0.6 < even < 0.75  # a third for the gate, and 1.4 thirds each
    dense, _ = Costs(replace(SPARSE, active_shares=(even, 1.0)), profile).sparse_gain(part, Placement.CPU)
    assert dense == pytest.approx(1, abs=0.02)
    made = make_plan(SPARSE, profile, PLACES["split"])
    assert any("takes 0." in reason and "it pays with up to" in reason for reason in made.reasons)
    assert any("that is not measured" in reason for reason in make_plan(SPARSE, PROFILE, PLACES["split"]).reasons)
    assert from_json(HardwareProfile, to_json(profile)) == profile


def test_what_a_request_expects() -> None:
    def expected(asked: str, spec: ModelSpec = BIG, zeros: int = 0) -> tuple[float, ...]:
        thresholds = np.tile(np.arange(len(SHARES), dtype=np.float32), (spec.n_layers, 1))
        thresholds[:, : zeros + 1] = 0
        curves = SparsityCurves(thresholds, thresholds, ()) if zeros >= 0 else None
        request = SparsityRequest.parsed(asked)
        assert request is not None
        return tuple(round(share, 4) for share in expecting(spec, request, curves).active_shares)

    assert expected("0.4") == (0.6, 1.0) == expected("0.4", zeros=-1)
    assert expected("0.4", zeros=18) == (0.1, 0.1) == expected("exact", zeros=18)
    assert expected("exact", zeros=-1) == (1.0, 1.0)
    with pytest.raises(UsageError, match="no calibration of neurons to skip"):
        expected("auto", zeros=-1)
    with pytest.raises(UsageError, match="no neurons that are exactly 0"):
        planned_sparse(known_spec("llama-2-7b"), None, Path(), None, SparsityRequest(0.0))


def test_plan_and_simulate_take_sparsity(cli: Cli) -> None:
    shapes = ("--random-weights", "llama-2-7b", "--hardware", LAPTOP, "--sparsity", "0.7")
    planned = cli("plan", *shapes, "-ngl", "12")
    assert "with 30% of its neurons active" in planned.out.replace("\n", " ")
    assert "--sparsity 0.7" in planned.out.splitlines()[-1]
    assert "SIMULATED" in cli("simulate", *shapes, "-ngl", "12", "--prompt-tokens", "64", "-n", "4").out
    pins = ("-ot", ".*ffn=hot-1", "-ot", "layers.*=gpu", "-c", "64")
    simulated = cli("simulate", *shapes, *pins, "--prompt-tokens", "8", "-n", "4").out
    assert "0 whole layers and 32 layers' attention and hot neurons of 32 FFNs on the GPU" in simulated
