"""Gated DeltaNet, Mamba-2 and short convolutions in plain torch on the kernels' tensors: reference and fallback."""

from typing import Any

import torch
import torch.nn.functional as F

from hetero_ee_kernels.delta_state import L2_EPS, DeltaRows, DeltaState, DeltaWeights


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
    """See hetero_ee_kernels.gated_delta. Nothing is checked, and neither `rows.earlier` nor `workspace` is needed."""
    shape = state.shape
    inputs, z, steps = x.split([shape.n_channels, shape.n_outputs, x.shape[1] - shape.n_channels - shape.n_outputs], 1)
    running: dict[int, tuple[Any, Any]] = {}
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        matrix, recent = running.get(slot) or _replayed(state, weights, slot, layer, position)
        recent = torch.cat([recent[1:], inputs[row : row + 1]])
        query, short_key, value = _convolved(recent, weights, state)
        query, key = (_per_value_head(heads, weights, state) for heads in (query, short_key))
        b, a = (None, steps[row]) if weights.is_mamba else gates[row].chunk(2)
        step = F.softplus(a + weights.dt_bias)
        decay = (weights.rates * step).exp()
        _store(state, slot, layer, position, matrix)
        matrix = matrix * decay[:, None, None]
        replaced, beta = (0.0, step) if b is None else ((matrix * key[..., None]).sum(1), b.sigmoid())
        delta = (value - replaced) * beta[:, None]
        matrix = matrix + key[..., None] * delta[:, None]
        running[slot] = matrix, recent
        _log(state, slot, layer, position, (inputs[row], short_key, delta, decay))
        y = (matrix * query[..., None]).sum(1)
        gate = F.silu(z[row].clone())
        if weights.is_mamba:
            y = (y + weights.skips[:, None] * value).flatten() * gate
            out[row] = _normed(y.view(shape.n_key_heads, -1), weights.eps).flatten() * weights.norm
        else:
            out[row] = (_normed(y, weights.eps) * weights.norm).flatten() * gate
    return out


def mamba2(
    x: Any, weights: DeltaWeights, state: DeltaState, rows: DeltaRows, layer: int, out: Any, workspace: Any = None
) -> Any:
    """See hetero_ee_kernels.gated_delta. Nothing is checked, as by gated_delta()."""
    return gated_delta(x, None, weights, state, rows, layer, out)


def short_conv(x: Any, taps: Any, state: DeltaState, rows: DeltaRows, layer: int, out: Any) -> Any:
    """See hetero_ee_kernels.short_conv. Nothing is checked, and `rows.earlier` is not needed."""
    b, c, x = x.chunk(3, 1)
    running: dict[int, Any] = {}
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        recent = running[slot] if slot in running else _recent(state, slot, layer, position)
        running[slot] = recent = torch.cat([recent[1:], (b[row] * x[row])[None]])
        out[row] = c[row] * (recent * taps.T).sum(0)
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        _keep(state, slot, layer, position, b[row] * x[row])
    return out


def _replayed(state: DeltaState, weights: DeltaWeights, slot: int, layer: int, length: int) -> tuple[Any, Any]:
    """Return the matrices (value heads, key_dim, value_dim) after `length` tokens, and the inputs of the last ones.

    Stores the matrices on the way if the pass stores them at an earlier position.
    """
    shape, base = state.shape, int(state.bases[0, slot, layer])
    matrix = state.states[slot, layer].clone() if base else torch.zeros_like(state.states[slot, layer])
    for position in range(base, length):
        _store(state, slot, layer, position, matrix)
        entry = position % shape.n_logged
        key = _per_value_head(state.keys[slot, layer, entry], weights, state)
        update = key[..., None] * state.deltas[slot, layer, entry][:, None]
        matrix = matrix * state.decays[slot, layer, entry][:, None, None] + update
    return matrix, _recent(state, slot, layer, length)


def _recent(state: DeltaState, slot: int, layer: int, length: int) -> Any:
    """Return the inputs of the last n_taps tokens (n_taps, n_channels) before position `length`."""
    recent = torch.arange(length - state.shape.n_taps, length, device=state.inputs.device)
    inputs = state.inputs[slot, layer, recent % state.shape.n_inputs]
    return torch.where(recent[:, None] >= 0, inputs, 0.0)


def _convolved(recent: Any, weights: DeltaWeights, state: DeltaState) -> tuple[Any, Any, Any]:
    """Return query and key (key heads, key_dim), which DeltaNet norms, and value (value heads, value_dim)."""
    shape = state.shape
    mixed = (recent * weights.taps.T).sum(0)
    mixed = F.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
    n_keys = shape.n_key_heads * shape.key_dim
    query, key = mixed[: 2 * n_keys].view(2, shape.n_key_heads, shape.key_dim)
    if not weights.is_mamba:
        query, key = (heads * (heads.pow(2).sum(-1, keepdim=True) + L2_EPS).rsqrt() for heads in (query, key))
        query = query * shape.key_dim**-0.5
    return query, key, mixed[2 * n_keys :].view(shape.n_value_heads, shape.value_dim)


def _normed(y: Any, eps: float) -> Any:
    return y * (y.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def _per_value_head(heads: Any, weights: DeltaWeights, state: DeltaState) -> Any:
    """Return for each value head the key head that it reads."""
    n_readers = state.shape.n_value_heads // state.shape.n_key_heads
    return heads.repeat(n_readers, 1) if weights.is_tiled else heads.repeat_interleave(n_readers, 0)


def _store(state: DeltaState, slot: int, layer: int, position: int, matrix: Any) -> None:
    """Store the matrices if this is the position where the pass stores them."""
    base, stored_at = state.bases[:, slot, layer].tolist()
    if position == stored_at > base:
        state.states[slot, layer] = matrix


def _log(state: DeltaState, slot: int, layer: int, position: int, parts: tuple[Any, Any, Any, Any]) -> None:
    """Log a row's input, key, delta and decay, unless the stored state already contains it."""
    shape, stored_at = state.shape, int(state.bases[1, slot, layer])
    x, key, delta, decay = parts
    _keep(state, slot, layer, position, x)
    if position >= stored_at:
        entry = position % shape.n_logged
        for log, value in ((state.keys, key), (state.deltas, delta), (state.decays, decay)):
            log[slot, layer, entry] = value


def _keep(state: DeltaState, slot: int, layer: int, position: int, x: Any) -> None:
    """Keep a row's input of the convolution, unless a later row of the pass takes its place."""
    if position > int(state.bases[1, slot, layer]) - state.shape.n_taps:
        state.inputs[slot, layer, position % state.shape.n_inputs] = x
