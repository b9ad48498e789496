"""Sparsity curves: quantiles of neuron scores, the error of skipping neurons, and comparisons with the dense model.

A neuron's score is |activation| times the norm of its row of down: its largest contribution to the FFN's sum per unit
of up (CATS, arXiv 2404.08763, with the norm of WINA, arXiv 2505.19427). A neuron whose activation is 0 contributes
nothing, so a threshold of 0 changes no output.

On disk the curves are a record next to the store, with the fp32 arrays "thresholds" and "errors".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.models.blocks import Block, least_activations, neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.record import RecordArrays, RecordKind

SHARE_STEP = 0.05
SHARES = tuple(round(step * SHARE_STEP, 2) for step in range(20))  # shares of a layer's neurons
MAX_KL_NATS = 0.005  # bound of `auto`: about the loss by int4 (docs/quality.md)
MAX_BYTES = 2**20
WAY_OUT = "run hetero-ee calibrate --sparsity auto"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Score thresholds per layer, fp32, below which neurons are skipped. target: the share of all neurons to skip."""

    target: float
    per_layer: tuple[float, ...]

    def least(self, spec: ModelSpec, weights: ModelWeights) -> dict[str, Tensor]:
        """Return for each neuron the |activation| below which it is skipped, fp32 (ffn,).

        The names are those of `least_activations` in each block, under which executors look them up in a model's
        vectors.
        """
        smallest = torch.finfo(torch.float32).tiny
        return {
            least_activations(block): threshold / down_norms(block, weights).clamp(min=smallest)
            for block, threshold in zip(neuron_blocks(spec), self.per_layer, strict=True)
        }


