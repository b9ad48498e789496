"""Gated DeltaNet and Mamba-2: short convolution, rank-1 updates, gated norm, fp32 (arXiv 2412.06464, 2405.21060).

Per row, with the convolution's output (q, k, v) after SiLU, gates b and a, and the matrix S of a value head:

    q = q / |q| / sqrt(key_dim), k = k / |k|     decay = exp(rate * softplus(a + dt_bias)), beta = sigmoid(b)
    S = S * decay;  delta = (v - S^T k) * beta;  S = S + k delta^T;  o = S^T q;  out = RMSNorm(o) * norm * SiLU(z)

Mamba-2 replaces nothing: q and k, which are C and B, stay as they are, beta = softplus(a + dt_bias), delta = v * beta,
o = S^T q + skip * v, and out = RMSNorm(o * SiLU(z)) * norm over all value heads of a key head together.

Rows pass one after the other in prompts too, so bits depend neither on how a prompt is cut nor on the other rows. A
column of S depends on no other column: a program takes a sequence, a value head and COLUMNS columns, keeps them in
registers, and runs all rows through them. S is read once per pass and written at most once (delta_state.py). At
Qwen3.6-27B's 48 value heads of 128 x 128 these are 384 programs of one warp per sequence.

Three launches, whose grids depend only on the number of rows: conv_kernel (a program per row and head), scan_kernel
and finish_kernel (a program per row and norm). The latter also writes the log, which must not change before all
programs of scan_kernel have read it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_ee_kernels.activate import activated
from hetero_ee_kernels.checks import UNFUSED
from hetero_ee_kernels.delta_state import L2_EPS, DeltaRows, DeltaShape, DeltaState, DeltaWeights, check_delta_rows
from hetero_ee_kernels.norm import norm_row

COLUMNS = 16  # of S per program: 128 x 16 numbers are 64 registers of each thread
N_WARPS = 1


@triton.jit
def log1p(x: tl.tensor) -> Any:
    """Return log(1 + x) for 0 <= x <= 1, by the series of 2 artanh(x / (2 + x)); also accurate for tiny x."""
    ratio = x / (2.0 + x)
    square = ratio * ratio
    series = tl.fma(square, 1 / 15, 1 / 13)
    series = tl.fma(series, square, 1 / 11)
    series = tl.fma(series, square, 1 / 9)
    series = tl.fma(series, square, 1 / 7)
    series = tl.fma(series, square, 1 / 5)
    series = tl.fma(series, square, 1 / 3)
    return 2.0 * ratio * tl.fma(series, square, 1.0)


@triton.jit(do_not_specialize=["layer"])
def conv_kernel(
    x_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    taps_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    eps: tl.tensor,
    query_scale: tl.tensor,
    layer: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_KEY_HEADS: tl.constexpr,
    N_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    N_INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    MAMBA: tl.constexpr,
) -> None:
    """Convolve one head of one row, norm queries and keys, and compute the gates of a value head.

    Args:
        x_ptr: fp32 (m, FEATURES): query heads, key heads, value heads, gates of the output; a of Mamba-2.
        gates_ptr: fp32 (m, 2, N_VALUE_HEADS): b, then a. None for Mamba-2.
        bias_ptr: fp32 (channels,) or None, the convolution's.
        earlier_ptr: int32 (m,), the previous row in the same slot, or -1.
        mixed_ptr: fp32 (m, channels), the result.
        factors_ptr: fp32 (m, 2, N_VALUE_HEADS): decays, then betas.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * N_KEY_HEADS * KEY_DIM + N_VALUE_HEADS * VALUE_DIM
    value_head = head - 2 * N_KEY_HEADS
    is_value = value_head >= 0
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    first = tl.where(is_value, 2 * N_KEY_HEADS * KEY_DIM + value_head * VALUE_DIM, head * KEY_DIM)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    channel = first + lane
    slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
    kept = inputs_ptr + (slot.to(tl.int64) * N_LAYERS + layer) * (N_INPUTS * channels) + channel
    source = row
    y = tl.load(x_ptr + row.to(tl.int64) * FEATURES + channel, mask=inside, other=0.0)
    y *= tl.load(taps_ptr + channel * TAPS + (TAPS - 1), mask=inside, other=0.0)
    for back in tl.static_range(1, TAPS):
        source = tl.load(earlier_ptr + tl.maximum(source, 0), mask=source >= 0, other=-1)
        in_pass, before = source >= 0, position - back
        at = x_ptr + tl.maximum(source, 0).to(tl.int64) * FEATURES + channel
        new = tl.load(at, mask=lane < tl.where(in_pass, size, 0), other=0.0)
        is_kept = (before >= 0) & (source < 0)
        entry = tl.maximum(before, 0) % N_INPUTS
        old = tl.load(kept + entry * channels, mask=lane < tl.where(is_kept, size, 0), other=0.0)
        tap = tl.load(taps_ptr + channel * TAPS + (TAPS - 1 - back), mask=inside, other=0.0)
        y = tl.fma(tl.where(in_pass, new, old), tap, y)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=inside, other=0.0)
    y = activated(y, 0.0, "silu")
    if not MAMBA:
        scale = tl.rsqrt(tl.sum(y * y, 0) + eps) * tl.where(head < N_KEY_HEADS, query_scale, 1.0)
        y *= tl.where(is_value, 1.0, scale)
    tl.store(mixed_ptr + row.to(tl.int64) * channels + channel, y, mask=inside)
    at_gate = row * (2 * N_VALUE_HEADS) + tl.maximum(value_head, 0)
    if MAMBA:
        a = tl.load(x_ptr + (row + 1).to(tl.int64) * FEATURES - N_VALUE_HEADS + tl.maximum(value_head, 0))
    else:
        a = tl.load(gates_ptr + at_gate + N_VALUE_HEADS)
    a += tl.load(dt_bias_ptr + tl.maximum(value_head, 0))
    softplus = tl.maximum(a, 0.0) + log1p(tl.exp(-tl.abs(a)))
    decay = tl.exp(tl.load(rates_ptr + tl.maximum(value_head, 0)) * softplus)
    tl.store(factors_ptr + at_gate, decay, mask=is_value)
    beta = softplus if MAMBA else 1.0 / (1.0 + tl.exp(-tl.load(gates_ptr + at_gate)))
    tl.store(factors_ptr + at_gate + N_VALUE_HEADS, beta, mask=is_value)


