"""Gated DeltaNet and Mamba-2: near float64; bits depend on neither batch, cuts, neighbours nor rollbacks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_ee_kernels import delta_reference
from hetero_ee_kernels.delta_state import (
    DeltaRows,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    earlier_rows,
    new_delta_state,
)
from hetero_ee_kernels.gated_delta import gated_delta, mamba2
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, error, int32, random

SMALL = DeltaShape(n_key_heads=1, n_value_heads=2, key_dim=6, value_dim=8, n_taps=3, n_logged=7, n_kept=4)
ODD = DeltaShape(n_key_heads=2, n_value_heads=4, key_dim=12, value_dim=20, n_taps=4, n_logged=7, n_kept=4)
GROUPS = DeltaShape(n_key_heads=2, n_value_heads=6, key_dim=10, value_dim=18, n_taps=4, n_logged=7, n_kept=4)
WIDE = DeltaShape(n_key_heads=1, n_value_heads=1, key_dim=128, value_dim=128, n_taps=4)
LAYER, N_LAYERS, N_SLOTS = 1, 2, 3
CASES = (SMALL, False), (ODD, False), (ODD, True)


def weights_of(shape: DeltaShape, *, is_tiled: bool, is_mamba: bool) -> DeltaWeights:
    more = (random(7, shape.n_value_heads), random(8, shape.n_channels)) if is_mamba else ()
    rates = -torch.linspace(0.01, 8, shape.n_value_heads, device=DEVICE)
    return DeltaWeights(
        random(1, shape.n_channels, shape.n_taps, scale=0.5),
        rates,
        random(2, shape.n_value_heads),
        random(3, shape.n_outputs if is_mamba else shape.value_dim) + 1,
        1e-6,
        is_tiled,
        *more,
    )


class Layer:
    """A layer with its state, whose rows of a slot are the same in every test."""

    def __init__(
        self, shape: DeltaShape, compute: Any = gated_delta, n_rows: int = 24, *, is_tiled: bool = False
    ) -> None:
        self.is_mamba = compute.__name__ == "mamba2"
        self.shape, self.compute = shape, compute
        self.weights = weights_of(shape, is_tiled=is_tiled, is_mamba=self.is_mamba)
        self.state = new_delta_state(shape, N_SLOTS, N_LAYERS, DEVICE)
        for part in (self.state.states, self.state.inputs, self.state.keys, self.state.deltas, self.state.decays):
            part.fill_(float("nan"))
        self.bases = [0] * N_SLOTS
        self.x = random(4, N_SLOTS, n_rows, shape.n_features(is_mamba=self.is_mamba))
        self.gates = 6 * random(6, N_SLOTS, n_rows, 2 * shape.n_value_heads)
        if self.is_mamba:
            self.x[..., -shape.n_value_heads :] *= 6

    def run(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        """Outputs of rows (slot, position), which nobody's memory surrounds."""
        slots, positions = zip(*rows, strict=True)
        for slot in set(slots):
            after = self.shape.base_after(
                self.bases[slot], 1 + max(position for each, position in rows if each == slot)
            )
            self.state.bases[:, slot, LAYER] = int32(self.bases[slot], after)
            self.bases[slot] = after
        at, out = (torch.tensor(slots), torch.tensor(positions)), Guarded((len(rows), self.shape.n_outputs))
        given = (each[at].contiguous() for each in ((self.x,) if self.is_mamba else (self.x, self.gates)))
        place = DeltaRows(int32(*slots), int32(*positions), int32(*earlier_rows(slots)))
        assert self.compute(*given, self.weights, self.state, place, LAYER, out.tensor) is out.tensor
        return out.check()

    def prompt(self, slot: int, first: int, end: int) -> torch.Tensor:
        return self.run([(slot, position) for position in range(first, end)])


def definition(layer: Layer, slot: int, end: int) -> torch.Tensor:
    """The outputs of a slot's first rows in float64, by the formulas alone."""
    shape, weights = layer.shape, layer.weights
    x, gates = (each[slot, :end].double() for each in (layer.x, layer.gates))
    x, z, steps = x.split([shape.n_channels, shape.n_outputs, shape.n_value_heads if layer.is_mamba else 0], 1)
    before = torch.zeros(shape.n_taps - 1, shape.n_channels, device=DEVICE, dtype=torch.float64)
    windows = torch.cat([before, x]).unfold(0, shape.n_taps, 1)  # (m, channels, taps)
    mixed = (windows * weights.taps.double()).sum(-1)
    mixed = torch.nn.functional.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
    n_keys, n_group = shape.n_key_heads * shape.key_dim, shape.n_value_heads // shape.n_key_heads
    q, k, v = mixed.split([n_keys, n_keys, shape.n_value_heads * shape.value_dim], 1)
    q, k = (each.view(end, shape.n_key_heads, -1) for each in (q, k))
    q, k = (each.repeat(1, n_group, 1) if weights.is_tiled else each.repeat_interleave(n_group, 1) for each in (q, k))
    v = v.view(end, shape.n_value_heads, -1)
    if layer.is_mamba:
        return scanned_mamba(layer, q, k, v, z, steps)
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    b, a = gates.view(end, 2, -1).unbind(1)
    decay = (weights.rates.double() * torch.nn.functional.softplus(a + weights.dt_bias)).exp()
    s, outputs = torch.zeros(shape.n_value_heads, shape.key_dim, shape.value_dim, device=DEVICE).double(), []
    for t in range(end):
        s = s * decay[t, :, None, None]
        delta = (v[t] - torch.einsum("hkv,hk->hv", s, k[t])) * b[t].sigmoid()[:, None]
        s = s + k[t, :, :, None] * delta[:, None]
        o = torch.einsum("hkv,hk->hv", s, q[t]) / shape.key_dim**0.5
        outputs.append(o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights.norm)
    return torch.stack(outputs).flatten(1) * torch.nn.functional.silu(z)


