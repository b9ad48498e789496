"""The router: the CPU's bits for every kind of scores, for few tokens and for many."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.route import RouterRule
from hetero_ee_cpu_ops.route import gate_rows as cpu_gate_rows
from hetero_ee_cpu_ops.route import route as cpu_route
from hetero_ee_kernels import experts_reference
from hetero_ee_kernels.route import fp32_product, route
from tests.gpu_support import DEVICE, Guarded, assert_same_bits


class Case(NamedTuple):
    """A router. vectors: whether it has a bias and a choice bias."""

    kind: str
    shape: tuple[int, int]  # n_experts, width
    n_active: int
    renormalizes: bool
    vectors: tuple[bool, bool]
    groups: tuple[int, int, int] = (1, 1, 1)


CASES = {
    "all": Case("softmax", (40, 64), 4, True, (False, False)),
    "many of all": Case("softmax", (33, 32), 20, False, (True, True)),
    "chosen": Case("softmax_of_chosen", (32, 48), 4, False, (True, False)),
    "many chosen": Case("softmax_of_chosen", (20, 16), 18, False, (False, False)),
    "sigmoid": Case("sigmoid", (20, 32), 6, True, (False, True)),
    "best two of groups": Case("sigmoid", (40, 32), 4, True, (False, True), (8, 3, 2)),
    "best of groups": Case("softmax", (20, 32), 4, False, (False, False), (5, 2, 1)),
}
HOW: dict[str, Any] = {"scale": 2.5, "added": 1e-20}


def drawn(case: Case, m: int) -> tuple[Any, Any, list[Any]]:
    """x, weights and vectors; two experts are equal."""
    draw = np.random.default_rng(len(case.kind))
    x, weights = draw.standard_normal((m, case.shape[1]), np.float32), draw.standard_normal(case.shape, np.float32)
    weights[3] = weights[2]
    return x, weights, [draw.standard_normal(case.shape[0], np.float32) if has else None for has in case.vectors]


def on_device(*arrays: Any) -> list[Any]:
    return [None if each is None else torch.from_numpy(each).to(DEVICE) for each in arrays]


@pytest.mark.parametrize("m", [2, 18])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_bits_are_the_cpus(name: str, m: int) -> None:
    case = CASES[name]
    x, weights, vectors = drawn(case, m)
    how = HOW | {"renormalizes": case.renormalizes, "groups": case.groups}
    pool, out = ThreadPool(1), Guarded((m, 2 * case.n_active))
    try:
        expected = cpu_route(x, RouterRule(weights, (*vectors, None), case.n_active, case.kind, **how), pool)
    finally:
        pool.close()
    given = on_device(x, weights)
    assert route(*given, (*on_device(*vectors), None), case.n_active, case.kind, out.tensor, **how) is out.tensor
    assert_same_bits(out.check().cpu(), torch.from_numpy(expected))
    reference = experts_reference.route(*given, (*on_device(*vectors), None), case.n_active, case.kind, **how)
    assert torch.equal(reference[:, : case.n_active], out.tensor[:, : case.n_active])
    torch.testing.assert_close(reference, out.tensor)


@pytest.mark.parametrize("name", ["all", "sigmoid", "best two of groups"])
@pytest.mark.sample(1)
def test_scores_that_are_nan_are_chosen_last(name: str) -> None:
    """Of a token whose scores all are, the first experts: no index lies outside of the factors."""
    case = CASES[name]
    x, weights, vectors = drawn(case, 2)
    x[0], weights[1:4] = np.nan, np.nan
    vectors.append(np.ones(case.shape[0], np.float32))
    how, pool = HOW | {"renormalizes": case.renormalizes, "groups": case.groups}, ThreadPool(1)
    try:
        expected = cpu_route(x, RouterRule(weights, tuple(vectors), case.n_active, case.kind, **how), pool)
    finally:
        pool.close()
    given = *on_device(x, weights), tuple(on_device(*vectors)), case.n_active, case.kind
    found = route(*given, **how).cpu()[:, : case.n_active]
    assert torch.equal(found, torch.from_numpy(expected)[:, : case.n_active])
    assert torch.equal(found, experts_reference.route(*given, **how).cpu()[:, : case.n_active])
    assert found[0].tolist() == [*reversed(range(case.n_active))] and not {1.0, 2.0, 3.0} & {*found[1].tolist()}


@pytest.mark.sample(1)
def test_experts_whose_scores_are_minus_infinite_come_before_those_of_other_groups() -> None:
    case, pool = Case("sigmoid", (20, 32), 6, True, (False, False), (5, 2, 2)), ThreadPool(1)
    x, weights, _ = drawn(case, 2)
    choice_bias = np.full(20, -np.inf, np.float32)
    choice_bias[[4, 14, 15, 18, 19]] = 1, 2, 2, 2, 2
    how = HOW | {"renormalizes": True, "groups": case.groups}
    try:
        expected = cpu_route(x, RouterRule(weights, (None, choice_bias, None), 6, "sigmoid", **how), pool)
    finally:
        pool.close()
    given = *on_device(x, weights), (None, *on_device(choice_bias), None), 6, "sigmoid"
    for found in (torch.from_numpy(expected), route(*given, **how), experts_reference.route(*given, **how)):
        assert found[:, :6].tolist() == [[19, 18, 15, 14, 13, 12]] * 2


def test_factors_multiply_the_weights() -> None:
    case = CASES["all"]
    x, weights, _ = on_device(*drawn(case, 2)[:2], None)
    factors = torch.arange(40.0, device=DEVICE)
    plain, found = (
        route(x, weights, (None, None, last), 4, "softmax", renormalizes=True, **HOW) for last in (None, factors)
    )
    assert_same_bits(found[:, 4:].contiguous(), plain[:, 4:] * factors[plain[:, :4].long()])
    how = HOW | {"renormalizes": True}
    torch.testing.assert_close(experts_reference.route(x, weights, (None, None, factors), 4, "softmax", **how), found)


def test_one_row_of_weights() -> None:
    """The gate of a shared expert."""
    draw, pool = np.random.default_rng(0), ThreadPool(1)
    x, weights = draw.standard_normal((3, 32), np.float32), draw.standard_normal((1, 32), np.float32)
    try:
        expected = cpu_gate_rows(np.ones((3, 16), np.float32), x, weights, pool)
    finally:
        pool.close()
    found = fp32_product(*on_device(x, weights)).sigmoid()
    torch.testing.assert_close(found.cpu().expand(3, 16), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("n_active", "kind", "width"), [(5, "softmax", 32), (2, "softmin", 32), (2, "softmax", 40)], ids=str
)
def test_what_does_not_fit_is_refused(n_active: int, kind: str, width: int) -> None:
    x, weights = torch.zeros(1, width, device=DEVICE), torch.zeros(4, width, device=DEVICE)
    with pytest.raises(ValueError, match=r"experts|features"):
        route(x, weights, (None, None, None), n_active, kind, renormalizes=False, **HOW)