@triton.jit(do_not_specialize=["layer", "n_bases", "m"])
def scan_kernel(
    mixed_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    states_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    deltas_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    earlier_ptr: tl.tensor,
    skips_ptr: tl.tensor,
    out_ptr: tl.tensor,
    layer: tl.tensor,
    n_bases: tl.tensor,
    m: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_KEY_HEADS: tl.constexpr,
    N_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG: tl.constexpr,
) -> None:
    """Run all rows of one slot through some columns of one value head's matrix. Rows that aren't a slot's first return.

    Args:
        mixed_ptr, factors_ptr: results of conv_kernel.
        states_ptr, keys_ptr, deltas_ptr, decays_ptr, bases_ptr: fields of DeltaState.
        skips_ptr: fp32 (N_VALUE_HEADS,) of Mamba-2, otherwise None.
        out_ptr: fp32 (m, N_VALUE_HEADS, VALUE_DIM), the value heads' outputs before their norm.
        n_bases: n_slots * N_LAYERS.
    """
    first_row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(earlier_ptr + first_row) >= 0:
        return
    slot, old_length = tl.load(slots_ptr + first_row), tl.load(positions_ptr + first_row)
    place = slot.to(tl.int64) * N_LAYERS + layer
    base, stored_at = tl.load(bases_ptr + place), tl.load(bases_ptr + n_bases + place)
    stored_at = tl.where(stored_at > base, stored_at, -1)
    key_head = head % N_KEY_HEADS if TILED else head // (N_VALUE_HEADS // N_KEY_HEADS)
    channels: tl.constexpr = 2 * N_KEY_HEADS * KEY_DIM + N_VALUE_HEADS * VALUE_DIM
    feature, column = tl.arange(0, KEY_BLOCK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_feature, is_column = feature < KEY_DIM, column < VALUE_DIM
    inside = is_feature[:, None] & is_column[None, :]
    tile = states_ptr + (place * N_VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    tile += feature[:, None] * VALUE_DIM + column[None, :]
    is_stored = (feature < tl.where(base > 0, KEY_DIM, 0))[:, None] & is_column[None, :]
    state = tl.load(tile, mask=is_stored, other=0.0)
    key_log = keys_ptr + (place * LOG * N_KEY_HEADS + key_head) * KEY_DIM + feature
    delta_log = deltas_ptr + (place * LOG * N_VALUE_HEADS + head) * VALUE_DIM + column
    decay_log = decays_ptr + place * LOG * N_VALUE_HEADS + head
    for position in range(base, old_length):
        if position == stored_at:
            tl.store(tile, state, mask=inside)
        entry = position % LOG
        key = tl.load(key_log + entry * (N_KEY_HEADS * KEY_DIM), mask=is_feature, other=0.0)
        delta = tl.load(delta_log + entry * (N_VALUE_HEADS * VALUE_DIM), mask=is_column, other=0.0)
        decay = tl.load(decay_log + entry * N_VALUE_HEADS)
        state = tl.fma(key[:, None], delta[None, :], state * decay)
    for row in range(first_row, m):
        if tl.load(slots_ptr + row) == slot:
            position = tl.load(positions_ptr + row)
            if position == stored_at:
                tl.store(tile, state, mask=inside)
            at_row = tl.cast(row, tl.int64)
            at = mixed_ptr + at_row * channels + key_head * KEY_DIM + feature
            query = tl.load(at, mask=is_feature, other=0.0)
            key = tl.load(at + N_KEY_HEADS * KEY_DIM, mask=is_feature, other=0.0)
            at_value = mixed_ptr + at_row * channels + 2 * N_KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
            value = tl.load(at_value, mask=is_column, other=0.0)
            at_factor = factors_ptr + at_row * (2 * N_VALUE_HEADS) + head
            state *= tl.load(at_factor)
            new = value if skips_ptr is not None else value - tl.sum(state * key[:, None], 0)
            delta = new * tl.load(at_factor + N_VALUE_HEADS)
            state = tl.fma(key[:, None], delta[None, :], state)
            y = tl.sum(state * query[:, None], 0)
            if skips_ptr is not None:
                y = tl.fma(tl.load(skips_ptr + head), value, y)
            at_out = out_ptr + (at_row * N_VALUE_HEADS + head) * VALUE_DIM + column
            tl.store(at_out, y, mask=is_column)
            at_log = delta_log + (position % LOG) * (N_VALUE_HEADS * VALUE_DIM)
            is_logged = position >= tl.load(bases_ptr + n_bases + place)
            tl.store(at_log, delta, mask=column < tl.where(is_logged, VALUE_DIM, 0))


@triton.jit(do_not_specialize=["layer", "n_bases"])
def finish_kernel(
    x_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    layer: tl.tensor,
    n_bases: tl.tensor,
    N_LAYERS: tl.constexpr,
    N_KEY_HEADS: tl.constexpr,
    N_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    N_INPUTS: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    MAMBA: tl.constexpr,
) -> None:
    """Norm and gate a value head, or Mamba-2's value heads of a key head, in place; log their key, decays and inputs.

    Args:
        out_ptr: the result of scan_kernel, overwritten.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)  # the head's heads are normed together
    heads: tl.constexpr = N_VALUE_HEADS // N_KEY_HEADS if MAMBA else 1
    width: tl.constexpr = heads * VALUE_DIM
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    at = row * (N_VALUE_HEADS * VALUE_DIM) + head * width + lane
    channels: tl.constexpr = 2 * N_KEY_HEADS * KEY_DIM + N_VALUE_HEADS * VALUE_DIM
    source = x_ptr + row * FEATURES
    gate = activated(tl.load(source + channels + head * width + lane, mask=inside, other=0.0), 0.0, "silu")
    y = tl.load(out_ptr + at, mask=inside, other=0.0)
    if MAMBA:
        y = norm_row(y * gate, inside, eps, width, False)
        y *= tl.load(norm_ptr + head * width + lane, mask=inside, other=0.0)
    else:
        y = norm_row(y, inside, eps, width, False) * tl.load(norm_ptr + lane, mask=inside, other=0.0) * gate
    tl.store(out_ptr + at, y, mask=inside)
    place = tl.load(slots_ptr + row).to(tl.int64) * N_LAYERS + layer
    position, stored_at = tl.load(positions_ptr + row), tl.load(bases_ptr + n_bases + place)
    entry = place * LOG + position % LOG
    has_decay, value_head = lane < tl.where(position >= stored_at, heads, 0), head * heads + lane
    decay = tl.load(factors_ptr + row * (2 * N_VALUE_HEADS) + value_head, mask=has_decay, other=0.0)
    tl.store(decays_ptr + entry * N_VALUE_HEADS + value_head, decay, mask=has_decay)
    has_key = lane < tl.where((head < N_KEY_HEADS) & (position >= stored_at), KEY_DIM, 0)
    first_key = N_KEY_HEADS * KEY_DIM + head * KEY_DIM + lane
    key = tl.load(mixed_ptr + row * channels + first_key, mask=has_key, other=0.0)
    tl.store(keys_ptr + (entry * N_KEY_HEADS + head) * KEY_DIM + lane, key, mask=has_key)
    target = inputs_ptr + (place * N_INPUTS + position % N_INPUTS) * channels
    is_kept = position >= stored_at - (TAPS - 1)
    has_inputs = lane < tl.where((head < N_KEY_HEADS) & is_kept, KEY_DIM, 0)
    for part in tl.static_range(2):
        channel = part * (N_KEY_HEADS * KEY_DIM) + head * KEY_DIM + lane
        tl.store(target + channel, tl.load(source + channel, mask=has_inputs, other=0.0), mask=has_inputs)
    channel = 2 * N_KEY_HEADS * KEY_DIM + head * width + lane
    has_values = lane < tl.where(is_kept, width, 0)
    tl.store(target + channel, tl.load(source + channel, mask=has_values, other=0.0), mask=has_values)


def gated_delta(
    x: Any,
    gates: Any,
    weights: DeltaWeights,
    state: DeltaState,
    rows: DeltaRows,
    layer: int,
    out: Any,
    workspace: Any = None,
) -> Any:
    """Run m rows through one layer between its input and output projections, and return out.

    Args:
        x: fp32 (m, n_channels + n_outputs): all query heads, key heads, value heads, and gates of the output.
        gates: fp32 (m, 2 * n_value_heads): b of every value head, then a.
        state: states of all slots. Its bases must be those of the pass.
        out: fp32 (m, n_outputs).
        workspace: fp32, at least m * workspace_size; None allocates it.

    Raises:
        ValueError: if a shape, dtype or layout does not fit, or the layer does not exist.
    """
    m = len(x)
    check_delta_rows(x, gates, weights, state, rows, layer, out)
    return _launch(x, gates, weights, state, rows, layer, out, workspace) if m else out


def mamba2(
    x: Any, weights: DeltaWeights, state: DeltaState, rows: DeltaRows, layer: int, out: Any, workspace: Any = None
) -> Any:
    """Run m rows through one layer of Mamba-2, and return out. See gated_delta(), and Ops.mamba for x."""
    check_delta_rows(x, None, weights, state, rows, layer, out)
    return _launch(x, None, weights, state, rows, layer, out, workspace) if len(x) else out


def _launch(
    x: Any, gates: Any, weights: DeltaWeights, state: DeltaState, rows: DeltaRows, layer: int, out: Any, workspace: Any
) -> Any:
    shape, m = state.shape, len(x)
    n_mixed = -(-m * shape.n_channels // 4) * 4  # aligned, or the factors would have a kernel of their own
    if workspace is None:
        workspace = torch.empty(m * shape.workspace_size, device=x.device)
    mixed, factors, n_bases = workspace[:n_mixed], workspace[n_mixed:], state.n_slots * state.n_layers
    conv, scan, finish = _constants(shape, state.n_layers, weights.is_tiled, is_mamba=weights.is_mamba)
    conv_kernel[(m, 2 * shape.n_key_heads + shape.n_value_heads)](
        x, gates, weights.taps, weights.rates, weights.dt_bias, weights.conv_bias, state.inputs, *rows, mixed, factors,
        L2_EPS, shape.key_dim**-0.5, layer, **conv, num_warps=N_WARPS, **UNFUSED,
    )  # fmt: skip
    scan_kernel[(m, shape.n_value_heads, -(-shape.value_dim // COLUMNS))](
        mixed, factors, state.states, state.keys, state.deltas, state.decays, state.bases, *rows,
        weights.skips, out, layer, n_bases, m, **scan, num_warps=N_WARPS, **UNFUSED,
    )  # fmt: skip
    n_norms = shape.n_key_heads if weights.is_mamba else shape.n_value_heads
    finish_kernel[(m, n_norms)](
        x, mixed, factors, weights.norm, state.inputs, state.keys, state.decays, state.bases, *rows[:2],
        out, weights.eps, layer, n_bases, **finish, num_warps=norm_warps(finish["BLOCK"]), **UNFUSED,
    )  # fmt: skip
    return out


def norm_warps(n_lanes: int) -> int:
    """Return the number of warps of a program of finish_kernel, which has 16 numbers per thread if it is wide."""
    return max(N_WARPS, min(16, n_lanes // 512))


def _constants(
    shape: DeltaShape, n_layers: int, is_tiled: bool, *, is_mamba: bool = False
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return the constants of conv_kernel, scan_kernel and finish_kernel."""
    n_heads = {"N_KEY_HEADS": shape.n_key_heads, "N_VALUE_HEADS": shape.n_value_heads}
    sizes = n_heads | {"N_LAYERS": n_layers, "KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim}
    taps = {"TAPS": shape.n_taps, "N_INPUTS": shape.n_inputs}
    taps |= sizes | {"FEATURES": shape.n_features(is_mamba=is_mamba), "MAMBA": is_mamba}
    width = shape.n_outputs // shape.n_key_heads if is_mamba else shape.value_dim
    conv, finish = (taps | {"BLOCK": triton.next_power_of_2(max(shape.key_dim, n))} for n in (shape.value_dim, width))
    scan = {"TILED": is_tiled, "KEY_BLOCK": triton.next_power_of_2(shape.key_dim), "COLUMNS": COLUMNS}
    return conv, sizes | scan | {"LOG": shape.n_logged}, finish | {"LOG": shape.n_logged}
