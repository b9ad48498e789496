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
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.thread_pool import ThreadPool
from hetero_ee_cpu_ops.tile_group import CODEBOOK, LINEAR, NARROW, NARROW_LIMIT, adds_in_16_bits, tile_kind
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


def test_the_kind_follows_from_the_entries_and_the_target() -> None:
    within, beyond = (tuple(range(limit - 15, limit + 1)) for limit in (NARROW_LIMIT, NARROW_LIMIT + 1))
    for features in (AVX2, VNNI, GENERIC):
        assert tile_kind(target(features), tuple(range(-8, 8))) == LINEAR
        assert tile_kind(target(features), beyond) == CODEBOOK
        assert tile_kind(target(features), tuple(-entry for entry in reversed(beyond))) == CODEBOOK
    assert tile_kind(target(AVX2), within) == NARROW
    assert tile_kind(target(VNNI), within) == tile_kind(target(GENERIC), within) == CODEBOOK


def test_fitted_codebooks_are_of_the_fastest_kind() -> None:
    assert FITTED_LIMIT == NARROW_LIMIT
    weight = quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), "codebook")
    kind = TileMatrix(weight.tiles.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook).kind
    assert kind == (NARROW if adds_in_16_bits(cpu_target.target_context) else CODEBOOK)
