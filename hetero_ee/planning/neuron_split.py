"""FFNs in two: the neurons that are most often active on the GPU, the others on the CPU, both computing at once.

Each FFN may lie on the GPU, on the CPU, or be split after some of its blocks of neurons, the most often active first.
A dynamic programme chooses between these with some sizes of the GPU's share for each FFN; then the blocks of all FFNs
that it splits are dealt out again, by time saved a byte, and one block at a time changes device while that saves time.
What a byte saves in the end names better sizes, with which all this is done once more.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero_ee.models.blocks import BlockKind
from hetero_ee.planning.parts import Part, Split
from hetero_ee.planning.placement import Option, PartOptions, chain_bytes, chain_s, place_chain
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.times.costs import SPLIT
from hetero_ee.planning.times.memory import rounded

SIZES_IN_ALL = 768  # of the GPU's share that the dynamic programme knows, of all FFNs together
FEWEST_SIZES = 12  # of one FFN
NEAR_BLOCKS = 3  # so many more and fewer than a good size it knows when it runs again
N_RUNS = 2


@dataclass(frozen=True, slots=True)
class SplitTimes:
    """For 0, 1, ... blocks of neurons on the GPU: seconds, transfers included, and bytes of GPU memory.

    Of 0 blocks neither counts, since nothing is split then. More blocks never take fewer bytes and save ever less.
    """

    seconds: Any
    gpu_bytes: Any

    @property
    def most_blocks(self) -> int:
        """More are no faster."""
        return 1 + int(np.argmin(self.seconds[1:]))


@dataclass(frozen=True, slots=True)
class SplitChain:
    """A chain's placements and what it takes."""

    seconds: float
    placements: tuple[str, ...]
    n_blocks: Mapping[int, int]  # on the GPU, of each part that is split


def split_times(problem: Problem, options: Sequence[PartOptions]) -> dict[int, SplitTimes]:
    """What splitting takes of each FFN whose placement is left open, by its index among the parts of layers."""
    if problem.statistics.neurons is None or not problem.has_gpu:
        return {}
    gpu_bytes: dict[int, Any] = {}  # alike for parts of one shape
    return {
        index: _times(problem, part, gpu_bytes)
        for index, (part, allowed) in enumerate(zip(problem.layers, options, strict=True))
        if part.kind is BlockKind.FFN and {"gpu", "cpu"} <= allowed.keys()
    }


def with_splits(problem: Problem, n_blocks: Mapping[int, int]) -> Problem:
    """The problem with these parts of layers split after so many blocks."""
    neurons = problem.statistics.neurons
    assert neurons is not None
    _, n_neurons = neurons.shape
    parts = list(problem.parts)
    for index, n in n_blocks.items():
        part = problem.layers[index]
        assert part.layer is not None
        gpu_neurons = n * neurons.block_neurons
        active_share = min(1.0, float(neurons.active_after(part.layer)[n]) / (n_neurons - gpu_neurons))
        parts[index + 1] = replace(part, split=Split(gpu_neurons, n_neurons, active_share))
    return replace(problem, parts=tuple(parts))


def _times(problem: Problem, part: Part, known_bytes: dict[int, Any]) -> SplitTimes:
    """Of 0 to all but one of its blocks."""
    neurons, costs = problem.statistics.neurons, problem.costs
    assert neurons is not None and part.layer is not None
    _, n_neurons = neurons.shape
    sizes = np.arange(0, n_neurons, neurons.block_neurons)
    active_shares = neurons.active_after(part.layer)[:-1] / (n_neurons - sizes)
    on_cpu, half, on_gpu = (costs.split_s(part, share, 1.0, 1) for share in (0.0, 0.5, 1.0))
    gpu_shares = sizes / n_neurons
    gpu_s = _seconds(gpu_shares, on_cpu[0], half[0], on_gpu[0])
    cpu_s = _seconds((1 - gpu_shares) * active_shares, on_gpu[1], half[1], on_cpu[1])
    seconds = np.maximum(gpu_s, cpu_s) + 2 * costs.transfer_s(1)
    if part.shape not in known_bytes:
        known_bytes[part.shape] = np.array([rounded(part.bytes_of_neurons(int(size))) for size in sizes])
    return SplitTimes(seconds, known_bytes[part.shape])