def down_norms(block: Block, weights: ModelWeights) -> Tensor:
    """Return the L2 norm of each row of a neuron-major FFN's down matrix, fp32 (ffn,)."""
    norms: Tensor = torch.linalg.vector_norm(weights.matrices[block.tensors["down"].name].dequantize(), dim=1)
    return norms


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one target share on held-out text."""

    target: float
    share: float  # share of neurons skipped, including those that are 0
    kl_nats: float  # mean KL divergence of the next-token distribution, dense to sparse

    def __post_init__(self) -> None:
        if not (0 < self.target <= SHARES[-1] and 0 <= self.share <= 1 and 0 <= self.kl_nats < math.inf):
            raise ValueError(f"it measures {self.share} left out and {self.kl_nats} nats at {self.target}")


@dataclass(frozen=True, slots=True, eq=False)
class SparsityCurves:
    """Thresholds and errors by the share of neurons skipped, fp32 (n_layers, n_shares). The shares are SHARES.

    An error is the squared norm of what skipping takes from the FFN's sum, relative to that of the residual stream
    after the FFN, averaged over tokens.
    """

    thresholds: NDArray[np.float32]
    errors: NDArray[np.float32]
    measured: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        for name in ("thresholds", "errors"):
            values = getattr(self, name)
            if values.dtype != np.float32 or values.ndim != 2 or values.shape[1] != len(SHARES):
                raise ValueError(f"its {name} have another type or shape")
            if not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(f"its {name} have a value that is negative or not finite")
        if len(self.thresholds) != len(self.errors) or (np.diff(self.thresholds, axis=1) < 0).any():
            raise ValueError("its thresholds don't ascend, or have other layers than its errors")

    @property
    def active_share(self) -> float:
        """Share of neurons that are not 0, rounded up to a step of SHARES, and at least 1 minus the last of SHARES."""
        n_zero = np.maximum(1, (self.thresholds == 0).sum(axis=1))
        return 1 - float(np.mean(np.array(SHARES)[n_zero - 1]))

    def at(self, target: float) -> Thresholds:
        """Return thresholds that skip this share of neurons, above 0 up to the last of SHARES, distributed over the
        layers."""
        shares = dealt_shares(self.errors, target)
        between = (np.interp(share, SHARES, row) for share, row in zip(shares, self.thresholds, strict=True))
        return Thresholds(target, tuple(float(np.float32(threshold)) for threshold in between))

    def auto(self, max_kl_nats: float = MAX_KL_NATS) -> Thresholds:
        """Return the thresholds of the largest target within the bound. Raises: UsageError: if no target is."""
        within = [each.target for each in self.measured if each.kl_nats <= max_kl_nats]
        if not within:
            raise UsageError(
                f"no share of neurons can be left out of this model within {max_kl_nats} nats of KL divergence; "
                "give one with --sparsity."
            )
        return self.at(max(within))


def largest_within(measure: Callable[[float], Measurement], max_kl_nats: float = MAX_KL_NATS) -> list[Measurement]:
    """Find the largest target share of SHARES within the bound by bisection, and return all measurements."""
    found, low, high = [], 0, len(SHARES)
    while high - low > 1:
        middle = (low + high) // 2
        found.append(measure(SHARES[middle]))
        low, high = (middle, high) if found[-1].kl_nats <= max_kl_nats else (low, middle)
    return found


def dealt_shares(errors: NDArray[np.float32], target: float) -> NDArray[np.float64]:
    """Distribute a target share over the layers, never worse than the same share in every layer.

    The distribution is greedy: each step goes to the layer where it adds the least error, as TEAL (arXiv 2408.14690)
    does within a block.

    Args:
        errors: Each layer's errors at SHARES, (n_layers, n_shares).
        target: 0 to the last of SHARES.

    Returns: Each layer's share, (n_layers,), with the target as their mean.
    """
    n_layers = len(errors)
    steps = np.zeros(n_layers, np.int64)
    added = np.diff(errors.astype(np.float64), axis=1, append=np.inf)
    n_whole, rest = divmod(round(target * n_layers / SHARE_STEP, 6), 1)
    for _ in range(int(n_whole)):
        steps[np.argmin(added[np.arange(n_layers), steps])] += 1
    shares: NDArray[np.float64] = steps.astype(np.float64) * SHARE_STEP
    if rest:
        shares[np.argmin(added[np.arange(n_layers), steps])] += rest * SHARE_STEP
    uniform = np.full(n_layers, target)
    return shares if total_error(errors, shares) <= total_error(errors, uniform) else uniform


def total_error(errors: NDArray[np.float32], shares: NDArray[np.float64]) -> float:
    """Return the sum of all layers' errors at their shares, interpolated linearly between SHARES."""
    return float(sum(np.interp(share, SHARES, row) for share, row in zip(shares, errors, strict=True)))


@dataclass(frozen=True, slots=True)
class SparsityHeader:
    """Sparsity curves without their arrays. `text` describes the calibration text for people."""

    text: str
    measured: tuple[Measurement, ...]


SPARSITY = RecordKind(SparsityHeader, "calibration of sparsity", 1, WAY_OUT)


def write_sparsity(curves: SparsityCurves, key: str, text: str, file: Path, files: FileSystem | None = None) -> None:
    """Write the curves for weights with this key, completely or not at all. Raises: StoreError, DiskFullError."""
    arrays = {"thresholds": curves.thresholds, "errors": curves.errors}
    SPARSITY.write(file, key, SparsityHeader(text, curves.measured), arrays, files)


def read_sparsity(file: Path, spec: ModelSpec, key: str) -> SparsityCurves | None:
    """Return the curves in `file`, None if it does not exist. Raises: StoreError: see RecordKind.read."""

    def make(header: SparsityHeader, arrays: RecordArrays) -> SparsityCurves | None:
        thresholds, errors = (arrays.take(name, np.float32) for name in ("thresholds", "errors"))
        curves = SparsityCurves(thresholds, errors, header.measured)
        return curves if len(thresholds) == spec.n_layers else None

    return SPARSITY.read(file, key, MAX_BYTES, make)
