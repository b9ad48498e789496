"""The state that gated DeltaNet, Mamba-2 and short convolutions keep of each sequence, and small weights.

A layer's state of a sequence is a matrix per value head, S (key_dim, value_dim), at the sequence's position `base`,
and a log of the rows since then. A row's log entry is its rank-1 update of S (key, delta, decay) and its input of the
short convolution. Replaying the log gives the bits of S after any of its rows, so a rollback to `base` or later copies
nothing. The entry of position p is at p % n_logged; inputs reach back n_taps - 1 positions further and are at
p % n_inputs.

Kernels read the bases from device memory, so a recorded CUDA graph stays valid: bases[0] has each state's position
before the pass, bases[1] the position at which the pass stores it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hetero_ee_kernels.checks import check, check_given

L2_EPS = 1e-6  # of the norms of queries and keys


class DeltaShape(NamedTuple):
    """Numbers of heads and features of gated DeltaNet, Mamba-2, or a short convolution, which has no heads."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    n_taps: int  # positions that the convolution reads, the token's own included
    n_logged: int = 24  # most rows in the log
    n_kept: int = 17  # rows that a rollback may forget; S is written once in n_logged - n_kept decoded tokens
    n_headless: int = 0  # features of a short convolution

    @property
    def n_channels(self) -> int:
        """Features of the convolution: those of all queries, all keys and all values."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim + self.n_headless

    @property
    def n_outputs(self) -> int:
        """Features of all value heads."""
        return self.n_value_heads * self.value_dim

    @property
    def n_inputs(self) -> int:
        """Positions of which the inputs of the convolution are kept."""
        return self.n_logged + self.n_taps - 1

    @property
    def workspace_size(self) -> int:
        """Features per row that the kernels need between their launches."""
        return self.n_channels + 2 * self.n_value_heads + 3  # the latter are aligned

    def n_features(self, *, is_mamba: bool) -> int:
        """Return the features of a row: channels, gates of the output, and Mamba-2's inputs of time steps."""
        return self.n_channels + self.n_outputs + (self.n_value_heads if is_mamba else 0)

    def base_after(self, base: int, end: int) -> int:
        """Return the position at which a pass stores the state, so that the log holds the rows from there to `end`."""
        return base if end - base <= self.n_logged else max(base, end - self.n_kept)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaState:
    """The states and logs of several layers, for each slot. Raises: ValueError: if a shape or dtype is wrong."""

    shape: DeltaShape
    states: Any  # fp32 (n_slots, n_layers, n_value_heads, key_dim, value_dim)
    inputs: Any  # fp32 (n_slots, n_layers, n_inputs, n_channels)
    keys: Any  # fp32 (n_slots, n_layers, n_logged, n_key_heads, key_dim), normed by DeltaNet
    deltas: Any  # fp32 (n_slots, n_layers, n_logged, n_value_heads, value_dim)
    decays: Any  # fp32 (n_slots, n_layers, n_logged, n_value_heads)
    bases: Any  # int32 (2, n_slots, n_layers)

    def __post_init__(self) -> None:
        _, n_slots, n_layers = self.bases.shape
        for name, shape in _shapes(self.shape).items():
            check(name, getattr(self, name), (n_slots, n_layers, *shape))
        check("bases", self.bases, (2, n_slots, n_layers), torch.int32)

    @property
    def n_slots(self) -> int:
        return int(self.bases.shape[1])

    @property
    def n_layers(self) -> int:
        return int(self.bases.shape[2])


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """A layer's small weights: the convolution, the gates and the norm of its output; and its order of heads."""

    taps: Any  # fp32 (n_channels, n_taps), the oldest position first
    rates: Any  # fp32 (n_value_heads,): -exp(A_log)
    dt_bias: Any  # fp32 (n_value_heads,)
    norm: Any  # fp32 (value_dim,), or (n_outputs,) for Mamba-2
    eps: float
    is_tiled: bool = False  # value head v reads key head v mod n_key_heads; otherwise adjacent ones share a key head
    skips: Any = None  # fp32 (n_value_heads,), only for Mamba-2
    conv_bias: Any = None  # fp32 (n_channels,) or None

    @property
    def is_mamba(self) -> bool:
        return self.skips is not None

    def check(self, shape: DeltaShape) -> None:
        """Raises: ValueError: if a shape or dtype does not fit."""
        check("taps", self.taps, (shape.n_channels, shape.n_taps))
        check("rates", self.rates, (shape.n_value_heads,))
        check("dt_bias", self.dt_bias, (shape.n_value_heads,))
        check("norm", self.norm, (shape.n_outputs if self.is_mamba else shape.value_dim,))
        check_given("skips", self.skips, (shape.n_value_heads,))
        check_given("conv_bias", self.conv_bias, (shape.n_channels,))


class DeltaRows(NamedTuple):
    """Where the rows of a pass belong, int32 (m,) each. A slot's rows are in order of position."""

    slots: Any
    positions: Any
    earlier: Any  # the previous row in the same slot, or -1; see earlier_rows()

    def check(self, m: int, layer: int, state: DeltaState) -> None:
        """Raises: ValueError: if a shape or dtype does not fit, or the state lacks the layer."""
        for name, each in self._asdict().items():
            check(name, each, (m,), torch.int32)
        if not 0 <= layer < state.n_layers:
            raise ValueError(f"Layer {layer} is outside the state's {state.n_layers} layers.")


def check_delta_rows(
    x: Any,
    gates: Any,
    weights: DeltaWeights,
    state: DeltaState,
    rows: DeltaRows,
    layer: int,
    out: Any,
) -> None:
    """Check the operands; mamba2() has no gates. Raises: ValueError: names the first one that does not fit."""
    shape, m = state.shape, x.shape[0]
    check("x", x, (m, shape.n_features(is_mamba=weights.is_mamba)))
    check_given("gates", gates, (m, 2 * shape.n_value_heads))
    check("out", out, (m, shape.n_outputs))
    weights.check(shape)
    rows.check(m, layer, state)


def new_delta_state(shape: DeltaShape, n_slots: int, n_layers: int, device: Any) -> DeltaState:
    """Allocate the states of n_slots sequences, all at position 0."""
    parts = {name: torch.zeros((n_slots, n_layers, *of), device=device) for name, of in _shapes(shape).items()}
    return DeltaState(shape, **parts, bases=torch.zeros((2, n_slots, n_layers), dtype=torch.int32, device=device))


def earlier_rows(slots: Any) -> list[int]:
    """Return for each row of a pass the previous row in the same slot, -1 for a slot's first row."""
    last: dict[int, int] = {}
    found = []
    for row, slot in enumerate(slots):
        found.append(last.get(slot, -1))
        last[slot] = row
    return found


def _shapes(shape: DeltaShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each part of one layer's state of one sequence."""
    return {
        "states": (shape.n_value_heads, shape.key_dim, shape.value_dim),
        "inputs": (shape.n_inputs, shape.n_channels),
        "keys": (shape.n_logged, shape.n_key_heads, shape.key_dim),
        "deltas": (shape.n_logged, shape.n_value_heads, shape.value_dim),
        "decays": (shape.n_logged, shape.n_value_heads),
    }
