"""LFM2's gated short convolution of decoded tokens and prompts: each channel mixes its last inputs, between two gates.

A row's features are [b | c | x], and its output is c * conv(b * x). The inputs b * x of a sequence's last rows are a
part of its state (delta_state.py), which has neither matrices nor logs of updates here: forgetting rows copies nothing.
A row's bits depend neither on the other rows nor on how a prompt is cut.

Two launches, with a program per row and BLOCK channels: conv_kernel, and keep_kernel, which stores the inputs. These
must not change before all programs of conv_kernel have read them.
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.checks import UNFUSED, check
from hetero_ee_kernels.delta_state import DeltaRows, DeltaState

BLOCK = 128  # channels per program
N_WARPS = 1


@triton.jit(do_not_specialize=["layer"])
def conv_kernel(
    x_ptr: tl.tensor,
    taps_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    out_ptr: tl.tensor,
    layer: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    N_INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Convolve some channels of one row.

    Args:
        x_ptr: fp32 (m, 3, N_CHANNELS): b, c and x.
        earlier_ptr: int32 (m,), the previous row in the same slot, or -1.
        out_ptr: fp32 (m, N_CHANNELS).
    """
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < N_CHANNELS
    slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
    kept = inputs_ptr + (slot.to(tl.int64) * N_LAYERS + layer) * (N_INPUTS * N_CHANNELS) + channel
    mine = x_ptr + row.to(tl.int64) * (3 * N_CHANNELS) + channel
    y = tl.load(mine, mask=inside, other=0.0) * tl.load(mine + 2 * N_CHANNELS, mask=inside, other=0.0)
    y *= tl.load(taps_ptr + channel * TAPS + (TAPS - 1), mask=inside, other=0.0)
    source = row
    for back in tl.static_range(1, TAPS):
        source = tl.load(earlier_ptr + tl.maximum(source, 0), mask=source >= 0, other=-1)
        before = position - back
        is_new = channel < tl.where(source >= 0, N_CHANNELS, 0)
        at = x_ptr + tl.maximum(source, 0).to(tl.int64) * (3 * N_CHANNELS) + channel
        new = tl.load(at, mask=is_new, other=0.0) * tl.load(at + 2 * N_CHANNELS, mask=is_new, other=0.0)
        is_kept = channel < tl.where((before >= 0) & (source < 0), N_CHANNELS, 0)
        old = tl.load(kept + tl.maximum(before, 0) % N_INPUTS * N_CHANNELS, mask=is_kept, other=0.0)
        tap = tl.load(taps_ptr + channel * TAPS + (TAPS - 1 - back), mask=inside, other=0.0)
        y = tl.fma(tl.where(source >= 0, new, old), tap, y)
    y *= tl.load(mine + N_CHANNELS, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * N_CHANNELS + channel, y, mask=inside)


@triton.jit(do_not_specialize=["layer", "n_bases"])
def keep_kernel(
    x_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    layer: tl.tensor,
    n_bases: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    N_INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the inputs of some channels of one row, unless a later row takes their place. n_bases: see scan_kernel."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(slots_ptr + row).to(tl.int64) * N_LAYERS + layer
    position, stored_at = tl.load(positions_ptr + row), tl.load(bases_ptr + n_bases + place)
    mine = x_ptr + row * (3 * N_CHANNELS) + channel
    is_kept = channel < tl.where(position >= stored_at - (TAPS - 1), N_CHANNELS, 0)
    value = tl.load(mine, mask=is_kept, other=0.0) * tl.load(mine + 2 * N_CHANNELS, mask=is_kept, other=0.0)
    tl.store(inputs_ptr + (place * N_INPUTS + position % N_INPUTS) * N_CHANNELS + channel, value, mask=is_kept)


def short_conv(x: Any, taps: Any, state: DeltaState, rows: DeltaRows, layer: int, out: Any) -> Any:
    """Run m rows through one layer's convolution, and return out.

    Args:
        x: fp32 (m, 3 * n_channels): b, c and x.
        taps: fp32 (n_channels, n_taps), the oldest position first.
        state: states of all slots. Its bases must be those of the pass.
        out: fp32 (m, n_channels).

    Raises:
        ValueError: if a shape or dtype does not fit, or the layer does not exist.
    """
    shape, m = state.shape, x.shape[0]
    check("x", x, (m, 3 * shape.n_channels))
    check("taps", taps, (shape.n_channels, shape.n_taps))
    check("out", out, (m, shape.n_channels))
    rows.check(m, layer, state)
    if not m:
        return out
    sizes, grid = _constants(state), (m, -(-shape.n_channels // BLOCK))
    conv_kernel[grid](x, taps, state.inputs, *rows, out, layer, **sizes, num_warps=N_WARPS, **UNFUSED)
    n_bases = state.n_slots * state.n_layers
    keep_kernel[grid](x, state.inputs, state.bases, *rows[:2], layer, n_bases, **sizes, num_warps=N_WARPS, **UNFUSED)
    return out


def _constants(state: DeltaState) -> dict[str, int]:
    shape = state.shape
    sizes = {"N_LAYERS": state.n_layers, "N_CHANNELS": shape.n_channels, "TAPS": shape.n_taps}
    return sizes | {"N_INPUTS": shape.n_inputs, "BLOCK": BLOCK}
