"""The arithmetic under the operations: exp to 2e-7 relative, fp16 bit by bit, sums in the order stated."""

import numpy as np
from numba import njit

from hetero_ee_cpu_ops.simd.floats import (
    exponential,
    lane_maximum,
    lane_sum,
    load16,
    load_lanes,
    store16,
    store_lanes,
)
from tests.cpu_support import Guarded, assert_same_bits

F32, HALF, BYTE = np.float32(0), np.uint16(0), np.int8(0)


@njit
def _exp(x, out):
    for i in range(0, x.size, 16):
        store16(exponential(load16(x.ctypes.data + 4 * i, F32)), out.ctypes.data + 4 * i)


@njit
def _through_half(x, half, back):
    for i in range(0, x.size, 16):
        store_lanes(load16(x.ctypes.data + 4 * i, F32), half.ctypes.data + 2 * i, 16, HALF)
        store16(load16(half.ctypes.data + 2 * i, HALF), back.ctypes.data + 4 * i)


@njit
def _reduced(x, first, end, out):
    lanes = load_lanes(x.ctypes.data, first, end, F32)
    store_lanes(lanes, out.ctypes.data, out.size, F32)
    return lane_sum(lanes), lane_maximum(lanes)


@njit
def _to_bytes(x, out):
    store_lanes(load16(x.ctypes.data, F32), out.ctypes.data, out.size, BYTE)


def test_exp_is_accurate_over_the_whole_range():
    x = np.concatenate([np.linspace(-120, 100, 1 << 20), np.random.default_rng(0).normal(size=1 << 16)])
    x = x.astype(np.float32)
    out = np.empty_like(x)
    _exp(x, out)
    exact = np.exp(x.astype(np.float64))
    normal = (exact > 1.18e-38) & (exact < 3.402e38)
    assert (np.abs(out[normal] / exact[normal] - 1) <= 2e-7).all()
    assert (np.abs(out[exact <= 1.18e-38] - exact[exact <= 1.18e-38]) <= 3e-45).all()
    assert (out[exact > 3.41e38] == np.inf).all() and (out[x < -104] == 0).all()
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, *[1e-30] * 11], np.float32)
    _exp(special, out := np.empty_like(special))
    assert np.isnan(out[0]) and out[1] == np.inf and out[2] == 0 and (out[3:] == 1).all()


def test_fp16_conversions_are_numpy_s_within_its_range():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 1 << 19, dtype=np.uint32)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    x = np.concatenate([bits, every, every + 4095, every + 4096, every + 4097]).view(np.float32)
    assert np.isinf(x).sum() >= 2 and (np.isfinite(x) & (np.abs(x) > 65520)).sum() > 10000
    half, back = np.empty(x.size, np.uint16), np.empty_like(x)
    _through_half(x, half, back)
    with np.errstate(invalid="ignore"):
        expected = x.clip(-65504, 65504).astype(np.float16)
    nan = np.isnan(x)
    assert_same_bits(half[~nan], expected.view(np.uint16)[~nan])
    assert_same_bits(back[~nan], expected.astype(np.float32)[~nan])
    assert np.isnan(half.view(np.float16)[nan]).all() and np.isnan(back[nan]).all()


def test_lanes_outside_are_zero_and_the_order_of_a_sum_is_fixed():
    rng = np.random.default_rng(1)
    for _ in range(200):
        x = rng.normal(size=16).astype(np.float32)
        first, end, count = (int(v) for v in rng.integers(0, 17, 3))
        kept = np.where((np.arange(16) >= first) & (np.arange(16) < end), x, np.float32(0))
        out = Guarded((count,), np.float32)
        total, greatest = _reduced(x, first, end, out.array)
        out.check()
        assert_same_bits(out.array, kept[:count])
        folded = kept
        while folded.size > 1:
            folded = folded[: folded.size // 2] + folded[folded.size // 2 :]
        assert total == folded[0] and greatest == kept.max()


def test_bytes_round_to_even():
    x = np.array(
        [0.5, 1.5, -0.5, -1.5, 126.5, -127.5, 2.4, -2.6, 0, 127, -128, 3.5, 4.5, 1e-9, -1e-9, 100.50001], np.float32
    )
    for count in (0, 5, 16):
        out = Guarded((count,), np.int8)
        _to_bytes(x, out.array)
        out.check()
        assert_same_bits(out.array, np.rint(x).astype(np.int8)[:count])
