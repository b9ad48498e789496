"""Quantizers that measurements compare with: our implementations of GPTQ and AWQ in scripts."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from published_quantizers import awq, gptq, group_columns, min_max, n_bits


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(48, 192, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(1024, 192, generator=generator) @ torch.randn(192, 192, generator=generator)
    return mixed * (1 + 19 * (torch.arange(192) % 24 == 0))


@pytest.mark.parametrize("method", [gptq, awq])
def test_products_have_less_error_than_of_nearest_weights(weight: Tensor, inputs: Tensor, method) -> None:
    def error(rounded: Tensor) -> float:
        return float(((weight - rounded) @ inputs.T).square().mean())

    assert error(method(weight, inputs.T @ inputs / len(inputs))) < 0.5 * error(min_max(weight))


def test_gptq_of_independent_equal_inputs_rounds_to_nearest(weight: Tensor) -> None:
    groups = weight.view(48, -1, 64)
    scales = (groups.abs().amax(-1, True) * 2 / 15).half().float()
    expected = ((groups / scales).round().clamp(-8, 7) * scales).view_as(weight)
    assert torch.allclose(gptq(weight, torch.eye(192)), expected)


def test_rounded_groups_have_at_most_16_values(weight: Tensor, inputs: Tensor) -> None:
    assert all(len(group.unique()) <= 16 for group in min_max(weight).view(-1, 64))
    reordered = torch.argsort((inputs.T @ inputs).diagonal(), descending=True)
    rounded = gptq(weight, inputs.T @ inputs / len(inputs))[:, reordered]
    assert all(len(group.unique()) <= 16 for group in rounded.reshape(-1, 64))


def test_bytes_count_codes_scales_and_zeros() -> None:
    assert [group_columns(n) for n in (256, 576, 1536)] == [128, 64, 128]
    assert n_bits(torch.empty(4, 256), has_zeros=False) == 4 * 256 * 4 + 8 * 16
    assert n_bits(torch.empty(4, 576), has_zeros=True) == 4 * 576 * 4 + 36 * 20
