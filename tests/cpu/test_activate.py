"""Activations against float64: relative errors as stated in activate.py; bits by element alone, threads or not."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_ee_cpu_ops.activate import CHUNK, KINDS, SHARED_FROM, activate
from tests.cpu_support import Guarded, assert_same_bits, teams

THRESHOLD = 0.25


def exact(x, kind):
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        if kind == "silu":
            return x / (1 + np.exp(-x))
        if kind == "clamped_silu":
            return np.minimum(x, THRESHOLD) / (1 + np.exp(-1.702 * np.minimum(x, THRESHOLD)))
        if kind == "gelu":
            return x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2
        if kind == "gelu_tanh":
            return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "softcap":
        return THRESHOLD * np.tanh(x / THRESHOLD)
    if kind == "relu2":
        return np.maximum(x, 0) ** 2
    return np.where(x >= (THRESHOLD if kind == "fatrelu" else 0), x, 0)


def assert_accurate(found, x, kind):
    """1e-6 relative (gelus: times (|x| + 1)^2 / 2; clamped_silu: times |x| + 1), or 3e-37 (silu below -88.7 is 0)."""
    expected = exact(x, kind)
    around = np.abs(x) + 1
    bound = 1e-6 * np.abs(expected) * {"gelu": around**2 / 2, "clam": around}.get(kind[:4], 1)
    assert (np.abs(found - expected) <= np.maximum(bound, 3e-37)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_accurate_over_the_whole_range(kind):
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-100, 100, 200_001), rng.normal(size=50_000), 10.0 ** rng.uniform(-30, 0, 5_000)])
    x = np.concatenate([x, -x]).astype(np.float32)[None]
    assert_accurate(activate(x, kind, gated=False, threshold=THRESHOLD), x, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_close_to_torch(kind):
    x = torch.linspace(-10, 10, 5_001)[None]
    expected = {
        "silu": F.silu(x), "relu": F.relu(x), "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh"),
        "relu2": F.relu(x) ** 2,
        "fatrelu": torch.where(x >= THRESHOLD, x, 0.0), "softcap": THRESHOLD * torch.tanh(x / THRESHOLD),
        "clamped_silu": x.clamp(max=THRESHOLD) * torch.sigmoid(1.702 * x.clamp(max=THRESHOLD)),
    }[kind]  # fmt: skip
    found = activate(x.numpy(), kind, gated=False, threshold=THRESHOLD)
    assert np.abs(found - expected.numpy()).max() <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kind):
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38]], np.float32)
    y = activate(x, kind, gated=False, threshold=THRESHOLD)[0]
    if kind == "softcap":
        assert np.array_equal(y, [THRESHOLD, -THRESHOLD, np.nan, 0, 0, THRESHOLD, -THRESHOLD], equal_nan=True)
        return
    if kind == "clamped_silu":
        assert y[0] == y[5] and abs(y[0] - exact(np.float32([THRESHOLD]), kind)[0]) < 1e-7
    else:
        assert y[0] == np.inf and y[5] == (np.inf if kind == "relu2" else np.float32(3e38))
    assert y[3] == 0 and y[4] == 0 and (kind.startswith(("gelu", "silu", "clamped")) or y[1] == 0) and y[6] == 0
    assert y[2] == 0 if kind == "fatrelu" else np.isnan(y[2])


def test_gated_is_the_product_and_stays_inside():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        m, n, kind = int(rng.integers(1, 18)), int(rng.integers(1, 200)), str(rng.choice(list(KINDS)))
        x = (rng.normal(size=(m, 2 * n)) * 4).astype(np.float32)
        out = Guarded((m, n), np.float32)
        assert activate(x, kind, out.array, gated=True, threshold=THRESHOLD) is out.array
        out.check()
        act = activate(np.ascontiguousarray(x[:, :n]), kind, gated=False, threshold=THRESHOLD)
        assert_accurate(act, x[:, :n], kind)
        up = x[:, n:]
        assert_same_bits(out.array, act * (up.clip(-THRESHOLD, THRESHOLD) + 1 if kind == "clamped_silu" else up))
        for row in range(m):
            alone = activate(x[row : row + 1].copy(), kind, gated=True, threshold=THRESHOLD)
            assert_same_bits(alone[0], out.array[row])


def test_threads_change_nothing():
    with teams() as all_teams:
        for seed, n in enumerate((1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 11008, SHARED_FROM, SHARED_FROM + 5)):
            rng = np.random.default_rng(seed)
            for kind, gated in (("silu", True), ("gelu", False), ("fatrelu", True)):
                m = int(rng.integers(1, 18)) if n < 12_000 else 2
                x = rng.normal(size=(m, n * (1 + gated))).astype(np.float32)
                expected = activate(np.ascontiguousarray(x[:, :n]), kind, gated=False, threshold=THRESHOLD)
                expected = expected * x[:, n:] if gated else expected
                assert_accurate(activate(x, kind, gated=False, threshold=THRESHOLD), x, kind)
                for pool in all_teams:
                    out = Guarded((m, n), np.float32)
                    activate(x, kind, out.array, gated=gated, threshold=THRESHOLD, pool=pool)
                    out.check()
                    assert_same_bits(out.array, expected)


def test_wrong_arguments_are_refused():
    x = np.zeros((2, 32), np.float32)
    for bad in (
        lambda: activate(x, "swish", gated=True),
        lambda: activate(x, "silu", np.zeros((2, 32), np.float32), gated=True),
        lambda: activate(x, "silu", np.zeros((1, 16), np.float32), gated=True),
        lambda: activate(x, "silu", np.zeros((2, 16)), gated=True),
        lambda: activate(x[:, :31].copy(), "silu", gated=True),
        lambda: activate(x[:, ::2], "silu", gated=False),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize("bug", ["gate and up swapped", "tanh for erf", "quick gelu", "threshold", "tail"])
def test_the_tolerance_catches(bug):
    x = np.random.default_rng(0).normal(size=(1, 33)).astype(np.float32)
    kind = {"threshold": "fatrelu", "gate and up swapped": "silu", "tail": "silu"}.get(bug, "gelu")
    found = activate(x, kind, gated=False, threshold=THRESHOLD)
    if bug == "gate and up swapped":
        found = found * 2 / 2 * np.sign(x)
    if bug == "tanh for erf":
        found = activate(x, "gelu_tanh", gated=False)
    if bug == "quick gelu":
        found = x / (1 + np.exp(-1.702 * x))
    if bug == "threshold":
        found = activate(x, kind, gated=False, threshold=0.5)
    if bug == "tail":
        found[:, -1] = 0
    with pytest.raises(AssertionError):
        assert_accurate(found, x, kind)
