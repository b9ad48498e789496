"""The FFN's activation and the logits' soft cap, fp32.

Gated: out = act(gate) * up with x = [gate | up] of (m, 2F). Not gated: out = act(x) with x of (m, F).

silu(v) = v / (1 + e^-v)                                        relu(v) = max(v, 0)
gelu(v) = v Phi(v), Phi(v) = erfc(-v / sqrt 2) / 2              fatrelu(v) = v if v >= threshold, else 0
gelu_tanh(v) = v / (1 + e^(-2u)), u = sqrt(2 / pi) (v + 0.044715 v^3)    (= v (1 + tanh u) / 2)
softcap(v) = c tanh(v / c) = c - 2c / (1 + e^(2v / c)), c = threshold (arXiv 2408.00118); a series near 0
clamped_silu(v) = w / (1 + e^(-1.702 w)), w = min(v, threshold); its gate multiplies it by clamp(up) + 1, where clamp
    limits up to +-threshold (gpt-oss)                          relu2(v) = max(v, 0)^2
Relative error: silu 1e-6 (0 below -88.7, where it is at most 3e-37), both gelus 1e-6 (|v| + 1)^2 / 2, clamped_silu
1e-6 (|v| + 1). erfc: W. Press
et al., Numerical Recipes 6.2 (1.2e-7 relative). NaN stays NaN, except in fatrelu, which returns 0 as torch does.

Each output depends only on its own inputs. SwiGLU costs one thread 4.0 ns per 16 outputs, 3.4 us for 11,008 outputs
(Zen 5, AVX-512, Nov 2026).
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.jit.atomics import call_chunk
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import NO_ARGUMENTS, Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import (
    Lanes,
    load16,
    load_lanes,
    multiply,
    operation,
    read_float,
    scratch,
    spread,
    store16,
    store_lanes,
    write_float,
    write_integer,
)

F32 = np.float32(0)  # type of a loaded value
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "fatrelu": 4, "softcap": 5, "clamped_silu": 6, "relu2": 7}
CLAMPED, SQUARED = 6, 7
CHUNK = 8192  # outputs a thread claims at a time: about 2 us of work, many times the cost of a claim
SHARED_FROM = 4 * CHUNK  # the caller computes fewer outputs itself: waking the thread pool costs about 1 us
# Indices in the chunk function's arguments: addresses, outputs of a row, the distance between rows of outputs, ...
INPUT, OUT, ROW_VALUES, ROW_STRIDE, GATED, KIND, THRESHOLD, N_WORDS = range(8)
ARGUMENT_BYTES = 8 * N_WORDS
# Coefficients of t^0, t^1, ... in ln(erfc(z) e^(z^2) / t), t = 1 / (1 + z / 2).
ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip
TANH, NEAR = (1.0, -1 / 3, 2 / 15, -17 / 315), 0.2  # tanh(u) / u in powers of u^2, used for |u| < NEAR


def _silu(v: Lanes) -> Lanes:
    return v / ((v * -1.0).exp() + 1.0)


def _gelu(v: Lanes) -> Lanes:
    z = v.magnitude() * 0.7071067811865476
    base = (z * 0.5) + 1.0
    t = v.constant(1.0) / base
    series = v.constant(ERFC[-1])
    for coefficient in ERFC[-2::-1]:
        series = series.times_plus(t, coefficient)
    tail = t * (z * z * -1.0 + series).exp() * 0.5  # Phi(-|v|)
    return v * v.where("<", 0.0, tail, v.constant(1.0) - tail)


def _gelu_tanh(v: Lanes) -> Lanes:
    u = v * (v * v * 0.044715 + 1.0) * -1.5957691216057308
    return v / (u.exp() + 1.0)


def _soft_cap(v: Lanes, c: Lanes) -> Lanes:
    u = v / c
    square, series = u * u, u.constant(TANH[-1])
    for coefficient in TANH[-2::-1]:
        series = series.times_plus(square, coefficient)
    far = c - c * 2.0 / ((u * 2.0).exp() + 1.0)
    return u.magnitude().where("<", NEAR, v * series, far)


def _clamped_silu(v: Lanes, limit: Lanes) -> Lanes:
    w = v.where(">", limit, limit, v)
    return w / ((w * -1.702).exp() + 1.0)


def _clamped_factor(v: Lanes, limit: Lanes) -> Lanes:
    w = v.where(">", limit, limit, v)
    return w.where("<", limit * -1.0, limit * -1.0, w) + 1.0


silu = operation(1, _silu, "silu", "v / (1 + e^-v).")
gelu = operation(1, _gelu, "gelu", "v Phi(v).")
gelu_tanh = operation(1, _gelu_tanh, "gelu_tanh", "The approximation of gelu by tanh.")
relu = operation(1, lambda v: v.where("<", 0.0, 0.0, v), "relu", "max(v, 0).")
soft_cap = operation(2, _soft_cap, "soft_cap", "c tanh(v / c).")
fatrelu = operation(2, lambda v, limit: v.where(">=", limit, v, 0.0), "fatrelu", "v where v >= limit, else 0.")


clamped_silu = operation(2, _clamped_silu, "clamped_silu", "w / (1 + e^(-1.702 w)), w = min(v, limit).")
clamped_factor = operation(2, _clamped_factor, "clamped_factor", "v limited to +-limit, + 1.")
sigmoid = operation(1, lambda v: v.constant(1.0) / ((v * -1.0).exp() + 1.0), "sigmoid", "1 / (1 + e^-v).")


@inner
def _applied(kind: int, v: Any, threshold: Any) -> Any:
    if kind == 0:
        return silu(v)
    if kind == 1:
        return gelu(v)
    if kind == 2:
        return gelu_tanh(v)
    if kind == 3:
        return relu(v)
    if kind == 5:
        return soft_cap(v, threshold)
    if kind == CLAMPED:
        return clamped_silu(v, threshold)
    if kind == SQUARED:
        return multiply(relu(v), relu(v))
    return fatrelu(v, threshold)


@inner
def _times(kind: int, y: Any, up: Any, threshold: Any) -> Any:
    return multiply(y, clamped_factor(up, threshold) if kind == CLAMPED else up)


@inner
def _piece(x: int, up: int, out: int, n: int, kind: int, threshold: float) -> None:
    """Compute n outputs from adjacent inputs. `up` is the address of the second factors, or 0 without a gate."""
    limit = spread(np.float32(threshold))
    i = 0
    while i + 16 <= n:
        y = _applied(kind, load16(x + 4 * i, F32), limit)
        if up:
            y = _times(kind, y, load16(up + 4 * i, F32), limit)
        store16(y, out + 4 * i)
        i += 16
    if i < n:
        y = _applied(kind, load_lanes(x + 4 * i, 0, n - i, F32), limit)
        if up:
            y = _times(kind, y, load_lanes(up + 4 * i, 0, n - i, F32), limit)
        store_lanes(y, out + 4 * i, n - i, F32)


def _chunk(arguments: int, index: int) -> None:
    """Compute the index-th piece of up to CHUNK outputs. Pieces are counted row by row."""
    x, out, n_outputs = word(arguments, INPUT), word(arguments, OUT), word(arguments, ROW_VALUES)
    gated, kind, threshold = word(arguments, GATED), word(arguments, KIND), read_float(arguments + 8 * THRESHOLD)
    n_pieces = (n_outputs + CHUNK - 1) // CHUNK
    row, first = index // n_pieces, index % n_pieces * CHUNK
    source = x + 4 * (row * n_outputs * (1 + gated) + first)
    up = source + 4 * n_outputs if gated else 0
    target = out + 4 * (row * word(arguments, ROW_STRIDE) + first)
    _piece(source, up, target, min(CHUNK, n_outputs - first), kind, threshold)


CHUNK_FUNCTION = Chunk(_chunk)


@entry(
    types.int64(
        types.int64, array_out(types.int64, 1), array_in(types.float32, 2), types.int64, types.int64, types.float32,
        types.boolean, array_out(types.float32, 2),
    )
)  # fmt: skip
def _enter(
    function: int, arguments: Any, x: Any, kind: int, gated: int, threshold: float, alone: bool, out: Any
) -> int:
    """Check the shapes, then compute everything, or prepare the work for several threads.

    Returns:
        -1 if a shape is wrong; 0 if everything was computed; else the number of chunks for the thread pool. In that
        last case the chunk function's arguments have been written to `arguments` unless it is empty.
    """
    m, n_outputs = out.shape
    if x.shape[0] != m or x.shape[1] != n_outputs * (1 + gated):
        return -1
    n_chunks = m * ((n_outputs + CHUNK - 1) // CHUNK)
    alone = alone or m * n_outputs < SHARED_FROM
    if not alone and arguments.size == 0:
        return n_chunks
    address = scratch(ARGUMENT_BYTES) if alone else arguments.ctypes.data
    write_integer(x.ctypes.data, address + 8 * INPUT)
    write_integer(out.ctypes.data, address + 8 * OUT)
    write_integer(n_outputs, address + 8 * ROW_VALUES)
    write_integer(n_outputs, address + 8 * ROW_STRIDE)
    write_integer(gated, address + 8 * GATED)
    write_integer(kind, address + 8 * KIND)
    write_float(np.float32(threshold), address + 8 * THRESHOLD)
    if not alone:
        return n_chunks
    for index in range(n_chunks):
        call_chunk(function, address, index)
    return 0


def chunk_arguments(kind: str, n_outputs: int, stride: int, *, gated: bool, threshold: float) -> Any:
    """Return the arguments of CHUNK_FUNCTION without addresses, int64 (N_WORDS,).

    Args:
        n_outputs: outputs of a row.
        stride: fp32 numbers from one row of outputs to the next.
        kind, gated, threshold: see activate().

    Raises:
        ValueError: if the kind is unknown.
    """
    arguments = np.zeros(N_WORDS, np.int64)
    bits = int(np.float32(threshold).view(np.int32))
    arguments[ROW_VALUES:] = n_outputs, stride, gated, _number_of(kind), bits
    return arguments


def _number_of(kind: str) -> int:
    number = KINDS.get(kind)
    if number is None:
        raise ValueError(f"Unknown activation {kind}; choose one of {', '.join(KINDS)}.")
    return number


def activate(
    x: Any, kind: str, out: Any = None, *, gated: bool, threshold: float = 0.0, pool: ThreadPool | None = None
) -> Any:
    """Apply an activation.

    Args:
        x: contiguous fp32, (m, 2F) if gated, else (m, F).
        kind: a key of KINDS.
        out: fp32 (m, F), allocated if None.
        threshold: fatrelu's threshold, softcap's cap or clamped_silu's limit.
        pool: shares large inputs over its threads; None computes in the calling thread.

    Returns:
        out

    Raises:
        ValueError: if a shape, dtype or layout does not fit, or the kind is unknown.
    """
    number = _number_of(kind)
    if out is None:
        out = np.empty((x.shape[0], x.shape[1] // 2 if gated else x.shape[1]), np.float32)
    status = _enter(CHUNK_FUNCTION.address, NO_ARGUMENTS, x, number, gated, threshold, pool is None, out)
    if status < 0:
        layout = "gated" if gated else "not gated"
        raise ValueError(f"Activation input x {x.shape} ({layout}) does not fit the output {out.shape}.")
    if status > 0 and pool is not None:
        arguments = np.empty(N_WORDS, np.int64)
        _enter(CHUNK_FUNCTION.address, arguments, x, number, gated, threshold, False, out)
        pool.run(CHUNK_FUNCTION.address, arguments, status)
    return out


@entry(types.int64(array_out(types.float32, 2), types.int64, types.int64))
def _gate(x: Any, gates: int, row_bytes: int) -> int:
    """Multiply x by sigmoid(gates), whose rows begin row_bytes apart. Return 0."""
    m, n = x.shape
    for row in range(m):
        at, gate_at = x.ctypes.data + 4 * n * row, gates + row_bytes * row
        for i in range(0, n, 16):
            count = min(16, n - i)
            factor = sigmoid(load_lanes(gate_at + 4 * i, 0, count, F32))
            store_lanes(multiply(load_lanes(at + 4 * i, 0, count, F32), factor), at + 4 * i, count, F32)
    return 0


def gate(x: Any, gates: Any) -> Any:
    """Multiply x by sigmoid(gates), in place, and return x.

    Args:
        x: contiguous fp32 (m, n).
        gates: fp32 (m, n) with contiguous rows, such as the last columns of a larger array.

    Raises:
        ValueError: if shapes, dtypes or layouts do not fit.
    """
    if gates.shape != x.shape or gates.dtype != np.float32 or gates.strides[1] != 4:
        raise ValueError(f"gates {gates.dtype} {gates.shape} do not fit x {x.shape}, or their rows are not contiguous.")
    _gate(x, gates.ctypes.data, gates.strides[0])
    return x
