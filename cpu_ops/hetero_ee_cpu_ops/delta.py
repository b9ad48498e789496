"""The gated delta rule for m new rows, of any mixture of sequences, with its convolution, norms and output gate.

hetero_ee/layers/delta.py has the formulas. First every row is mixed with its last inputs, and its queries and keys are
divided by their lengths. Then a work item takes all rows of one sequence and value head, in order of position, through
16 columns of the head's matrix after the other: 16 x key_dim values stay in the L1 cache, whatever the number of rows.
A column depends on no other, so a row's bits depend on neither its batch, nor where a prompt is cut, nor the threads.

Rows between the stored matrices and the first new row are repeated from the log, in the same arithmetic: a matrix is
multiplied by the decay, rounded, and key x delta is added by a fused multiply-add. Matrices are written back only where
a pass asks for it. Sums over a key are added in two halves, those of even and of odd features.

Layout of a sequence's state in one layer: matrices (n_value_heads, blocks of 16 columns, key_dim, 16), and rings by
position: inputs (n_inputs, channels), keys, deltas and decays (n_log, ...), all fp32. key_dim <= 256.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, cast

import numpy as np

from hetero_ee_cpu_ops.activate import sigmoid, silu
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import (
    Lanes,
    add,
    exponential,
    lane_sum,
    load16,
    load_lanes,
    multiply,
    multiply_add,
    operation,
    read_float,
    scratch,
    spread,
    store16,
    store_lanes,
    subtract,
    write_float,
    write_integer,
)

F32, F32_ONE = np.float32(0), np.float32(1)
KEY_EPS = 1e-6  # added to the squared length of queries and keys
MAX_KEY_DIM, MATRIX_BYTES = 256, 256 * 64
MAX_KERNEL, KERNEL_BYTES = 16, 128
(
    INPUTS, WIDTH, GATES, CONV, KERNEL, CHANNELS, RATES, DT_BIAS, SCALE, EPS, KEY_HEADS, VALUE_HEADS, KEY_DIM,
    VALUE_DIM, TILED, MIXED, DECAYS, BETAS, OVERLAPS, OUT, TABLE, ORDER, PLACES, N_LOG, N_INPUTS, CONV_BIAS, SKIPS,
    N_ARGUMENTS,
) = range(28)  # fmt: skip
# Columns of TABLE, a line per sequence. ORDER holds each sequence's rows from START on, PLACES each row's sequence and
# index among its sequence's rows.
ROWS, START, FIRST, BASE, NEW_BASE, MATRICES, LAST_INPUTS, LOG_KEYS, LOG_DELTAS, LOG_DECAYS, COLUMNS = range(11)


def _softplus(v: Lanes) -> Lanes:
    """ln(1 + e^v) = max(v, 0) + ln(1 + y), y = e^-|v|, with ln(1 + y) = 2 artanh(y / (2 + y)) as a series."""
    y = (v.magnitude() * -1.0).exp()
    z = y / (y + 2.0)
    square, series = z * z, z.constant(1 / 17)
    for divisor in (15, 13, 11, 9, 7, 5, 3, 1):
        series = series.times_plus(square, 1 / divisor)
    return v.where(">", 0.0, v, 0.0) + z * 2.0 * series


softplus = operation(1, _softplus, "softplus", "ln(1 + e^v).")


@inner
def _line(arguments: int, sequence: int) -> int:
    return word(arguments, TABLE) + 8 * COLUMNS * sequence


@inner
def _find_sources(arguments: int, line: int, index: int, sources: int) -> None:
    """Write the addresses of the inputs that a row's convolution sees, oldest first; 0 before the sequence."""
    kernel, n_inputs, row_bytes = word(arguments, KERNEL), word(arguments, N_INPUTS), 4 * word(arguments, WIDTH)
    for j in range(kernel):
        earlier = index - (kernel - 1) + j
        position, at = word(line, FIRST) + earlier, 0
        if earlier >= 0:
            row = word(word(arguments, ORDER), word(line, START) + earlier)
            at = word(arguments, INPUTS) + row * row_bytes
        elif position >= 0:
            at = word(line, LAST_INPUTS) + 4 * word(arguments, CHANNELS) * (position % n_inputs)
        write_integer(at, sources + 8 * j)


