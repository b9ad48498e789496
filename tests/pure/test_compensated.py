"""Matrices rounded for their inputs: less error of products than plain rounding, the same bytes for any workers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hetero_ee.quality.calibrated import second_moments
from hetero_ee.weights import compensated
from hetero_ee.weights.compensated import quantize_for_inputs, spans
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.weight import TileWeight


def correlated_inputs(n_columns: int, n_rows: int = 2000) -> torch.Tensor:
    """Inputs that depend on each other, some of them much larger than others, as in a model."""
    random = torch.Generator().manual_seed(5)
    mixed = torch.randn(n_rows, n_columns, generator=random) @ torch.randn(n_columns, n_columns, generator=random)
    return mixed * torch.exp(torch.randn(n_columns, generator=random))


def product_error(found: TileWeight, weight: torch.Tensor, x: torch.Tensor) -> float:
    return float(((found.dequantize() - weight) @ x.T).square().mean())


@pytest.mark.parametrize(("n_rows", "n_columns"), [(48, 96), (37, 70), (300, 64)])
def test_products_have_less_error_than_those_of_plainly_rounded_weights(n_rows: int, n_columns: int) -> None:
    weight, x = torch.randn(n_rows, n_columns), correlated_inputs(n_columns)
    found = quantize_for_inputs(weight, [second_moments([x[:900], x[900:]], map)])
    assert found.layout == "int4" and found.shape == weight.shape
    assert product_error(found, weight, x) < 0.5 * product_error(quantize(weight, "codebook"), weight, x)


@pytest.mark.parametrize("layout", ["int5", "int6", "int8"])
@pytest.mark.parametrize(("n_rows", "n_columns"), [(48, 96), (37, 70)])
def test_so_do_products_at_more_bits(layout: str, n_rows: int, n_columns: int) -> None:
    weight, x = torch.randn(n_rows, n_columns), correlated_inputs(n_columns)
    found = quantize_for_inputs(weight, [second_moments([x], map)], layout)
    assert found.layout == layout and found.shape == weight.shape
    assert product_error(found, weight, x) < 0.6 * product_error(quantize(weight, layout), weight, x)


def test_each_step_reduces_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(64, 128), correlated_inputs(128)
    moments = [second_moments([x], map)]
    whole = product_error(quantize_for_inputs(weight, moments), weight, x)
    monkeypatch.setattr(compensated, "STAY", 1e9)  # scales stay as searched
    unfitted = product_error(quantize_for_inputs(weight, moments), weight, x)
    monkeypatch.setattr(compensated, "_feedback", lambda moments: torch.eye(len(moments)))
    uncompensated = product_error(quantize_for_inputs(weight, moments), weight, x)
    assert whole < unfitted < uncompensated < product_error(quantize(weight, "codebook"), weight, x)


def test_columns_are_rounded_as_one_by_one_with_the_inverse_of_the_moments() -> None:
    """GPTQ as its paper writes it, without blocks: arXiv 2210.17323, section 3."""
    weight, x = torch.randn(16, 64).double(), correlated_inputs(64).double()
    damped = compensated._damped(second_moments([x.float()], map)).double()
    order = torch.argsort(damped.diagonal(), descending=True, stable=True)
    factor = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    left, codes = weight[:, order].clone(), torch.empty(16, 64)
    for column in range(64):
        codes[:, column] = (left[:, column] / 0.3).round().clamp(-8, 7)
        error = (left[:, column] - 0.3 * codes[:, column]) / factor[column, column]
        left[:, column:] -= error[:, None] * factor[column, column:]
    rounding = compensated._Rounding(damped.float())
    linear = compensated.Codebook(torch.arange(-8.0, 8.0))
    found, _ = rounding.round(weight.float(), torch.full((16, 2), 0.3), linear)
    assert ((found[:, order].float() - 8) == codes).float().mean() > 0.99  # rounding errors decide between neighbours


def test_bytes_do_not_depend_on_workers() -> None:
    weight, x = torch.randn(600, 1056), correlated_inputs(1056, 400)
    alone = quantize_for_inputs(weight, [second_moments([x], map)])
    with ThreadPoolExecutor(3) as pool:
        shared = quantize_for_inputs(weight, [second_moments([x], pool.map)], workers=pool.map)
    assert torch.equal(alone.tiles, shared.tiles) and torch.equal(alone.scales, shared.scales)


def test_wide_matrices_are_compensated_within_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compensated, "MOST_COLUMNS", 64)
    assert [(each.start, each.stop) for each in spans(150)] == [(0, 64), (64, 128), (128, 150)]
    weight, x = torch.randn(32, 150), correlated_inputs(150)
    found = quantize_for_inputs(weight, [second_moments([x[:, span]], map) for span in spans(150)])
    assert product_error(found, weight, x) < product_error(quantize(weight, "codebook"), weight, x)


def test_dead_inputs_and_weights_are_no_obstacle() -> None:
    weight, x = torch.randn(32, 64), correlated_inputs(64)
    x[:, 5:40] = 0
    weight[3] = 0
    weight[:, 32:] = 0
    found = quantize_for_inputs(weight, [second_moments([x], map)]).dequantize()
    assert found.isfinite().all() and not found[3].any() and not found[:, 32:].any()
    nothing = quantize_for_inputs(weight, [torch.zeros(64, 64)]).dequantize()
    assert (nothing - weight).square().mean() < 0.02
