"""Group a batch's choices of experts by expert, and sum the weighted outputs of each token's experts.

A pair is a token and an expert that it has chosen. Pairs are in order of their experts, those of one expert in order of
their tokens. A token's outputs are added in fp32 one after the other, in the order of its choices, each product rounded
before it is added: the bits depend on neither the batch nor the threads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import lead
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import add, load16, multiply, read_float, spread, store16

F32 = np.float32(0)  # type of a loaded value
SHARED_TOKENS = 4  # tokens whose outputs a thread adds at a time
MIN_SHARED_VALUES = 2**17  # outputs to add; the caller adds fewer itself, in about 10 us
WIDTH, N_TOKENS, N_CHOSEN, PER_CHUNK, ROUTES, PLACES, OUTPUTS, SUMS, OUT = range(9)  # indices in the argument array


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a batch whose experts one device has."""

    experts: Any  # int64 (n,): those chosen by any token, ascending, counted from the device's first one
    starts: Any  # int64 (n + 1,): first pair of each
    rows: Any  # int64 (n_pairs,): token of each pair
    places: Any  # int64 (m, n_active): pair of each choice, -1 if another device has the expert


@inner
def group_pairs(routes: Any, start: int, nexts: Any, experts: Any, starts: Any, rows: Any, places: Any) -> int:
    """Write the parts of Pairs, and return the number of chosen experts.

    Args:
        routes, start: see pairs_of.
        nexts: room for a number per expert.
    """
    m, n_active = places.shape
    nexts[:] = 0
    for token in range(m):
        for choice in range(n_active):
            expert = int(routes[token, choice]) - start
            if 0 <= expert < len(nexts):
                nexts[expert] += 1
    n, n_pairs = 0, 0
    for expert in range(len(nexts)):
        count = nexts[expert]
        nexts[expert] = n_pairs
        if count:
            experts[n], starts[n] = expert, n_pairs
            n, n_pairs = n + 1, n_pairs + count
    starts[n] = n_pairs
    for token in range(m):
        for choice in range(n_active):
            expert = int(routes[token, choice]) - start
            places[token, choice] = -1
            if 0 <= expert < len(nexts):
                pair = nexts[expert]
                places[token, choice], rows[pair], nexts[expert] = pair, token, pair + 1
    return n


@entry(
    types.int64(
        array_in(types.float32, 2), types.int64, array_out(types.int64, 1), array_out(types.int64, 1),
        array_out(types.int64, 1), array_out(types.int64, 1), array_out(types.int64, 2),
    )
)  # fmt: skip
def _group(routes: Any, start: int, nexts: Any, experts: Any, starts: Any, rows: Any, places: Any) -> int:
    return group_pairs(routes, start, nexts, experts, starts, rows, places)


def pairs_of(routes: Any, start: int, n_experts: int) -> Pairs:
    """Return the pairs of n_experts experts from index `start` on.

    Args:
        routes: contiguous fp32 (m, 2 n_active), indices of experts and then their weights.
    """
    m, n_active = len(routes), routes.shape[1] // 2
    most = min(m * n_active, n_experts)
    nexts, experts, starts = np.empty(n_experts, np.int64), np.empty(most, np.int64), np.empty(most + 1, np.int64)
    rows, places = np.empty(m * n_active, np.int64), np.empty((m, n_active), np.int64)
    n = _group(routes, start, nexts, experts, starts, rows, places)
    return Pairs(experts[:n], starts[: n + 1], rows[: starts[n]], places)


def _add_chunk(arguments: int, index: int) -> None:
    width, n_chosen, base = word(arguments, WIDTH), word(arguments, N_CHOSEN), word(arguments, SUMS)
    first = index * word(arguments, PER_CHUNK)
    for token in range(first, min(first + word(arguments, PER_CHUNK), word(arguments, N_TOKENS))):
        places = word(arguments, PLACES) + 8 * n_chosen * token
        weights = word(arguments, ROUTES) + 4 * n_chosen * (2 * token + 1)
        at = 4 * width * token
        for i in range(0, 4 * width, 64):
            total = load16(base + at + i, F32) if base else spread(F32)
            for choice in range(n_chosen):
                pair = word(places, choice)
                if pair >= 0:
                    output = load16(word(arguments, OUTPUTS) + 4 * width * pair + i, F32)
                    total = add(total, multiply(output, spread(read_float(weights + 4 * choice))))
            store16(total, word(arguments, OUT) + at + i)


ADD_CHUNK = Chunk(_add_chunk)


@inner
def add_outputs(outputs: Any, routes: Any, places: Any, sums: Any, out: Any, add_chunk: int, shared: int) -> None:
    """Write each token's weighted sum of outputs, added to `sums` unless it is empty.

    Args:
        outputs: fp32 (n_pairs, width), width a multiple of 16.
        routes: as for pairs_of.
        places: pair of each choice, see Pairs.
        sums, out: fp32 (m, width).
        add_chunk: address of ADD_CHUNK.
        shared: see lead().
    """
    (m, width), n_chosen, arguments = out.shape, places.shape[1], np.empty(9, np.int64)
    is_large = m * n_chosen * width >= MIN_SHARED_VALUES
    per_chunk = SHARED_TOKENS if is_large else m
    arguments[WIDTH], arguments[N_TOKENS], arguments[N_CHOSEN], arguments[PER_CHUNK] = width, m, n_chosen, per_chunk
    arguments[ROUTES], arguments[PLACES] = routes.ctypes.data, places.ctypes.data
    arguments[OUTPUTS], arguments[OUT] = outputs.ctypes.data, out.ctypes.data
    arguments[SUMS] = sums.ctypes.data if sums.size else 0
    lead(shared if is_large else 0, add_chunk, arguments.ctypes.data, (m + per_chunk - 1) // per_chunk)
