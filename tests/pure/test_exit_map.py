"""Exit maps: fitted in closed form, of the right rank, and with bits that don't depend on the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetero_ee.calibration import map_fitting as map_fit
from hetero_ee.calibration.map_fitting import (
    NormalEquations,
    SelectionTokens,
    fit_exit_map,
    head_metric,
    leading_vectors,
    ranks,
)
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.weights.weight import DenseWeight

HIDDEN, VOCAB = 32, 96
N_TRAIN, N_CHOOSE = 600, 400


def random_map(rank: int, seed: int = 0) -> ExitMap:
    torch.manual_seed(seed)
    down = None if rank == HIDDEN else torch.randn(rank, HIDDEN)
    return ExitMap(down, torch.randn(HIDDEN, rank), torch.randn(HIDDEN))


def head(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(VOCAB, HIDDEN)


def data(slope: Tensor, bias: Tensor, noise: float, n_rows: int, seed: int) -> SelectionTokens:
    """Rows whose final states are x + x slope + bias + noise, with the tokens that the head chooses there."""
    torch.manual_seed(seed)
    normed = torch.randn(n_rows, HIDDEN)
    final = normed + normed @ slope + bias + noise * torch.randn(n_rows, HIDDEN)
    return SelectionTokens(normed, final, (final @ head().T).argmax(1))


def equations_of(*parts: SelectionTokens) -> NormalEquations:
    equations = NormalEquations(HIDDEN)
    for part in parts:
        equations.add(part.normed, part.final)
    return equations


def projection(normed: Tensor) -> Tensor:
    return normed @ head().T


def metric() -> map_fit.HeadMetric:
    return head_metric(DenseWeight(head()))


def agreement(states: Tensor, rows: SelectionTokens) -> float:
    return float((projection(states).argmax(1) == rows.tokens).double().mean())


def low_rank_slope(rank: int, seed: int = 2) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(HIDDEN, rank) @ torch.randn(rank, HIDDEN) / 4


@pytest.mark.parametrize("rank", [3, HIDDEN])
def test_a_map_is_what_its_factors_say(rank: int) -> None:
    exit_map, rows = random_map(rank), torch.randn(4, HIDDEN)
    matrix = exit_map.up if exit_map.down is None else exit_map.up @ exit_map.down
    torch.testing.assert_close(exit_map.apply(rows), rows + rows @ matrix.T + exit_map.bias)
    assert exit_map.rank == rank


def test_no_rows_and_the_callers_rows_are_left_as_they_are() -> None:
    rows = torch.randn(2, HIDDEN)
    before = rows.clone()
    assert random_map(4).apply(rows[:0]).shape == (0, HIDDEN)
    random_map(4).apply(rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    ("down", "up", "bias"), [(None, (4, 3), 4), ((2, 4), (4, 3), 4), ((2, 4), (4, 2), 3), ((2, 5), (4, 2), 4)]
)
def test_parts_that_do_not_fit_are_refused(down: tuple[int, int] | None, up: tuple[int, int], bias: int) -> None:
    with pytest.raises(ValueError, match="of no map"):
        ExitMap(None if down is None else torch.zeros(down), torch.zeros(up), torch.zeros(bias))


@pytest.mark.parametrize("true_rank", [2, HIDDEN])
def test_a_linear_relation_is_found(true_rank: int) -> None:
    slope, bias = low_rank_slope(true_rank), torch.full((HIDDEN,), 0.3)
    train, choose, other = (data(slope, bias, 0.05, n, seed) for seed, n in enumerate((N_TRAIN, N_CHOOSE, N_CHOOSE)))
    found = fit_exit_map(equations_of(train), metric(), choose, projection)
    assert found is not None
    assert agreement(found.apply(other.normed), other) > agreement(other.normed, other) + 0.1
    assert found.rank == (HIDDEN // 16 if true_rank == 2 else HIDDEN)


def test_a_map_that_does_not_help_is_not_kept() -> None:
    nothing = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN)
    train, choose = data(*nothing, 1.0, N_TRAIN, 0), data(*nothing, 1.0, N_CHOOSE, 1)
    assert fit_exit_map(equations_of(train), metric(), choose, projection) is None


@pytest.mark.parametrize("spoil", [lambda x: x.fill_(float("nan")), lambda x: x.zero_()], ids=["nan", "zeros"])
def test_states_that_nothing_can_be_fitted_to_give_no_map(spoil: Callable[[Tensor], Tensor]) -> None:
    train = data(low_rank_slope(2), torch.zeros(HIDDEN), 0.1, N_TRAIN, 0)
    spoil(train.normed)
    assert fit_exit_map(equations_of(train), metric(), train, projection) is None


def test_fewer_rows_than_features_are_enough_for_the_ridge() -> None:
    slope = low_rank_slope(1)
    train, choose = (data(slope, torch.zeros(HIDDEN), 0.05, n, seed) for seed, n in enumerate((HIDDEN // 2, N_CHOOSE)))
    found = fit_exit_map(equations_of(train), metric(), choose, projection)
    assert found is None or bool(torch.isfinite(found.apply(choose.normed)).all())


def test_the_reduced_rank_is_the_best_in_the_heads_metric() -> None:
    """Cutting the singular values of the slope itself, which the head does not ask for, is worse."""
    torch.manual_seed(3)
    weights = head() * torch.logspace(0, -3, HIDDEN)  # a head that hardly sees some directions
    slope = low_rank_slope(HIDDEN)
    train = data(slope, torch.zeros(HIDDEN), 0.01, N_TRAIN, 0)
    in_metric = head_metric(DenseWeight(weights))
    equations = equations_of(train)
    found = fit_exit_map(equations, in_metric, train, lambda normed: normed @ weights.T)
    assert found is not None and found.rank in ranks(HIDDEN)
    rank = 8
    left, values, right = torch.linalg.svd(equations.solution(1e-3)[:-1])
    cut = (left[:, :rank] * values[:rank]) @ right[:rank]

    def error(predicted: Tensor) -> float:
        return float(((train.final - train.normed).double() - predicted).matmul(in_metric.root).square().sum())

    ours = list(map_fit._candidates(equations, in_metric, 1e-3))[ranks(HIDDEN).index(rank)]
    assert ours is not None
    assert error((ours.apply(train.normed) - train.normed).double()) < 0.9 * error(train.normed.double() @ cut)


def test_wide_models_get_lower_ranks() -> None:
    assert ranks(256) == [16, 32, 64, 256] and ranks(4096) == [64, 128, 256]


def test_a_wide_models_eigenvectors_span_what_the_exact_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    vectors = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64))[0]
    matrix = (vectors * torch.logspace(2, -2, HIDDEN, dtype=torch.float64)) @ vectors.T
    exact = leading_vectors(matrix, 5)
    monkeypatch.setattr(map_fit, "MAX_FULL_RANK_FEATURES", HIDDEN - 1)
    found = leading_vectors(matrix, 5)
    torch.testing.assert_close(found @ found.T, exact @ exact.T, rtol=0, atol=1e-6)
    assert torch.equal(found, leading_vectors(matrix, 5))


def test_the_order_of_chunks_in_memory_does_not_matter_for_the_sums() -> None:
    rows = data(low_rank_slope(2), torch.zeros(HIDDEN), 0.1, N_TRAIN, 0)
    whole, pieces = equations_of(rows), NormalEquations(HIDDEN)
    for first in range(0, N_TRAIN, 100):
        pieces.add(rows.normed[first : first + 100], rows.final[first : first + 100])
    torch.testing.assert_close(pieces.products, whole.products, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(pieces.solution(1e-3), whole.solution(1e-3), rtol=1e-9, atol=1e-9)


def test_what_is_kept_is_in_fp16s_values_and_an_overflow_is_refused() -> None:
    exit_map = random_map(4).rounded()
    assert torch.equal(exit_map.up, exit_map.up.half().float())
    with pytest.raises(ValueError, match="fp16"):
        ExitMap(None, torch.full((2, 2), 1e6), torch.zeros(2)).rounded()
