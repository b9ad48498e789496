"""Group a batch's choices of experts by expert, and sum the weighted outputs of each token's experts.

A pair is a token and an expert that it has chosen. Pairs are in order of their experts, those of one expert in order of
their tokens. A token's outputs are added in fp32 one after the other, in the order of its choices, each product rounded
before it is added: the bits depend on neither the batch nor the threads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.jit.lazy import Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import add, load16, multiply, read_float, spread, store16

F32, NO_SUMS = np.float32(0), np.zeros((0, 0), np.float32)  # type of a loaded value; stands for None
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


@entry(
    types.int64(
        array_in(types.float32, 2), types.int64, array_out(types.int64, 1), array_out(types.int64, 1),
        array_out(types.int64, 1), array_out(types.int64, 1), array_out(types.int64, 2),
    )
)  # fmt: skip
def _group(routes: Any, start: int, nexts: Any, experts: Any, starts: Any, rows: Any, places: Any) -> int:
    """Write the parts of Pairs, and return the number of chosen experts. nexts: room for a number per expert."""
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


@entry(
    types.int64(
        array_in(types.float32, 2), array_in(types.float32, 2), array_in(types.int64, 2), array_in(types.float32, 2),
        array_out(types.float32, 2), array_out(types.int64, 1),
    )
)  # fmt: skip
def _describe(outputs: Any, routes: Any, places: Any, sums: Any, out: Any, arguments: Any) -> int:
    """Write the arguments of ADD_CHUNK, and return the number of chunks; -1 if a shape does not fit."""
    m, width = out.shape
    n_chosen = places.shape[1]
    if width % 16 or routes.shape != (m, 2 * n_chosen) or (sums.size and sums.shape != out.shape):
        return -1
    per_chunk = SHARED_TOKENS if outputs.size >= MIN_SHARED_VALUES else max(1, m)
    arguments[WIDTH], arguments[N_TOKENS], arguments[N_CHOSEN], arguments[PER_CHUNK] = width, m, n_chosen, per_chunk
    arguments[ROUTES], arguments[PLACES] = routes.ctypes.data, places.ctypes.data
    arguments[OUTPUTS], arguments[OUT] = outputs.ctypes.data, out.ctypes.data
    arguments[SUMS] = sums.ctypes.data if sums.size else 0
    return -(-m // per_chunk)


def add_outputs(outputs: Any, routes: Any, pairs: Pairs, sums: Any, pool: ThreadPool) -> Any:
    """Return each token's weighted sum of outputs, added to `sums` unless None, fp32 (m, width).

    Args:
        outputs: contiguous fp32 (n_pairs, width), width a multiple of 16.
        routes: as for pairs_of.
        sums: contiguous fp32 (m, width).

    Raises:
        ValueError: if shapes do not fit.
    """
    out, arguments = np.empty((len(pairs.places), outputs.shape[1]), np.float32), np.empty(9, np.int64)
    before = NO_SUMS if sums is None else sums
    n_chunks = _describe(outputs, routes, pairs.places, before, out, arguments)
    if n_chunks < 0 or len(outputs) != len(pairs.rows):
        shapes = f"Outputs {outputs.shape}, routes {routes.shape} and sums {before.shape}"
        raise ValueError(f"{shapes} do not fit {len(pairs.rows)} pairs.")
    pool.run(ADD_CHUNK.address, arguments, n_chunks)
    return out
