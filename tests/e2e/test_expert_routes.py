"""Routes that a calibration records: which experts a text chose, in the numbers of the model's files."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero_ee import Engine
from hetero_ee.calibration.file import write_calibration
from hetero_ee.calibration.predictor_fitting import PredictorTraining
from hetero_ee.calibration.routes import (
    CHOSEN,
    N_RECENT,
    NEW,
    _new_experts,
    expert_blocks,
    recorded_routes,
    route_shapes,
)
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.sparsity.expert_order import ExpertOrder
from hetero_ee_profiles.reference import reference_profile
from tests.calibration_support import some_calibration
from tests.command_line import Cli
from tests.executor_support import Model, model_of, on_kernels

ASSET = Path(__file__).parents[1] / "assets" / "hybrid_moe"
CHUNKS = np.random.default_rng(0).integers(0, 90, (4, 40)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("qwen3.5-moe", "int4", tmp_path_factory.mktemp("model"))  # 3 of 7 experts per token


def test_recorded_routes_keep_the_files_numbers_in_any_order(model: Model, kernels: Path) -> None:
    spec, weights = model
    executor = on_kernels(model)
    plain = recorded_routes(executor, executor.pool, CHUNKS)
    for block, _ in expert_blocks(spec):
        shares, new = plain[f"{block.name}.{CHOSEN}"], plain[f"{block.name}.{NEW}"]
        assert shares.max() <= 1 / 3 and shares.sum(1) == pytest.approx([1, 1], rel=1e-5)
        assert new[0] == 1 and list(new) == sorted(new, reverse=True) and 1 < new.sum() < 7.01 / 3
    executor.close()
    order = ExpertOrder.of(spec, plain)
    assert order is not None
    moved = on_kernels(order.applied(spec, weights))
    again = recorded_routes(moved, moved.pool, CHUNKS)
    moved.close()
    assert any(not np.array_equal(each, np.arange(7)) for each in order.order.values())
    for name, array in plain.items():  # sums in another order may change a close choice
        assert np.abs(again[name] - array).max() < 0.05, name


def test_a_calibration_records_the_routes_of_its_first_training_text(model: Model, kernels: Path) -> None:
    executor, training = on_kernels(model), PredictorTraining(n_hidden=4, n_steps=5)
    chunks = [tuple(chunk) for chunk in (*CHUNKS, *CHUNKS)]
    made = CalibrationRun(executor, CalibrationSettings(n_route_tokens=40, training=training)).calibrate(chunks, "text")
    expected = recorded_routes(executor, executor.pool, chunks[:2])
    executor.close()
    assert made.routes.keys() == route_shapes(model[0]).keys()
    assert all(np.array_equal(made.routes[name], array) for name, array in expected.items())


def test_a_calibrated_model_is_planned_and_opened_with_popular_experts_first(
    cli: Cli, tmp_path: Path, kernels: Path
) -> None:
    folder = tmp_path / "calibrated_moe"
    shutil.copytree(ASSET, folder)
    options = {"threads": 1, "mode": "full", "context_tokens": 64, "override": [".*moe=hot-8", ".*=gpu"]}
    machine = {"profile": reference_profile("rtx-3060-12gb"), "emulate": True}

    def opened() -> tuple[str, int]:
        with Engine.from_pretrained(folder, **options, **machine) as engine:
            text = engine.generate("Once upon a time", max_new_tokens=24, temperature=0.0)
            place, spec = engine.calibrations, engine.executor.spec
            orders = engine.executor.weights.expert_orders
            if not orders and place is not None:
                draw = np.random.default_rng(0)
                routes = {name: draw.random(shape, np.float32) for name, shape in route_shapes(spec).items()}
                for name in routes:
                    routes[name] /= routes[name][0] if name.endswith(NEW) else routes[name].sum(1, keepdims=True)
                write_calibration(replace(some_calibration(spec), routes=routes), place.key, place.folder)
            return str(text), len(orders)

    plain, again = opened(), opened()
    assert plain == (again[0], 0) and again[1] == 8
    pins = ("-ot", ".*moe=hot-8", "-ot", ".*=gpu")
    ended = cli("plan", folder, "--hardware", "rtx-3060-12gb", "--mode", "full", "-c", 64, *pins)
    assert "25% of their experts, the ones most often active" in " ".join(ended.out.split()), ended.err


def test_the_hits_that_a_plan_prints_are_those_of_a_text_it_does_not_know(tmp_path: Path, kernels: Path) -> None:
    """Stories of a trained model: half of them tell the popular experts, and choices are counted in the others."""
    folder = tmp_path / "stories"
    shutil.copytree(ASSET, folder)
    with Engine.from_pretrained(folder, threads=1, profile="off", context_tokens=128) as it:
        told = [str(it.generate("Once upon a time", max_new_tokens=96, temperature=1.0, seed=n)) for n in range(8)]
        chunks, spec = [it.tokenizer.encode(text) for text in told], it.executor.spec
        known, other = (recorded_routes(it.executor, it.executor.pool, each) for each in (chunks[:4], chunks[4:]))
    order = ExpertOrder.of(spec, known)
    assert order is not None
    for n_hot in (8, 16):  # of 32
        hits = [other[f"{name}.{CHOSEN}"].mean(0)[row[:n_hot]].sum() for name, row in order.order.items()]
        limits = Limits(context_tokens=128, mode="full", overrides=((".*moe", f"hot-{n_hot}"), (".*", "gpu")))
        made = plan(order.expected(spec), reference_profile("rtx-3060-12gb"), limits)
        said = re.search(r"which is (\d+)% of what", " ".join(made.reasons))
        assert said and int(said[1]) / 100 == pytest.approx(np.mean(hits), abs=0.05)
        assert np.mean(hits) > n_hot / 32 + 0.1, "the model has no popular experts"


def test_new_experts_are_those_of_no_recent_token() -> None:
    chosen = np.random.default_rng(1).random((30, 12)) < 0.2
    sets = [set(np.flatnonzero(row)) for row in chosen]
    for distance, count in enumerate(_new_experts(chosen)):
        recent = ([sets[t - back] for back in range(1, distance + 1)] for t in range(1, len(sets)))
        assert count == sum(len(own.difference(*last)) for own, last in zip(sets[1:], recent, strict=True))
    assert len(_new_experts(chosen)) == N_RECENT
