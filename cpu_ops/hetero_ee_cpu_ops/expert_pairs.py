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


@entry(types.int64(array_in(types.float32, 2), types.int64, array_out(types.int64, 1), array_out(types.int64, 2)))
def _count(routes: Any, start: int, counts: Any, places: Any) -> int:
    """Write how many tokens have chosen each expert, and each choice's expert or -1 to `places`. Return the sum."""
    m, n_active = places.shape
    n = 0
    for token in range(m):
        for choice in range(n_active):
            expert = int(routes[token, choice]) - start
            places[token, choice] = -1
            if 0 <= expert < len(counts):
                counts[expert] += 1
                places[token, choice] = expert
                n += 1
    return n


@entry(types.int64(array_out(types.int64, 1), array_out(types.int64, 2), array_out(types.int64, 1)))
def _place(nexts: Any, places: Any, rows: Any) -> int:
    """Replace each choice's expert by its pair, and write each pair's token. nexts: each expert's first pair."""
    m, n_active = places.shape
    for token in range(m):
        for choice in range(n_active):
            expert = places[token, choice]
            if expert >= 0:
                pair = nexts[expert]
                places[token, choice] = pair
                rows[pair] = token
                nexts[expert] = pair + 1
    return 0


def pairs_of(routes: Any, start: int, n_experts: int) -> Pairs:
    """Return the pairs of n_experts experts from index `start` on.

    Args:
        routes: contiguous fp32 (m, 2 n_active), indices of experts and then their weights.
    """
    counts, places = np.zeros(n_experts, np.int64), np.empty((len(routes), routes.shape[1] // 2), np.int64)
    rows = np.empty(_count(routes, start, counts, places), np.int64)
    ends = counts.cumsum()
    nexts = ends - counts
    experts = np.flatnonzero(counts)
    starts = np.append(nexts[experts], len(rows))
    _place(nexts, places, rows)
    return Pairs(experts, starts, rows, places)


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


def add_outputs(outputs: Any, routes: Any, pairs: Pairs, sums: Any, pool: ThreadPool) -> Any:
    """Return each token's weighted sum of outputs, added to `sums` unless None, fp32 (m, width).

    Args:
        outputs: contiguous fp32 (n_pairs, width), width a multiple of 16.
        routes: as for pairs_of.
        sums: contiguous fp32 (m, width).

    Raises:
        ValueError: if shapes do not fit.
    """
    (m, n_chosen), (n_pairs, width) = pairs.places.shape, outputs.shape
    if n_pairs != len(pairs.rows) or width % 16 or routes.shape != (m, 2 * n_chosen):
        raise ValueError(f"Outputs {outputs.shape} and routes {routes.shape} do not fit {len(pairs.rows)} pairs.")
    if sums is not None and (sums.shape != (m, width) or not sums.flags.c_contiguous):
        raise ValueError(f"Sums {sums.shape} do not fit {m} tokens of {width} features.")
    out = np.empty((m, width), np.float32)
    addresses = [0 if each is None else each.ctypes.data for each in (routes, pairs.places, outputs, sums, out)]
    per_chunk = SHARED_TOKENS if outputs.size >= MIN_SHARED_VALUES else m
    arguments = np.array([width, m, n_chosen, per_chunk, *addresses], np.int64)
    pool.run(ADD_CHUNK.address, arguments, -(-m // per_chunk))
    return out
