"""Experts in the order of how many tokens chose them: the same model, and what planning expects of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.calibration.routes import N_RECENT, expert_blocks
from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.work import Work
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.planning.reports.explanation import explained
from hetero_ee.sparsity.expert_order import ExpertOrder
from hetero_ee_profiles.reference import reference_profile
from tests.executor_support import hidden_alone, model_of, reference

MODEL = "qwen3.6-35b-a3b"
SKEWED = 0.97  # an expert's popularity divided by that of the next more popular one


def routes(spec: ModelSpec, new_share: float = 1.0) -> dict[str, Any]:
    """Those of a text whose tokens choose experts unevenly. new_share: of their experts that no recent token chose."""
    found, draw = {}, np.random.default_rng(0)
    for block, mixer in expert_blocks(spec):
        shares = draw.permutation(SKEWED ** np.arange(mixer.router.n_experts))
        found[f"{block.name}.chosen_share"] = np.float32([shares / shares.sum()] * 2)
        found[f"{block.name}.new_experts"] = np.float32([1, *[new_share] * (N_RECENT - 1)])
    return found


@pytest.mark.parametrize("family", ["qwen3.5-moe", "gpt-oss"])
def test_the_model_is_the_same_in_another_order(family: str, tmp_path: Path) -> None:
    spec, weights = model_of(family, "int4", tmp_path)
    order = ExpertOrder.of(spec, routes(spec))
    assert order is not None
    ordered = order.applied(spec, weights)
    found, wanted = (hidden_alone(reference(each), list(range(3, 12))) for each in (ordered, (spec, weights)))
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    for block, mixer in expert_blocks(spec):
        row = order.order[block.name]
        name, n = block.tensors["down"].name, mixer.router.n_experts
        old, new = (each.matrices[name].dequantize().unflatten(0, (n, -1)) for each in (weights, ordered[1]))
        assert torch.equal(new, old[row]) and not torch.equal(new, old)
    assert ordered[1].held_bytes == sum(
        weights.matrices[block.tensors[short].name].n_bytes
        for block, mixer in expert_blocks(spec)
        for short in mixer.expert_matrices
    )


def test_models_without_experts_have_no_order() -> None:
    assert ExpertOrder.of(known_spec("qwen3-8b"), {}) is None


def test_hits_are_counted_in_text_that_did_not_choose_the_order() -> None:
    spec = known_spec(MODEL)
    found = routes(spec)
    for block, mixer in expert_blocks(spec):
        shares = np.zeros((2, mixer.router.n_experts), np.float32)
        shares[0, :8], shares[1, 8:16] = 1 / 8, 1 / 8  # the halves have no expert in common
        found[f"{block.name}.chosen_share"] = shares
    order = ExpertOrder.of(spec, found)
    assert order is not None and order.curve[0] == 0 and order.curve[1] == pytest.approx(1)
    assert set(order.order[expert_blocks(spec)[0][0].name][:16].tolist()) == set(range(16))


def test_the_gpu_has_the_popular_experts_and_the_plan_says_what_they_hit() -> None:
    spec, profile = known_spec(MODEL), reference_profile("rtx-3060-12gb")
    order = ExpertOrder.of(spec, routes(spec))
    assert order is not None
    quarter = (1 - SKEWED**64) / (1 - SKEWED**256)
    assert order.curve[7] == pytest.approx(quarter, rel=1e-3) and order.curve[-1] == pytest.approx(1)
    limits = Limits(context_tokens=1024, mode="full", overrides=((".*moe", "hot-8"), (".*", "gpu")))
    plain, hot = (plan(each, profile, limits) for each in (spec, order.expected(spec)))
    assert hot.prediction.generated_tokens_per_s > 1.3 * plain.prediction.generated_tokens_per_s
    reasons = " ".join(explained(hot).split())
    assert f"25% of their experts, the ones most often active, which is {quarter:.0%} of what a token needs" in reasons


def test_adjacent_tokens_need_fewer_experts_than_independent_ones() -> None:
    spec = known_spec(MODEL)
    block, mixer = expert_blocks(spec)[0]
    n, k = mixer.router.n_experts, mixer.router.n_active

    def share(new_share: float, m: int) -> float:
        order = ExpertOrder.of(spec, routes(spec, new_share))
        assert order is not None
        cost = BlockCost.of(replace(spec, independent_tokens=order.independent_tokens), block)
        work: Work = cost.work("moe", m)
        assert work.units is not None
        return work.units.read_bytes(work.shares, m) / work.units.n_bytes

    for m in (1, 2, 5, 8):
        assert share(0.6, m) == pytest.approx((k + 0.6 * k * (m - 1)) / n, rel=1e-3)
    assert share(0.6, 8) < share(0.6, 12) < share(1.0, 12) <= 1
