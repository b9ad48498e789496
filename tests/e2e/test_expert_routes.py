"""Routes that a calibration records: which experts a text chose, in the numbers of the model's files."""

from pathlib import Path

import numpy as np
import pytest

from hetero_ee.calibration.routes import CHOSEN, N_RECENT, NEW, _new_experts, expert_blocks, recorded_routes
from hetero_ee.sparsity.expert_order import ExpertOrder
from tests.executor_support import Model, model_of, on_kernels

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


def test_new_experts_are_those_of_no_recent_token() -> None:
    chosen = np.random.default_rng(1).random((30, 12)) < 0.2
    sets = [set(np.flatnonzero(row)) for row in chosen]
    for distance, count in enumerate(_new_experts(chosen)):
        recent = ([sets[t - back] for back in range(1, distance + 1)] for t in range(1, len(sets)))
        assert count == sum(len(own.difference(*last)) for own, last in zip(sets[1:], recent, strict=True))
    assert len(_new_experts(chosen)) == N_RECENT