def scanned_mamba(layer: Layer, c: Any, b: Any, x: Any, z: Any, steps: Any) -> torch.Tensor:
    """The outputs of Mamba-2 as sums over earlier rows, without a state."""
    weights, m = layer.weights, len(x)
    step = torch.nn.functional.softplus(steps + weights.dt_bias)
    total = (weights.rates.double() * step).cumsum(0)
    kept = torch.ones(m, m, device=DEVICE).tril().bool()[..., None]
    shares = (
        torch.where(kept, total[:, None] - total[None], -torch.inf).exp()
        * torch.einsum("thk,shk->tsh", c, b)
        * step[None]
    )
    y = torch.einsum("tsh,shv->thv", shares, x) + weights.skips.double()[:, None] * x
    y = (y.flatten(1) * torch.nn.functional.silu(z)).view(m, layer.shape.n_key_heads, -1)
    return (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1) * weights.norm


@pytest.mark.parametrize(
    ("shape", "is_tiled", "compute"),
    [
        *((*case, each) for case in CASES for each in (gated_delta, delta_reference.gated_delta)),
        *((GROUPS, False, each) for each in (mamba2, delta_reference.mamba2)),
    ],
)
@pytest.mark.sample(1)
def test_outputs_are_the_formulas(shape: DeltaShape, is_tiled: bool, compute: Any) -> None:
    """Over several stored states: a prompt longer than the log, then token by token."""
    layer = Layer(shape, compute, is_tiled=is_tiled)
    found = [layer.prompt(1, 0, 9), *(layer.prompt(1, position, position + 1) for position in range(9, 14))]
    assert error(torch.cat(found), definition(layer, 1, 14)) < 2e-5


@pytest.mark.sample(0)
def test_a_wide_head() -> None:
    layer = Layer(WIDE, n_rows=6)
    assert error(layer.prompt(0, 0, 6), definition(layer, 0, 6)) < 2e-5


@pytest.mark.parametrize("compute", [delta_reference.gated_delta, gated_delta, delta_reference.mamba2, mamba2])
@pytest.mark.sample(1)
def test_bits_depend_neither_on_cuts_nor_on_other_slots(compute: Any) -> None:
    whole = Layer(SMALL, compute)
    expected = [whole.prompt(slot, 0, 14) for slot in range(N_SLOTS)]
    cut = Layer(SMALL, compute)
    for end, first in zip((1, 3, 4, 14), (0, 1, 3, 4), strict=True):
        rows = [(slot, position) for position in range(first, end) for slot in (2, 0, 1)]  # interleaved
        for out, (slot, position) in zip(cut.run(rows), rows, strict=True):
            assert_same_bits(out, expected[slot][position])


@pytest.mark.parametrize("compute", [gated_delta, delta_reference.gated_delta, mamba2, delta_reference.mamba2])
@pytest.mark.sample(1)
def test_a_rollback_replays_what_is_left(compute: Any) -> None:
    """Drafts of each length are forgotten and others follow, as deep as the log allows, across stored states."""
    layer = Layer(SMALL, compute)
    expected = Layer(SMALL, compute).prompt(0, 0, 24)
    length, generator = 0, torch.Generator().manual_seed(0)
    while length < 20:
        n_rows, kept = (int(torch.randint(1, SMALL.n_kept + 1, (), generator=generator)) for _ in range(2))
        true = layer.x.clone()
        right = min(kept, n_rows)
        layer.x[0, length + right :] = 7.0  # drafts that are wrong from there on
        found = layer.prompt(0, length, length + n_rows)
        assert_same_bits(found[:right], expected[length : length + right])
        layer.x, length = true, length + right
        assert layer.bases[0] <= length


@pytest.mark.sample(0)
def test_the_log_is_written_by_the_rule() -> None:
    """A token reads the state and does not write it until the log is full."""
    layer, writes = Layer(SMALL), 0
    layer.prompt(0, 0, SMALL.n_logged)
    assert layer.state.states.isnan().all() and layer.bases[0] == 0
    for position in range(SMALL.n_logged, SMALL.n_logged + 7):
        before = layer.state.states.clone()
        layer.prompt(0, position, position + 1)
        writes += not torch.equal(before.nan_to_num(), layer.state.states.nan_to_num())
    assert writes == 2
    assert layer.state.states[1:].isnan().all() and layer.state.states[0, 1 - LAYER].isnan().all()


def test_operands_that_do_not_fit_are_named() -> None:
    layer = Layer(SMALL)
    x, gates = layer.x[0, :1], layer.gates[0, :1]
    place, out = DeltaRows(int32(0), int32(0), int32(-1)), torch.empty(1, SMALL.n_outputs, device=DEVICE)
    for bad, name in (((x[:, :-1], gates), "x"), ((x, gates[:, :2]), "gates")):
        with pytest.raises(ValueError, match=f"^{name} "):
            gated_delta(*bad, layer.weights, layer.state, place, 0, out)
    with pytest.raises(ValueError, match="Layer 2"):
        gated_delta(x, gates, layer.weights, layer.state, place, 2, out)
    with pytest.raises(ValueError, match="conv_bias"):
        mamba2(x, replace(layer.weights, conv_bias=x), layer.state, place, 0, out)
    with pytest.raises(ValueError, match="taps"):
        gated_delta(x, gates, replace(layer.weights, taps=x), layer.state, place, 0, out)
    with pytest.raises(ValueError, match="states"):
        DeltaState(SMALL._replace(key_dim=8), *(getattr(layer.state, each) for each in DeltaState.__slots__[1:]))
