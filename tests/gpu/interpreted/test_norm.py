"""Norms against float64: 2e-6 of the largest value. Batch keep their bits in every batch; guards are left alone."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.norm import layer_norm, rms_norm, rms_norm_heads
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, error, guarded_copy, random

TOLERANCE = 2e-6
EPS = 1e-5
SIZES = [1, 2, 17, 54, 64, 129, 1000]


def expected(x: Any, kind: str, scale: Any, bias: Any, delta: Any, bug: str = "") -> torch.Tensor:
    x = x.double() if delta is None or bug == "delta" else (x + delta).double()
    n = x.shape[1] - (bug == "tail")
    if kind == "layer" and bug != "center":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.pow(2).sum(-1, keepdim=True) / n + (0 if bug == "eps" else EPS)).sqrt()
    y = y if scale is None else y * scale.double()
    return y if bias is None or bug == "bias" else y + bias.double()


def run(x: Any, kind: str, scale: Any, bias: Any, delta: Any, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Output and x afterwards."""
    held, out = guarded_copy(x), Guarded(tuple(x.shape), dtype)
    if kind == "layer":
        assert layer_norm(held.tensor, scale, bias, EPS, out.tensor, delta=delta) is out.tensor
    else:
        assert rms_norm(held.tensor, scale, EPS, out.tensor, delta=delta) is out.tensor
    return out.check(), held.check()


def case(seed: int, n: int, m: int = 5) -> tuple[Any, ...]:
    x = (random(seed, m, n) + 0.5) * torch.logspace(-3, 3, m, device=DEVICE)[:, None]
    return x, random(seed + 1, n) + 1, random(seed + 2, n), random(seed + 3, m, n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_accurate_and_the_residual_is_added(kind: str, n: int) -> None:
    x, scale, bias, delta = case(n, n)
    bias = bias if kind == "layer" else None
    for given in ((scale, bias, delta), (None, None, delta), (scale, None, None), (None, None, None)):
        out, after = run(x, kind, *given)
        assert error(out, expected(x, kind, *given)) <= TOLERANCE * (50 if n < 20 else 1)  # few features may cancel
        assert_same_bits(after, x if given[2] is None else x + delta)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_bits_depend_on_the_row_alone(kind: str) -> None:
    x, scale, bias, delta = case(9, 129, m=16)
    whole, _ = run(x, kind, scale, bias if kind == "layer" else None, delta)
    for m in range(1, 17):
        some, _ = run(x[-m:].clone(), kind, scale, bias if kind == "layer" else None, delta[-m:].clone())
        assert_same_bits(some, whole[-m:])


def test_a_row_with_nan_or_infinity_spoils_no_other() -> None:
    x, scale, _, delta = case(3, 64)
    good, _ = run(x, "rms", scale, None, delta)
    x[1, 60], x[3, 0] = float("nan"), float("inf")
    out, _ = run(x, "rms", scale, None, delta)
    assert out[1].isnan().all() and out[3, 0].isnan()
    assert_same_bits(out[[0, 2, 4]], good[[0, 2, 4]])


def test_fp16_output_is_the_fp32_output_rounded() -> None:
    x, scale, _, delta = case(5, 129)
    full, half = run(x, "rms", scale, None, delta)[0], run(x, "rms", scale, None, delta, torch.float16)[0]
    assert_same_bits(half, full.half())


def test_out_may_be_x() -> None:
    x, scale, _, _ = case(6, 54)
    separate, _ = run(x, "rms", scale, None, None)
    assert_same_bits(rms_norm(x, scale, EPS, x), separate)


@pytest.mark.parametrize("n", [2, 10, 64, 80])
def test_heads_in_place_and_nothing_beside_them(n: int) -> None:
    x, scale = random(n, 3, 7 + 5 * n), random(n + 1, n) + 1
    held = guarded_copy(x)
    rms_norm_heads(held.tensor, scale, EPS, 7 + n, 3)
    after = held.check()
    heads = x[:, 7 + n : 7 + 4 * n].reshape(-1, n)
    assert error(after[:, 7 + n : 7 + 4 * n].reshape(-1, n), expected(heads, "rms", scale, None, None)) <= 1e-5
    for kept in (slice(0, 7 + n), slice(7 + 4 * n, None)):
        assert_same_bits(after[:, kept], x[:, kept])


def test_the_torch_reference_agrees() -> None:
    x, scale, bias, delta = case(11, 129)
    for found, kind in (
        (reference.rms_norm(x.clone(), scale, EPS, delta=delta), "rms"),
        (reference.layer_norm(x.clone(), scale, bias, EPS, delta=delta), "layer"),
    ):
        assert error(found, expected(x, kind, scale, bias if kind == "layer" else None, delta)) <= TOLERANCE
    heads = x.clone()
    reference.rms_norm_heads(heads, scale[:20].contiguous(), EPS, 3, 4)
    rms_norm_heads(x, scale[:20].contiguous(), EPS, 3, 4)
    assert error(heads, x) <= TOLERANCE


def test_no_rows_are_no_work() -> None:
    assert rms_norm(torch.empty(0, 8, device=DEVICE), None, EPS).shape == (0, 8)


def test_wrong_arguments_are_refused() -> None:
    x, scale = random(0, 2, 8), random(1, 8)
    for bad in (
        lambda: rms_norm(x.double(), scale, EPS),
        lambda: rms_norm(x.t(), scale, EPS),
        lambda: rms_norm(x, scale[:7], EPS),
        lambda: rms_norm(x, scale, EPS, delta=x[:1]),
        lambda: rms_norm(x, scale, EPS, x.half().t().contiguous()),
        lambda: layer_norm(x, scale, scale.half(), EPS),
        lambda: layer_norm(x[:, :0], None, None, EPS),
        lambda: rms_norm_heads(x, scale, EPS, 1, 1),
        lambda: rms_norm_heads(x, scale, EPS, -1, 1),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize("bug", ["delta", "tail", "center", "eps", "bias"])
def test_the_tolerance_catches(bug: str) -> None:
    x, scale, bias, delta = case(21, 129, m=1)
    x *= 0.01  # where eps and bias count
    out, _ = run(x, "layer", scale, bias, delta * 0.01)
    assert error(out, expected(x, "layer", scale, bias, delta * 0.01)) <= TOLERANCE
    assert error(out, expected(x, "layer", scale, bias, delta * 0.01, bug)) > 3 * TOLERANCE