@inner
def _convolve(arguments: int, sources: int, target: int) -> None:
    """Mix one row's channels with their last inputs, and apply SiLU."""
    n, kernel, weights = word(arguments, CHANNELS), word(arguments, KERNEL), word(arguments, CONV)
    bias = word(arguments, CONV_BIAS)
    for i in range(0, n, 16):
        count, total = min(16, n - i), spread(F32)
        if bias:
            total = load_lanes(bias + 4 * i, 0, count, F32)
        for j in range(kernel):
            at, weight = word(sources, j), weights + 4 * (j * n + i)
            if at and count == 16:
                total = multiply_add(load16(at + 4 * i, F32), load16(weight, F32), total)
            elif at:
                total = multiply_add(load_lanes(at + 4 * i, 0, count, F32), load_lanes(weight, 0, count, F32), total)
        store_lanes(silu(total), target + 4 * i, count, F32)


@inner
def dot(x: int, y: int, n: int) -> Any:
    """Return the product of two vectors of n values."""
    total = spread(F32)
    for i in range(0, n, 16):
        count = min(16, n - i)
        total = multiply_add(load_lanes(x + 4 * i, 0, count, F32), load_lanes(y + 4 * i, 0, count, F32), total)
    return lane_sum(total)


@inner
def _scale(x: int, n: int, factor: Any) -> None:
    lanes = spread(np.float32(factor))
    for i in range(0, n, 16):
        count = min(16, n - i)
        store_lanes(multiply(load_lanes(x + 4 * i, 0, count, F32), lanes), x + 4 * i, count, F32)


@inner
def convolved(arguments: int, row: int) -> int:
    """Mix one row's channels with their last inputs, and return the address of the result."""
    line = _line(arguments, word(word(arguments, PLACES), 2 * row))
    sources = scratch(KERNEL_BYTES)
    _find_sources(arguments, line, word(word(arguments, PLACES), 2 * row + 1), sources)
    target = word(arguments, MIXED) + 4 * word(arguments, CHANNELS) * row
    _convolve(arguments, sources, target)
    return target


def _mix(arguments: int, row: int) -> None:
    """Compute one row's queries, keys, values, decays and betas."""
    query = convolved(arguments, row)
    n, n_key_heads = word(arguments, KEY_DIM), word(arguments, KEY_HEADS)
    for head in range(n_key_heads):
        q, k = query + 4 * n * head, query + 4 * n * (n_key_heads + head)
        _scale(q, n, 1.0 / (sqrt(dot(q, q, n) + KEY_EPS) * sqrt(n)))
        _scale(k, n, 1.0 / sqrt(dot(k, k, n) + KEY_EPS))
        write_float(np.float32(dot(q, k, n)), word(arguments, OVERLAPS) + 4 * (row * n_key_heads + head))
    n_heads = word(arguments, VALUE_HEADS)
    gates = word(arguments, GATES) + 8 * n_heads * row
    for i in range(0, n_heads, 16):
        count, at = min(16, n_heads - i), 4 * (row * n_heads + i)
        store_lanes(sigmoid(load_lanes(gates + 4 * i, 0, count, F32)), word(arguments, BETAS) + at, count, F32)
        step = add(
            load_lanes(gates + 4 * (n_heads + i), 0, count, F32),
            load_lanes(word(arguments, DT_BIAS) + 4 * i, 0, count, F32),
        )
        rate = load_lanes(word(arguments, RATES) + 4 * i, 0, count, F32)  # -e^a_log
        decay = exponential(multiply(rate, softplus(step)))
        store_lanes(decay, word(arguments, DECAYS) + at, count, F32)


@inner
def _advanced(source: int, target: int, i: int, key: int, decay: Any, delta: Any) -> Any:
    """Apply an earlier token's update to line i of 16 columns, and return the line."""
    kept = multiply(load16(source + 64 * i, F32), decay)
    line = multiply_add(spread(read_float(key + 4 * i)), delta, kept)
    store16(line, target + 64 * i)
    return line


