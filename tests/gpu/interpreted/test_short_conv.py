"""Short convolutions: near float64, and with bits that depend on neither batch, cuts, neighbours nor rollbacks."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import delta_reference
from hetero_ee_kernels.delta_state import DeltaRows, DeltaShape, earlier_rows, new_delta_state
from hetero_ee_kernels.short_conv import short_conv
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, error, int32, random

SMALL = DeltaShape(0, 0, 0, 0, n_taps=3, n_logged=7, n_kept=4, n_headless=20)
WIDE = SMALL._replace(n_taps=4, n_headless=300)  # three programs, the last one with some channels
LAYER, N_LAYERS, N_SLOTS, N_ROWS = 1, 2, 3, 24
BOTH = pytest.mark.parametrize("compute", [short_conv, delta_reference.short_conv])


class Layer:
    """A layer with its state, whose rows of a slot are the same in every test."""

    def __init__(self, shape: DeltaShape, compute: Any) -> None:
        self.shape, self.compute, self.taps = shape, compute, random(1, shape.n_channels, shape.n_taps)
        self.state = new_delta_state(shape, N_SLOTS, N_LAYERS, DEVICE)
        self.state.inputs.fill_(float("nan"))
        self.bases, self.x = [0] * N_SLOTS, random(2, N_SLOTS, N_ROWS, 3 * shape.n_channels)

    def run(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        """Outputs of rows (slot, position)."""
        slots, positions = zip(*rows, strict=True)
        for slot in set(slots):
            end = 1 + max(position for each, position in rows if each == slot)
            after = self.shape.base_after(self.bases[slot], end)
            self.state.bases[:, slot, LAYER] = int32(self.bases[slot], after)
            self.bases[slot] = after
        x, out = self.x[slots, positions].contiguous(), Guarded((len(rows), self.shape.n_channels))
        place = DeltaRows(int32(*slots), int32(*positions), int32(*earlier_rows(slots)))
        assert self.compute(x, self.taps, self.state, place, LAYER, out.tensor) is out.tensor
        assert self.state.inputs[:, 1 - LAYER].isnan().all()
        return out.check()

    def prompt(self, slot: int, first: int, end: int) -> torch.Tensor:
        return self.run([(slot, position) for position in range(first, end)])


def definition(layer: Layer, slot: int, end: int) -> torch.Tensor:
    """The outputs of a slot's first rows in float64, by the formula alone."""
    b, c, x = layer.x[slot, :end].double().chunk(3, 1)
    before = torch.zeros(layer.shape.n_taps - 1, layer.shape.n_channels, device=DEVICE)
    windows = torch.cat([before, b * x]).unfold(0, layer.shape.n_taps, 1)  # (m, channels, taps)
    return c * (windows * layer.taps.double()).sum(-1)


@BOTH
@pytest.mark.parametrize("shape", [SMALL, WIDE])
def test_outputs_are_the_formula(shape: DeltaShape, compute: Any) -> None:
    """A prompt longer than what is kept, then token by token."""
    layer = Layer(shape, compute)
    found = [layer.prompt(1, 0, 12), *(layer.prompt(1, position, position + 1) for position in range(12, 16))]
    assert error(torch.cat(found), definition(layer, 1, 16)) < 1e-6


@BOTH
def test_bits_depend_neither_on_cuts_nor_on_other_slots(compute: Any) -> None:
    whole, cut = Layer(SMALL, compute), Layer(SMALL, compute)
    expected = [whole.prompt(slot, 0, 14) for slot in range(N_SLOTS)]
    for first, end in ((0, 1), (1, 3), (3, 4), (4, 14)):
        rows = [(slot, position) for position in range(first, end) for slot in (2, 0, 1)]  # interleaved
        for out, (slot, position) in zip(cut.run(rows), rows, strict=True):
            assert_same_bits(out, expected[slot][position])


@BOTH
def test_a_rollback_forgets_drafts(compute: Any) -> None:
    """Drafts of each length are forgotten and others follow, as deep as the log allows."""
    layer, expected = Layer(SMALL, compute), Layer(SMALL, compute).prompt(0, 0, N_ROWS)
    length, generator, true = 0, torch.Generator().manual_seed(0), layer.x.clone()
    while length < N_ROWS - SMALL.n_kept:
        n_rows, kept = (int(torch.randint(1, SMALL.n_kept + 1, (), generator=generator)) for _ in range(2))
        right = min(kept, n_rows)
        layer.x[0, length + right :] = 7.0  # drafts that are wrong from there on
        found = layer.prompt(0, length, length + n_rows)
        assert_same_bits(found[:right], expected[length : length + right])
        layer.x, length = true.clone(), length + right
        assert layer.bases[0] <= length


def test_operands_that_do_not_fit_are_named() -> None:
    layer = Layer(SMALL, short_conv)
    x, out = layer.x[0, :1], torch.empty(1, SMALL.n_channels, device=DEVICE)
    place = DeltaRows(int32(0), int32(0), int32(-1))
    with pytest.raises(ValueError, match=r"^x "):
        short_conv(x[:, :-1], layer.taps, layer.state, place, 0, out)
    with pytest.raises(ValueError, match=r"^taps "):
        short_conv(x, layer.taps[:, :2], layer.state, place, 0, out)
    with pytest.raises(ValueError, match="Layer 2"):
        short_conv(x, layer.taps, layer.state, place, 2, out)
    with pytest.raises(ValueError, match=r"^positions "):
        short_conv(x, layer.taps, layer.state, place._replace(positions=int32(0, 1)), 0, out)