def _seconds(shares: Any, nothing_s: float, half_s: float, all_s: float) -> Any:
    """What these shares of an FFN's neurons take on a device: linear, but of no neurons, where there are no calls."""
    return np.where(shares > 0, all_s - 2 * (all_s - half_s) * (1 - shares), nothing_s)


def place_split_chain(
    parts: Sequence[PartOptions],
    splits: Mapping[int, SplitTimes],
    budget_bytes: int,
    transfer_s: float,
    *,
    ends_on_gpu: bool,
) -> SplitChain | None:
    """As place_chain, with the parts in `splits`, by index, split where that is faster; None where nothing fits."""
    # In the allocator's pieces, where there are few enough for the programme, no size is rounded up.
    sizes_bytes = [o.gpu_bytes for part in parts for o in part.values()]
    piece = math.gcd(*sizes_bytes, *(int(n) for times in splits.values() for n in times.gpu_bytes)) or 1
    parts = [{p: replace(o, gpu_bytes=o.gpu_bytes // piece) for p, o in part.items()} for part in parts]
    splits = {index: SplitTimes(times.seconds, times.gpu_bytes // piece) for index, times in splits.items()}
    chains: list[SplitChain] = []
    near: dict[int, int] = {}
    n_sizes = max(FEWEST_SIZES, SIZES_IN_ALL // max(1, len(splits)))  # of few FFNs each one's size matters more
    for _ in range(N_RUNS):
        sizes = {index: _sizes(times, n_sizes, near.get(index)) for index, times in splits.items()}
        chain = _placed(parts, splits, sizes, budget_bytes // piece, transfer_s, ends_on_gpu)
        if chain is None:
            return None
        chains.append(chain)
        near = _worth_as_much(splits, chain.n_blocks)
    return min(chains, key=lambda each: each.seconds)


def _placed(
    parts: Sequence[PartOptions],
    splits: Mapping[int, SplitTimes],
    sizes: Mapping[int, Sequence[int]],
    budget_bytes: int,
    transfer_s: float,
    ends_on_gpu: bool,
) -> SplitChain | None:
    """With these sizes to choose from."""
    named = {index: {f"split {n}": n for n in each} for index, each in sizes.items()}
    options = [
        {**part, **{name: _option(splits[index], n) for name, n in named.get(index, {}).items()}}
        for index, part in enumerate(parts)
    ]
    chain = place_chain(options, budget_bytes, transfer_s, ends_on_gpu=ends_on_gpu)
    if chain is None:
        return None
    found = {index: names[chain[index]] for index, names in named.items() if chain[index] in names}
    whole = [index for index in range(len(parts)) if index not in found]
    left = budget_bytes - chain_bytes([parts[index] for index in whole], [chain[index] for index in whole])
    n_blocks = deal_blocks({index: splits[index] for index in found}, found, left)
    seconds = chain_s(options, chain, transfer_s, ends_on_gpu=ends_on_gpu)
    seconds += sum(float(splits[i].seconds[n_blocks[i]] - splits[i].seconds[n]) for i, n in found.items())
    return SplitChain(
        seconds, tuple(SPLIT if i in n_blocks else placement for i, placement in enumerate(chain)), n_blocks
    )


def deal_blocks(splits: Mapping[int, SplitTimes], found: Mapping[int, int], budget_bytes: int) -> dict[int, int]:
    """Blocks of each split FFN, within the budget; in no case slower than those `found`, which keep it."""
    dealt = _by_density(splits, budget_bytes)
    best = min((dealt, dict(found)), key=lambda each: sum(splits[index].seconds[n] for index, n in each.items()))
    return _swapped(splits, best, budget_bytes)


def _sizes(times: SplitTimes, n_sizes: int, near: int | None) -> list[int]:
    """Some from 1 to the most, even in blocks and even in time, and those near to `near`."""
    most = times.most_blocks
    seconds = times.seconds[1 : most + 1]
    even_s = np.searchsorted(-seconds, -np.linspace(seconds[0], seconds[-1], n_sizes)) + 1
    found = {round(n) for n in np.linspace(1, most, n_sizes)} | {min(most, int(n)) for n in even_s}
    if near is not None:
        found |= set(range(max(1, near - NEAR_BLOCKS), min(most, near + NEAR_BLOCKS) + 1))
    return sorted(found)


def _worth_as_much(splits: Mapping[int, SplitTimes], n_blocks: Mapping[int, int]) -> dict[int, int]:
    """For every FFN the blocks that save as much a byte as those that one of the split FFNs goes without."""
    nexts = [_density(splits[index])[n] for index, n in n_blocks.items()]
    return (
        {index: 1 + int(np.sum(_density(times)[1:] > max(nexts))) for index, times in splits.items()} if nexts else {}
    )


def _density(times: SplitTimes) -> Any:
    """Seconds that the block after 0, 1, ... others saves a byte, 0 where it saves none.

    A block's bytes are those of an average one: the allocator's rounding would favour blocks that happen to be free.
    """
    block_bytes = float(times.gpu_bytes[-1]) / (len(times.gpu_bytes) - 1)
    return np.append(np.maximum(-np.diff(times.seconds), 0.0), 0.0) / block_bytes


def _option(times: SplitTimes, n_blocks: int) -> Option:
    return Option(float(times.seconds[n_blocks]), int(times.gpu_bytes[n_blocks]), on_gpu=None)


def _by_density(splits: Mapping[int, SplitTimes], budget_bytes: int) -> dict[int, int]:
    """One block each, then block for block where it saves the most time a byte, while it fits."""
    n_blocks = dict.fromkeys(splits, 1)
    left = budget_bytes - sum(int(times.gpu_bytes[1]) for times in splits.values())
    densities = {index: _density(times) for index, times in splits.items()}
    waiting = [(-densities[index][1], index) for index in splits]
    heapq.heapify(waiting)
    while waiting:
        saved, index = heapq.heappop(waiting)
        n, taken_bytes = n_blocks[index], splits[index].gpu_bytes
        if not saved or taken_bytes[n + 1] - taken_bytes[n] > left:
            continue
        left -= int(taken_bytes[n + 1] - taken_bytes[n])
        n_blocks[index] = n + 1
        heapq.heappush(waiting, (-densities[index][n + 1], index))
    return n_blocks


def _swapped(splits: Mapping[int, SplitTimes], n_blocks: dict[int, int], budget_bytes: int) -> dict[int, int]:
    """Gives one FFN a block more, and where needed takes another's last one, the best such pair first."""
    indices = list(splits)
    counts = np.array([n_blocks[index] for index in indices])
    while len(indices):
        more, less = (_change(splits, indices, counts, step) for step in (1, -1))
        left = budget_bytes - sum(int(splits[i].gpu_bytes[n]) for i, n in zip(indices, counts, strict=True))
        # The last row takes nothing away.
        seconds = np.append(less[0], 0.0)[:, None] + more[0][None, :]
        n_bytes = np.append(less[1], 0.0)[:, None] + more[1][None, :]
        seconds[(n_bytes > left) | (np.eye(*seconds.shape) > 0)] = np.inf
        loser, winner = np.unravel_index(int(np.argmin(seconds)), seconds.shape)
        if not seconds[loser, winner] < 0:
            break
        counts[winner] += 1
        if loser < len(indices):
            counts[loser] -= 1
    return {index: int(n) for index, n in zip(indices, counts, strict=True)}


def _change(splits: Mapping[int, SplitTimes], indices: Sequence[int], counts: Any, step: int) -> tuple[Any, Any]:
    """Seconds and bytes that one block more or less makes; infinite seconds where there is none."""
    seconds, n_bytes = np.full(len(indices), np.inf), np.zeros(len(indices))
    for position, (index, n) in enumerate(zip(indices, counts, strict=True)):
        times = splits[index]
        if 1 <= n + step <= times.most_blocks:
            seconds[position] = times.seconds[n + step] - times.seconds[n]
            n_bytes[position] = times.gpu_bytes[n + step] - times.gpu_bytes[n]
    return seconds, n_bytes
