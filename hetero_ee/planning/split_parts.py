"""The FFNs of a problem as they may be split, and the problem with some of them split."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hetero_ee.models.blocks import BlockKind
from hetero_ee.planning.neuron_split import SplitTimes
from hetero_ee.planning.parts import Part, Split
from hetero_ee.planning.placement import PartOptions
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.times.memory import rounded


def split_times(problem: Problem, options: Sequence[PartOptions]) -> dict[int, SplitTimes]:
    """What splitting takes of each FFN whose place is left open, by its index among the parts of layers."""
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
        active_share = min(1.0, float(neurons.active_behind(part.layer)[n]) / (n_neurons - gpu_neurons))
        parts[index + 1] = replace(part, split=Split(gpu_neurons, n_neurons, active_share))
    return replace(problem, parts=tuple(parts))


def _times(problem: Problem, part: Part, known_bytes: dict[int, Any]) -> SplitTimes:
    """Of 0 to all but one of its blocks."""
    neurons, costs = problem.statistics.neurons, problem.costs
    assert neurons is not None and part.layer is not None
    _, n_neurons = neurons.shape
    sizes = np.arange(0, n_neurons, neurons.block_neurons)
    active_shares = neurons.active_behind(part.layer)[:-1] / (n_neurons - sizes)
    nothing, everything = costs.split_s(part, 0.0, 1.0, 1), costs.split_s(part, 1.0, 1.0, 1)
    gpu_shares = sizes / n_neurons
    gpu_s = nothing[0] + (everything[0] - nothing[0]) * gpu_shares
    cpu_s = everything[1] + (nothing[1] - everything[1]) * (1 - gpu_shares) * active_shares
    seconds = np.maximum(gpu_s, cpu_s) + 2 * costs.transfer_s(1)
    if part.shape not in known_bytes:
        known_bytes[part.shape] = np.array([rounded(part.bytes_of_neurons(int(size))) for size in sizes])
    return SplitTimes(seconds * problem.survival(part), known_bytes[part.shape])
