"""Activations to int8: bit-equal to plain torch, and so to what the CPU's kernels multiply."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.quantize import quantize
from tests.gpu_support import DEVICE, assert_same_bits, random


def by_columns(x: Any) -> tuple[Any, Any]:
    """What is made of x, in the order of its columns: codes (m, G, 32), scales (m, G), of the groups that there are."""
    codes, scales = quantize(x)
    m, n_groups = len(x), -(-x.shape[1] // 32)
    parts = codes.view(m, codes.shape[1], 2, 4, 2, 2, 4).permute(0, 1, 2, 4, 5, 3, 6).reshape(m, -1, 32)
    scales = scales.transpose(1, 2).flatten(2).flatten(0, 1)[:m]
    assert not parts[:, n_groups:].any() and not scales[:, n_groups:].any()
    return parts[:, :n_groups].contiguous(), scales[:, :n_groups].contiguous()


def check(x: Any, n_terms: int = 1) -> None:
    codes, scales = quantize(x, n_terms)
    expected_codes, expected_scales = reference.quantize(x, n_terms)
    if len(codes) % 2:
        scales[-1, :, 1] = 0  # of a row that is not there
    assert_same_bits(codes, expected_codes)
    assert torch.equal(scales.isnan(), expected_scales.isnan())
    assert_same_bits(scales.nan_to_num(), expected_scales.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (3, 33), (2, 1056), (5, 250)])
def test_codes_and_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check((random(0, *shape) * 3).to(dtype))


def test_two_terms() -> None:
    """The first is the only term, the second what it leaves; both together are x to 16 bits."""
    x = random(0, 3, 1056) * 3
    x[1, 40] = float("nan")
    check(x, 2)
    parts = [each.view(3, -1, 2, *each.shape[1:]) for each in quantize(x, 2)[:1]]
    assert_same_bits(parts[0][:, 0, 0].contiguous(), quantize(x)[0])


def test_halves_are_rounded_to_even() -> None:
    x = torch.arange(-16, 16, device=DEVICE)[None] + 0.5
    x[0, 0] = 127.0
    codes, scales = by_columns(x)
    assert scales.item() == 1.0
    assert codes[0, 0, 1:].tolist() == [round(value) for value in x[0, 1:].tolist()]


def test_zeros_and_what_counts_as_zero() -> None:
    x = random(1, 3, 64)
    x[0] = 0
    x[1, :32] *= 1e-32
    x[2, 32:] *= 1e-25
    check(x)
    codes, scales = by_columns(x)
    assert not codes[0].any() and not scales[0].any() and not scales[1, 0] and scales[2].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_group_alone(value: float) -> None:
    x = random(2, 2, 96)
    x[0, 40] = value
    x.view(torch.int32)[0, 40] |= 0x55 * (value != value)  # a NaN may carry any bits
    check(x)
    _, scales = by_columns(x)
    assert scales.isfinite().tolist() == [[True, False, True], [True, True, True]]


def test_rows_do_not_see_each_other() -> None:
    x = random(3, 5, 320)
    codes, scales = by_columns(x)
    for row in range(5):
        alone = by_columns(x[row : row + 1].clone())
        assert_same_bits(alone[0], codes[row : row + 1])
        assert_same_bits(alone[1], scales[row : row + 1])


def test_wrong_activations_are_refused() -> None:
    for wrong in (random(4, 32), random(4, 2, 32).double(), random(4, 2, 64)[:, ::2], random(4, 2, 0)):
        with pytest.raises(ValueError, match="Activations are"):
            quantize(wrong)
    assert quantize(random(4, 0, 32))[0].shape == (0, 8, 2, 4, 2, 8)


def test_a_lane_reads_16_bytes_of_two_groups() -> None:
    """Word 16 (g / 2) + 4 j + 2 (g % 2) + h of a quad: columns 16 h + 4 j .. 4 j + 3 of its group g."""
    x = torch.arange(128, device=DEVICE)[None] / 1.0
    x[0, 31::32] = 127.0
    codes = quantize(x)[0].flatten()[:128]
    for j, group, half, byte in ((0, 0, 0, 0), (1, 0, 1, 2), (3, 2, 0, 1), (2, 3, 1, 3)):
        column = 32 * group + 16 * half + 4 * j + byte
        assert codes[4 * (16 * (group // 2) + 4 * j + 2 * (group % 2) + half) + byte] == column
