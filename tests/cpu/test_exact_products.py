"""The product's integers: sums of entries times activations, to the bit, for codebooks of every width, at the extremes.

Activations are whole numbers of which one in each group is 127, so that int8 says exactly what they are, and scales are
1: every product is a whole number below 2^24. test_other_targets.py runs this file as AVX2 code too.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.registry import cpu_target

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import FITTED_LIMIT, quantize
from hetero_ee.weights.weight import TileWeight
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.tile_kind import (
    BYTES,
    CODEBOOK,
    FIVE,
    FIVE_ZEROS,
    LINEAR,
    LINEAR_CODEBOOK,
    NARROW,
    NARROW_LIMIT,
    SIX,
    ZEROS,
    adds_in_16_bits,
    tile_kind,
)
from hetero_ee_kernels import reference
from hetero_ee_kernels.tile_matrix import TileMatrix as GpuMatrix

WIDTHS = {"narrow": (-NARROW_LIMIT, NARROW_LIMIT), "beyond": (-NARROW_LIMIT - 1, NARROW_LIMIT + 1), "wide": (-128, 127)}
AVX2, VNNI, GENERIC = "+avx2,+fma", "+avx2,+avx512vnni", ""


@pytest.fixture(scope="module")
def matmul() -> Matmul:
    return Matmul(ThreadPool(1))


def target(features: str) -> Any:
    return SimpleNamespace(codegen=lambda: SimpleNamespace(_tm_features=features))


@st.composite
def codebooks(draw: st.DrawFn) -> tuple[int, ...]:
    """16 integers; more often than not both ends of the range are among them."""
    low, high = draw(st.sampled_from(list(WIDTHS.values())))
    ends = draw(st.sampled_from([(), (low,), (high,), (low, high)]))
    others = draw(st.sets(st.integers(low + 1, high - 1), min_size=16 - len(ends), max_size=16 - len(ends)))
    return tuple(sorted({*ends, *others}))


def products(matmul: Matmul, codebook: tuple[int, ...], codes: Any, x: Any) -> Any:
    """y of the CPU kernels, after comparing it with the two references."""
    tiles, scales = layout.pack_int4(codes), torch.ones(len(codes) // 16, codes.shape[1] // 32, 16).half()
    y = matmul(x, TileMatrix(tiles.numpy(), scales.numpy(), 0, codebook))
    expected = x.astype(np.int64) @ np.array(codebook)[codes.int().numpy()].T
    assert np.abs(expected).max() < 2**24
    assert np.array_equal(y, expected)
    gpu = reference.matmul(torch.from_numpy(x), GpuMatrix(tiles, scales, 0, codebook))
    assert np.array_equal(gpu.numpy(), expected)
    plain = TileWeight(tiles, scales, 0, codebook, *codes.shape).dequantize()
    assert np.array_equal(torch.from_numpy(x).double() @ plain.double().T, expected)
    return y


@given(codebooks(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 19), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_products_are_sums_of_entries_times_activations(
    matmul: Matmul, codebook: tuple[int, ...], n_blocks: int, n_groups: int, m: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    codes = torch.from_numpy(random.integers(0, 16, (16 * n_blocks, 32 * n_groups), np.uint8))
    x = random.integers(-127, 128, (m, 32 * n_groups)).astype(np.float32)
    x[:, random.integers(32) :: 32] = random.choice([-127, 127])
    products(matmul, codebook, codes, x)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_at_the_ends_of_the_range_neither_saturate_nor_wrap(matmul: Matmul, width: str) -> None:
    """Every product of a group at its largest, all of one sign, all of the other, and in alternation."""
    low, high = WIDTHS[width]
    codebook = (low, *range(-7, 7), high)
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[1::2] = 15
    codes[4:8, ::2] ^= 15
    codes[8:12, 16:48] ^= 15
    signs = np.ones((6, 64), np.float32)
    signs[1] *= -1
    signs[2, ::2] *= -1
    signs[3, 16:48] *= -1
    signs[4, :8] *= -1
    signs[5, 1::4] *= -1
    y = products(matmul, codebook, codes, 127 * signs)
    assert y.min() == 64 * 127 * min(low, -high) and y.max() == 64 * 127 * max(-low, high)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize(("kind", "n_bits"), [("int5", 5), (layout.ZEROS_5, 5), ("int6", 6)])
def test_wider_codes_are_exact_at_the_ends_of_their_range(matmul: Matmul, kind: str, n_bits: int, m: int) -> None:
    """Codes and activations at both ends, alone and mixed; scales are powers of two, zero points whole numbers."""
    random = np.random.default_rng(m)
    codes = torch.from_numpy(random.integers(0, 2**n_bits, (64, 96), np.uint8))
    codes[16:32], codes[32:40] = 2**n_bits - 1, 0
    x = random.integers(-127, 128, (m, 96)).astype(np.float32)
    x[:, 5::32] = 127
    x[:1] = 127
    x[1:2] = -127
    numbers = torch.from_numpy(2.0 ** random.integers(-1, 2, (64, 3, 2 if kind != "int5" else 1))).half()
    if kind == layout.ZEROS_5:
        numbers[..., 1] = torch.from_numpy(random.integers(-16, 17, (64, 3)))
    tiles, scales = layout.pack(codes, kind), layout.pack_numbers(numbers)
    weight = TileWeight(tiles, scales, 0, None, 64, 96)
    assert weight.layout == kind and torch.equal(layout.unpack(tiles), codes)
    dense = weight.dequantize().double()
    if kind == "int5":
        assert torch.equal(dense, (codes.double() - 16) * numbers.double().repeat_interleave(32, 1)[..., 0])
    y = matmul(x, TileMatrix(tiles.numpy(), scales.numpy(), 0, None))
    assert np.array_equal(y, x.astype(np.float64) @ dense.numpy().T)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 13])
def test_zero_points_leave_the_bits_of_one_rounding_each(matmul: Matmul, m: int) -> None:
    """A group's sum less z times that of its activations, and its product with both scales: each rounded to fp32 once,
    on every instruction set alike."""
    random = np.random.default_rng(m)
    codes = torch.from_numpy(random.integers(0, 16, (48, 32), np.uint8))
    scales, zeros = (torch.from_numpy(random.standard_normal((48, 1)).astype(np.float16)) for _ in range(2))
    zeros[:24] = (zeros[:24] * 5).round()
    packed = layout.pack_scales(scales, zeros)
    x = random.standard_normal((m, 32)).astype(np.float32)
    y = matmul(x, TileMatrix(layout.pack_int4(codes).numpy(), packed.numpy(), -3, LINEAR_CODEBOOK))
    largest = np.abs(x).max(1, keepdims=True)
    q = np.rint(x * (np.float32(127) / largest)).astype(np.int64)
    sums, sum_q = q @ (codes.numpy().astype(np.int64) - 8).T, q.sum(1, keepdims=True)
    left = (sums - sum_q * zeros.numpy().astype(np.float64).T).astype(np.float32)  # exact before it is rounded
    factors = scales.numpy().astype(np.float32).T * (largest / np.float32(127))
    expected = (left.astype(np.float64) * factors).astype(np.float32) * np.float32(2.0**-3)
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("m", [1, 3, 4, 8])
def test_whole_zero_points_leave_exact_products(matmul: Matmul, m: int) -> None:
    random = np.random.default_rng(m)
    codes = torch.from_numpy(random.integers(0, 16, (32, 96), np.uint8))
    zeros = torch.from_numpy(random.integers(-8, 8, (32, 3))).half()
    tiles, scales = layout.pack_int4(codes), layout.pack_scales(torch.ones_like(zeros), zeros)
    x = random.integers(-127, 128, (m, 96)).astype(np.float32)
    x[:, 5::32] = 127
    y = matmul(x, TileMatrix(tiles.numpy(), scales.numpy(), 0, LINEAR_CODEBOOK))
    entries = codes.numpy().astype(np.int64) - 8 - np.repeat(zeros.numpy().astype(np.int64), 32, 1)
    assert np.array_equal(y, x.astype(np.int64) @ entries.T)


def test_the_kind_follows_from_the_entries_and_the_target() -> None:
    within, beyond = (tuple(range(limit - 15, limit + 1)) for limit in (NARROW_LIMIT, NARROW_LIMIT + 1))
    for features in (AVX2, VNNI, GENERIC):
        context = target(features)
        assert tile_kind(context, LINEAR_CODEBOOK, 256, 16) == LINEAR
        assert tile_kind(context, LINEAR_CODEBOOK, 256, 32) == ZEROS
        assert tile_kind(context, beyond, 256, 16) == CODEBOOK
        assert tile_kind(context, tuple(-entry for entry in reversed(beyond)), 256, 16) == CODEBOOK
        sizes = {FIVE: (320, 16), FIVE_ZEROS: (320, 32), SIX: (384, 32), BYTES: (512, 16)}
        assert all(tile_kind(context, None, *each) == kind for kind, each in sizes.items())
        with pytest.raises(KeyError):
            tile_kind(context, beyond, 256, 32)
    assert tile_kind(target(AVX2), within, 256, 16) == NARROW
    assert tile_kind(target(VNNI), within, 256, 16) == tile_kind(target(GENERIC), within, 256, 16) == CODEBOOK


def test_fitted_codebooks_are_of_the_fastest_kind() -> None:
    assert FITTED_LIMIT == NARROW_LIMIT
    weight = quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), "codebook")
    kind = TileMatrix(weight.tiles.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook).kind
    assert kind == (NARROW if adds_in_16_bits(cpu_target.target_context) else CODEBOOK)
