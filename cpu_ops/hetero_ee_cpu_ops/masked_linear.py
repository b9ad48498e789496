"""out[t, n] = 2^e first[n] . x[t] + bias[n] where scores[t, n] > 0 or token t may not skip, else 0, and row n not read.

first: int4 rows (rows.py), N neurons, K columns. The row products are those of steps 1 and 2 of sparse_ffn.py: a
token's bits are the same whatever m, the other tokens, the threads and the other neurons are. 2^e and then the bias are
rounded one after the other.

A pass of 8 tokens reads the rows that any of them wants, and all of them where any token may not skip.

Source: derived; a predictor before the first matrix as in Deja Vu (arXiv 2310.17157) and PowerInfer (arXiv 2312.12456).
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.kernel_files import compiled
from hetero_ee_cpu_ops.lazy import Chunk
from hetero_ee_cpu_ops.listed_rows import (
    FACTOR,
    FIRST,
    FIRST_TOKEN,
    LISTS,
    N_NEURONS,
    N_TOKENS,
    N_UNITS,
    OFFSET_BYTES,
    OTHERS,
    PASS_TOKENS,
    QUANTIZE,
    SCALES,
    STRIP_GROUPS,
    TILE,
    ask_for_tile,
    begin_list,
    meet,
    offset_bytes,
    place_codes,
    point_at,
    whole_units,
    workspace_bytes,
)
from hetero_ee_cpu_ops.quantize import INPUT
from hetero_ee_cpu_ops.rows import UNIT_BYTES, UNIT_COLUMNS, RowMatrix
from hetero_ee_cpu_ops.simd.bytes import lowest_bit, nonzero_lanes, store_rows, word
from hetero_ee_cpu_ops.simd.floats import (
    add,
    load16,
    load_lanes,
    operation,
    read_float,
    scratch,
    spread,
    store16,
    store_lanes,
    write_float,
    write_integer,
)
from hetero_ee_cpu_ops.thread_pool import ThreadPool, lead

CHUNKS_A_THREAD = 4  # of neurons: the first rows of each are waited for
MIN_SHARED_BYTES = 2**18  # rows times tokens, 7 us of one thread; below, handing over costs more than it saves
ONE, TWO, FOUR, EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * 8
F32 = np.float32(0)  # says what a load finds
# Offsets in a chunk's frame, in bytes, and indices in the argument array, after listed_rows.py's.
SUMS = SCALES + 64 * STRIP_GROUPS  # 16 fp32 for each token
FRAME_BYTES = SUMS + 64 * PASS_TOKENS
SCORES, MAY_SKIP, BIAS, OUTPUT, NEURONS_A_CHUNK, READS_ALL = range(OTHERS, OTHERS + 6)
N_ARGUMENTS = OTHERS + 6

where_positive = operation(2, lambda a, b: b.where(">", 0.0, a, 0.0), "where_positive", "a where b > 0, else 0.")


@compiled(nogil=True)
def _loaded(address: int, count: int) -> Any:
    """16 fp32, zeros from the count on, which are not read."""
    return load16(address, F32) if count >= 16 else load_lanes(address, 0, count, F32)


@compiled(nogil=True)
def _list(arguments: int, first: int, end: int, rows: int) -> int:
    """Lists the neurons of first .. end - 1 that any token wants, filled up to whole tiles with the last one. Returns
    how many they are."""
    n_neurons, n_tokens, count = word(arguments, N_NEURONS), word(arguments, N_TOKENS), 0
    scores = word(arguments, SCORES) + 4 * n_neurons * word(arguments, FIRST_TOKEN)
    for start in range(first, end, 16):
        bits = 0
        for token in range(n_tokens):
            found = _loaded(scores + 4 * (token * n_neurons + start), end - start)
            bits |= nonzero_lanes(where_positive(spread(np.float32(1)), found))
        while bits:
            write_integer(start + lowest_bit(bits), rows + 8 * count)
            bits &= bits - 1
            count += 1
    for at in range(count, (count + TILE - 1) & -TILE):
        write_integer(word(rows, count - 1), rows + 8 * at)
    return count


@compiled(nogil=True)
def _list_all(first: int, end: int, rows: int) -> int:
    for at in range((end - first + TILE - 1) & -TILE):
        write_integer(min(first + at, end - 1), rows + 8 * at)
    return end - first


@compiled(nogil=True)
def _clear(arguments: int, first: int, end: int) -> None:
    """Zeros of every token for neurons first .. end - 1."""
    n_neurons = word(arguments, N_NEURONS)
    out = word(arguments, OUTPUT) + 4 * n_neurons * word(arguments, FIRST_TOKEN)
    for token in range(word(arguments, N_TOKENS)):
        for neuron in range(first, end, 16):
            _store(spread(F32), out + 4 * (token * n_neurons + neuron), end - neuron)


@compiled(nogil=True)
def _store(value: Any, address: int, count: int) -> None:
    if count >= 16:
        store16(value, address)
    else:
        store_lanes(value, address, count, F32)


@compiled(nogil=True)
def _products(tokens: Any, arguments: int, frame: int, first: int) -> None:
    """The products of the 16 rows that meet with len(tokens) tokens from `first` on, to SUMS."""
    factor = read_float(arguments + 8 * (FIRST + FACTOR))
    store_rows(meet(tokens, arguments, frame, first), factor, frame + SUMS + 64 * first, 64)


@compiled(nogil=True)
def _give_out_all(arguments: int, frame: int, neuron: int, count: int) -> None:
    """The sums of up to 16 neurons that follow each other."""
    n_neurons, bias, first = word(arguments, N_NEURONS), word(arguments, BIAS), word(arguments, FIRST_TOKEN)
    for token in range(word(arguments, N_TOKENS)):
        at = 4 * (n_neurons * (first + token) + neuron)
        value = load16(frame + SUMS + 64 * token, F32)
        if bias:
            value = add(value, _loaded(bias + 4 * neuron, count))
        if word(word(arguments, MAY_SKIP), first + token):
            value = where_positive(value, _loaded(word(arguments, SCORES) + at, count))
        _store(value, word(arguments, OUTPUT) + at, count)


@compiled(nogil=True)
def _give_out(arguments: int, frame: int, rows: int, count: int) -> None:
    """The sums of up to 16 listed neurons, to the tokens that want them."""
    n_neurons, bias = word(arguments, N_NEURONS), word(arguments, BIAS)
    for token in range(word(arguments, N_TOKENS)):
        begin = 4 * n_neurons * (word(arguments, FIRST_TOKEN) + token)
        scores, out = word(arguments, SCORES) + begin, word(arguments, OUTPUT) + begin
        for at in range(count):
            neuron = word(rows, at)
            if read_float(scores + 4 * neuron) > F32:
                value = read_float(frame + SUMS + 64 * token + 4 * at)
                if bias:
                    value += read_float(bias + 4 * neuron)
                write_float(value, out + 4 * neuron)


def _neurons(arguments: int, index: int) -> None:
    """NEURONS_A_CHUNK neurons: their outputs for every token of the pass."""
    frame = scratch(FRAME_BYTES)
    first = index * word(arguments, NEURONS_A_CHUNK)
    end = min(first + word(arguments, NEURONS_A_CHUNK), word(arguments, N_NEURONS))
    rows, n_tokens, reads_all = (
        word(arguments, LISTS) + 8 * first,
        word(arguments, N_TOKENS),
        word(arguments, READS_ALL),
    )
    if reads_all:
        count = _list_all(first, end, rows)
    else:
        _clear(arguments, first, end)
        count = _list(arguments, first, end, rows)
    begin_list(frame, rows, count)
    ask_for_tile(arguments, frame)
    for at in range(0, count, TILE):
        point_at(arguments, frame, at, count)
        token = 0
        if n_tokens >= 8:
            _products(EIGHT, arguments, frame, 0)
            token = 8
        if n_tokens - token >= 4:
            _products(FOUR, arguments, frame, token)
            token += 4
        if n_tokens - token >= 2:
            _products(TWO, arguments, frame, token)
            token += 2
        if n_tokens - token >= 1:
            _products(ONE, arguments, frame, token)
        if reads_all:
            _give_out_all(arguments, frame, first + at, min(count - at, TILE))
        else:
            _give_out(arguments, frame, rows + 8 * at, min(count - at, TILE))


NEURONS = Chunk(_neurons)


@compiled(nogil=True)
def _compute(
    x: Any, scores: Any, skips: Any, out: Any, arguments: Any, workspace: Any, functions: Any, shared: int
) -> None:
    """Pass after pass; `arguments` comes with the matrix's part filled."""
    arguments[SCORES], arguments[OUTPUT], arguments[MAY_SKIP] = scores.ctypes.data, out.ctypes.data, skips.ctypes.data
    place_codes(arguments, workspace.ctypes.data, min(PASS_TOKENS, out.shape[0]))
    n_units, n_neurons, size = arguments[N_UNITS], arguments[N_NEURONS], arguments[NEURONS_A_CHUNK]
    for first in range(0, out.shape[0], PASS_TOKENS):
        n_tokens = min(PASS_TOKENS, out.shape[0] - first)
        arguments[INPUT] = x.ctypes.data + 4 * first * UNIT_COLUMNS * n_units
        arguments[FIRST_TOKEN], arguments[N_TOKENS] = first, n_tokens
        arguments[READS_ALL] = not skips[first : first + n_tokens].all()
        is_small = n_neurons * UNIT_BYTES * n_units * n_tokens < MIN_SHARED_BYTES
        lead(0, functions[0], arguments.ctypes.data, 1)
        lead(0 if is_small else shared, functions[1], arguments.ctypes.data, (n_neurons + size - 1) // size)


class MaskedLinear:
    """The operation with its compiled functions, made at first use. May be called from several threads."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._functions: Any = None

    def __call__(self, x: Any, scores: Any, rows: RowMatrix, bias: Any = None, may_skip: Any = None) -> Any:
        """x fp32 (m, K), scores fp32 (m, N), bias fp32 (N,) or None, may_skip bool (m,), contiguous -> fp32 (m, N).

        Without may_skip no token may skip, and scores are not read and may be None. Raises ValueError where shapes
        don't fit.
        """
        m = _check(x, scores, rows, bias, may_skip)
        skips = np.zeros(m, np.int64) if may_skip is None else may_skip.astype(np.int64)
        out = np.empty((m, rows.n_rows), np.float32)
        arguments = np.zeros(N_ARGUMENTS, np.int64)
        arguments[FIRST : FIRST + 5] = rows.words
        arguments[[N_NEURONS, N_UNITS, OFFSET_BYTES]] = rows.n_rows, rows.n_units, offset_bytes()
        arguments[NEURONS_A_CHUNK] = size = -(-rows.n_rows // (CHUNKS_A_THREAD * self._pool.n_threads * TILE)) * TILE
        arguments[BIAS] = 0 if bias is None else bias.ctypes.data
        n_bytes, n_listed = workspace_bytes(rows.n_units, min(m, PASS_TOKENS)), -(-rows.n_rows // size) * size
        workspace = np.empty(n_bytes + 8 * n_listed, np.uint8)
        arguments[LISTS] = workspace.ctypes.data + n_bytes
        functions = self._functions or self.compile()
        shared = self._pool.enter()
        try:
            x, scores = whole_units(x, rows.n_units), out if scores is None else scores
            _compute(x, scores, skips, out, arguments, workspace, functions, shared)
        finally:
            self._pool.leave(shared)
        return out

    def compile(self) -> tuple[int, int]:
        """Addresses of the chunk functions."""
        self._functions = QUANTIZE.address, NEURONS.address
        return self._functions


def _check(x: Any, scores: Any, rows: RowMatrix, bias: Any, may_skip: Any) -> int:
    """The number of tokens. Raises ValueError where an operand doesn't fit."""
    if x.ndim != 2:
        raise ValueError(f"activations are {x.dtype} {x.shape}, expected contiguous float32 (m, {rows.n_columns}).")
    m = int(x.shape[0])
    for name, value, kind, shape in (
        ("activations are", x, np.float32, (m, rows.n_columns)),
        ("scores are", scores, np.float32, (m, rows.n_rows)),
        ("bias is", bias, np.float32, (rows.n_rows,)),
        ("may_skip is", may_skip, np.bool_, (m,)),
    ):
        is_left_out = value is None and (name != "scores are" or may_skip is None)
        if not is_left_out and not _is(value, kind, shape):
            given = None if value is None else f"{value.dtype} {value.shape}"
            raise ValueError(f"{name} {given}, expected contiguous {np.dtype(kind)} {shape}.")
    return m


def _is(value: Any, kind: Any, shape: tuple[int, ...]) -> bool:
    return value is not None and value.dtype == kind and value.shape == shape and bool(value.flags.c_contiguous)