@inner
def _advance(source: int, target: int, n: int, key: int, decay: Any, delta: Any) -> None:
    for i in range(n):
        _advanced(source, target, i, key, decay, delta)


@inner
def _advance_and_read(
    source: int, target: int, n: int, key: int, decay: Any, delta: Any, new_key: int, query: int
) -> Any:
    """Apply an earlier token's update to 16 columns. Return their products with a new token's key and query."""
    a = b = c = d = spread(F32)
    i = 0
    while i + 2 <= n:
        even = _advanced(source, target, i, key, decay, delta)
        odd = _advanced(source, target, i + 1, key, decay, delta)
        a = multiply_add(spread(read_float(new_key + 4 * i)), even, a)
        b = multiply_add(spread(read_float(new_key + 4 * i + 4)), odd, b)
        c = multiply_add(spread(read_float(query + 4 * i)), even, c)
        d = multiply_add(spread(read_float(query + 4 * i + 4)), odd, d)
        i += 2
    if i < n:
        even = _advanced(source, target, i, key, decay, delta)
        a = multiply_add(spread(read_float(new_key + 4 * i)), even, a)
        c = multiply_add(spread(read_float(query + 4 * i)), even, c)
    return add(a, b), add(c, d)


@inner
def _columns(arguments: int, line: int, head: int, key_head: int, block: int, work: int) -> None:
    """Take a sequence's rows through 16 columns of a head's matrix. Write outputs before their norm, and the log."""
    n, n_key_heads, n_heads = word(arguments, KEY_DIM), word(arguments, KEY_HEADS), word(arguments, VALUE_HEADS)
    size, n_log, channels = word(arguments, VALUE_DIM), word(arguments, N_LOG), word(arguments, CHANNELS)
    first, base, new_base = word(line, FIRST), word(line, BASE), word(line, NEW_BASE)
    count, at = min(16, size - 16 * block), 4 * (head * size + 16 * block)
    stored = word(line, MATRICES) + 64 * n * (head * (-(-size // 16)) + block)
    source, key, decay, delta, skips = stored, 0, spread(F32_ONE), spread(F32), word(arguments, SKIPS)
    for position in range(base, first + word(line, ROWS)):
        slot = position % n_log
        log_delta = word(line, LOG_DELTAS) + 4 * n_heads * size * slot + at
        if position < first:
            if position > base:
                _advance(source, work, n, key, decay, delta)
                source = work
        else:
            row = word(word(arguments, ORDER), word(line, START) + position - first)
            query = word(arguments, MIXED) + 4 * (channels * row + n * key_head)
            new_key, value = query + 4 * n * n_key_heads, query + 4 * (n * (2 * n_key_heads - key_head)) + at
            if position == base:
                key = new_key  # with decay 1 and delta 0: no earlier token's update is missing
            replaced, seen = _advance_and_read(source, work, n, key, decay, delta, new_key, query)
            source = work
        if position == new_base and position > base:
            for i in range(n):
                store16(load16(work + 64 * i, F32), stored + 64 * i)
        if position < first:
            key = word(line, LOG_KEYS) + 4 * n * (n_key_heads * slot + key_head)
            decay = spread(read_float(word(line, LOG_DECAYS) + 4 * (n_heads * slot + head)))
            delta = load_lanes(log_delta, 0, count, F32)
        else:
            key, decay = new_key, spread(read_float(word(arguments, DECAYS) + 4 * (row * n_heads + head)))
            beta = spread(read_float(word(arguments, BETAS) + 4 * (row * n_heads + head)))
            overlap = spread(read_float(word(arguments, OVERLAPS) + 4 * (row * n_key_heads + key_head)))
            wanted = load_lanes(value, 0, count, F32)
            kept = wanted if skips else subtract(wanted, multiply(decay, replaced))
            delta = multiply(kept, beta)
            store_lanes(delta, log_delta, count, F32)
            out = word(arguments, OUT) + 4 * n_heads * size * row + at
            result = multiply_add(delta, overlap, multiply(decay, seen))
            if skips:
                result = multiply_add(wanted, spread(read_float(skips + 4 * head)), result)
            store_lanes(result, out, count, F32)


@inner
def _finish(arguments: int, row: int, head: int) -> None:
    """Norm one row's output of a head, and multiply it by SiLU of its gate."""
    size, n_heads, scale = word(arguments, VALUE_DIM), word(arguments, VALUE_HEADS), word(arguments, SCALE)
    x = word(arguments, OUT) + 4 * size * (row * n_heads + head)
    gate = word(arguments, INPUTS) + 4 * (word(arguments, WIDTH) * row + word(arguments, CHANNELS) + size * head)
    inverse = spread(np.float32(1.0 / sqrt(dot(x, x, size) / size + read_float(arguments + 8 * EPS))))
    for i in range(0, size, 16):
        count = min(16, size - i)
        y = multiply(load_lanes(x + 4 * i, 0, count, F32), inverse)
        y = multiply(y, load_lanes(scale + 4 * i, 0, count, F32))
        store_lanes(multiply(y, silu(load_lanes(gate + 4 * i, 0, count, F32))), x + 4 * i, count, F32)


def _scan(arguments: int, index: int) -> None:
    """Take all rows of one sequence through one value head."""
    n_heads, n_key_heads = word(arguments, VALUE_HEADS), word(arguments, KEY_HEADS)
    line, head = _line(arguments, index // n_heads), index % n_heads
    key_head = head % n_key_heads if word(arguments, TILED) else head // (n_heads // n_key_heads)
    work = scratch(MATRIX_BYTES)
    for block in range(-(-word(arguments, VALUE_DIM) // 16)):
        _columns(arguments, line, head, key_head, block, work)
    for number in range(0 if word(arguments, SKIPS) else word(line, ROWS)):
        _finish(arguments, word(word(arguments, ORDER), word(line, START) + number), head)


MIX, SCAN = Chunk(_mix), Chunk(_scan)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaSequence:
    """One sequence's rows in a pass, and its state in one layer. See this file's docstring for the layout."""

    rows: Any  # int64, in order of position
    first: int  # position of the first of them
    base: int  # position before which the matrices are stored
    new_base: int  # the same after the pass
    matrices: Any
    inputs: Any
    keys: Any
    deltas: Any
    decays: Any

    def line(self, start: int) -> tuple[int, ...]:
        """Return the sequence's line of TABLE. Its rows begin at `start` in ORDER."""
        arrays = self.matrices, self.inputs, self.keys, self.deltas, self.decays
        places = (array.ctypes.data for array in arrays)
        return len(self.rows), start, self.first, self.base, self.new_base, *places

    def keep(self, inputs: Any, keys: Any, decays: Any) -> None:
        """Store the last inputs (m, channels), keys (m, n_key_heads * key_dim) and decays (m, n_value_heads)."""
        for ring, found in ((self.inputs, inputs), (self.keys, keys), (self.decays, decays)):
            last = self.rows[-len(ring) :]
            end = self.first + len(self.rows)
            ring[np.arange(end - len(last), end) % len(ring)] = found[last]


class DeltaRule:
    """Gated delta rule of one layer. Threads may share it. mamba.py has another rule with the same state.

    Args:
        heads: n_key_heads, n_value_heads, key_dim, value_dim.
        is_tiled: value head v reads key head v mod n_key_heads, not v // (n_value_heads / n_key_heads).
        conv: weights of the convolution (channels, kernel).
        a_log, dt_bias: (n_value_heads,).
        scale, eps: of the norm of a head's output, scale (value_dim,).

    Raises:
        ValueError: if sizes do not fit each other, or exceed 256 key features or 16 tokens of the convolution.
    """

    mix_chunk, finish_chunk = MIX, cast("Chunk | None", None)
    has_steps = False  # whether the last columns of the inputs, one per value head, stand for the gates

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        conv: Any,
        a_log: Any,
        dt_bias: Any,
        scale: Any,
        eps: float,
        pool: ThreadPool,
        *,
        is_tiled: bool,
    ) -> None:
        self._n_key_heads, self._n_heads, self._key_dim, self._value_dim = heads
        self._channels, kernel = conv.shape
        if self._channels != 2 * self._n_key_heads * self._key_dim + self._size or self._n_heads % self._n_key_heads:
            raise ValueError(f"{self._channels} channels do not fit heads {heads}.")
        if self._key_dim > MAX_KEY_DIM or not 2 <= kernel <= MAX_KERNEL:
            raise ValueError(f"{self._key_dim} key features or a convolution of {kernel} tokens are too many.")
        self._kept = (  # the arrays whose addresses _arguments holds
            np.ascontiguousarray(conv.T), -np.exp(a_log), np.ascontiguousarray(dt_bias), np.ascontiguousarray(scale),
        )  # fmt: skip
        self._arguments, self._pool = np.zeros(N_ARGUMENTS, np.int64), pool
        for name, array in zip((CONV, RATES, DT_BIAS, SCALE), self._kept, strict=True):
            self._arguments[name] = array.ctypes.data
        self._arguments[[KERNEL, CHANNELS, TILED]] = kernel, self._channels, is_tiled
        self._arguments[[KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM]] = heads
        self._arguments.view(np.float32)[2 * EPS] = eps

    @property
    def _size(self) -> int:
        return self._n_heads * self._value_dim

    def run(self, inputs: Any, gates: Any, sequences: Sequence[DeltaSequence]) -> Any:
        """Apply the rule and update the sequences' state.

        Args:
            inputs: fp32 (m, channels + n_value_heads * value_dim): queries, keys, values and output gates.
            gates: fp32 (m, 2 n_value_heads): inputs of beta and of decay; of a rule with has_steps the inputs.

        Returns:
            fp32 (m, n_value_heads * value_dim).

        Raises:
            ValueError: if shapes do not fit.
        """
        m, n_heads = len(inputs), self._n_heads
        widths = self._channels + self._size + n_heads * self.has_steps, 2 * n_heads
        if inputs.shape != (m, widths[0]) or (gates is not inputs and gates.shape != (m, widths[1])):
            raise ValueError(f"inputs {inputs.shape} and gates {gates.shape} do not fit {self._channels} channels.")
        shapes = (m, self._channels), (m, n_heads), (m, n_heads), (m, self._n_key_heads), (m, self._size)
        mixed, decays, betas, overlaps, out = (np.empty(shape, np.float32) for shape in shapes)
        order = np.concatenate([each.rows for each in sequences])
        starts = np.cumsum([0, *(len(each.rows) for each in sequences)])
        table = np.array([each.line(start) for each, start in zip(sequences, starts[:-1], strict=True)], np.int64)
        places = np.empty((m, 2), np.int64)
        for number, each in enumerate(sequences):
            places[each.rows, 0], places[each.rows, 1] = number, np.arange(len(each.rows))
        arguments = self._arguments.copy()
        arguments[[WIDTH, N_LOG, N_INPUTS]] = inputs.shape[1], len(sequences[0].keys), len(sequences[0].inputs)
        names = INPUTS, GATES, MIXED, DECAYS, BETAS, OVERLAPS, OUT, TABLE, ORDER, PLACES
        arrays = inputs, gates, mixed, decays, betas, overlaps, out, table, order, places
        for name, array in zip(names, arrays, strict=True):
            arguments[name] = array.ctypes.data
        self._pool.run(self.mix_chunk.address, arguments, m)
        self._pool.run(SCAN.address, arguments, len(sequences) * n_heads)
        if self.finish_chunk is not None:
            self._pool.run(self.finish_chunk.address, arguments, m * self._n_key_heads)
        n_keys = self._n_key_heads * self._key_dim
        for each in sequences:
            each.keep(inputs[:, : self._channels], mixed[:, n_keys : 2 * n_keys], decays)
        return out
