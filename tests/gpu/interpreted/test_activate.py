"""Activations against float64: 1e-6 of the value and of the input around it."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.activate import KINDS, activate
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, random

TOLERANCE = 1e-6
THRESHOLD = 0.3
SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 300.0, -300.0, 1e10, -1e10, THRESHOLD, -0.5, 0.5, 1.0, -1.0, 20.0]


def expected(x: Any, kind: str, gated: bool, bug: str = "") -> torch.Tensor:
    x = x.double()
    gate, up = x.chunk(2, -1) if gated else (x, torch.ones((), dtype=torch.float64, device=DEVICE))
    if bug == "halves":
        gate, up = up, gate
    limit = torch.tensor(THRESHOLD, device=DEVICE).double()  # as fp32 has it
    formulas = {
        "silu": lambda v: v * torch.sigmoid(v),
        "gelu": lambda v: v * torch.special.ndtr(v),
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu": lambda v: v.clamp(min=0),
        "relu2": lambda v: v.clamp(min=0) ** 2,
        "softcap": lambda v: limit * torch.tanh(v / limit),
        "clamped_silu": lambda v: v.clamp(max=limit) * torch.sigmoid(1.702 * v.clamp(max=limit)),
        "fatrelu": lambda v: torch.where(v > limit if bug == "threshold" else v >= limit, v, 0.0),
    }
    if gated and kind == "clamped_silu":
        up = up.clamp(-limit, limit) + 1
    return formulas[kind](gate) * up


def close(found: Any, wanted: Any, x: Any, gated: bool) -> bool:
    gate, up = x.double().chunk(2, -1) if gated else (x.double(), torch.ones(()))
    around = (gate.abs().clamp(max=10) * up.abs()).maximum(wanted.abs())
    return bool(((found.double() - wanted).abs() <= TOLERANCE * around + 1e-37).all())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_outputs", [1, 76, 513])
def test_accurate(kind: str, gated: bool, n_outputs: int) -> None:
    x = random(n_outputs, 3, n_outputs * (1 + gated), scale=3.0)
    n_special = min(n_outputs, len(SPECIAL))
    x[1, :n_special] = torch.tensor(SPECIAL[:n_special])
    out = Guarded((3, n_outputs))
    assert activate(x, kind, out.tensor, gated=gated, threshold=THRESHOLD) is out.tensor
    wanted = expected(x, kind, gated)
    assert close(out.check(), wanted, x, gated)
    assert close(reference.activate(x, kind, gated=gated, threshold=THRESHOLD), wanted, x, gated)
    half = activate(x, kind, torch.empty(3, n_outputs, dtype=torch.float16, device=DEVICE), gated=gated, threshold=0.3)
    assert_same_bits(half, out.tensor.half())


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_seen(kind: str) -> None:
    x = torch.full((1, 5), float("nan"), device=DEVICE)
    assert bool(activate(x, kind, gated=False).isnan().all()) == (kind != "fatrelu")
    assert torch.equal(activate(x, kind, gated=False).isnan(), reference.activate(x, kind, gated=False).isnan())


def test_bits_depend_on_the_row_alone() -> None:
    x = random(1, 16, 2 * 600)
    whole = activate(x, "silu", gated=True)
    for m in range(1, 17):
        assert_same_bits(activate(x[-m:].clone(), "silu", gated=True), whole[-m:])


def test_wrong_arguments_are_refused() -> None:
    x = random(0, 2, 8)
    for bad in (
        lambda: activate(x, "swish", gated=True),
        lambda: activate(x[:, :7].contiguous(), "silu", gated=True),
        lambda: activate(x.double(), "silu", gated=True),
        lambda: activate(x[:, :6], "silu", gated=True),
        lambda: activate(x, "silu", torch.empty(2, 8, device=DEVICE), gated=True),
        lambda: activate(x, "silu", torch.empty(2, 4, device=DEVICE).double(), gated=True),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize(("bug", "kind"), [("halves", "silu"), ("threshold", "fatrelu")])
def test_the_tolerance_catches(bug: str, kind: str) -> None:
    x = random(7, 1, 32)
    x[0, 3] = torch.tensor(THRESHOLD)
    found = activate(x, kind, gated=True, threshold=THRESHOLD)
    assert close(found, expected(x, kind, True), x, True)
    assert not close(found, expected(x, kind, True, bug), x, True)
