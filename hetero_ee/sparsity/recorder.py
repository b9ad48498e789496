"""Operations that record neuron-major FFNs: the distribution of neuron scores, and the error of skipping low scores.

A neuron's score is |activation| times the norm of its row of down (see `curves.py`).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.kv.batch import FIRST_SPARSE
from hetero_ee.models.blocks import neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import Weight

Scores = Callable[[int, Tensor], Tensor]  # maps a layer's activations (m, ffn) to scores of at least 0
N_BINS = 2**15  # by the upper 16 bits of a positive fp32: 128 for each power of two


class FfnRecorder(BatchedTorchOps):
    """Operations that call `watch` with each FFN's layer and operands. Each executor needs its own instance."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        blocks = neuron_blocks(spec)
        self._layers = {id(weights.matrices[block.tensors["down"].name]): block.layer or 0 for block in blocks}

    def neurons(self, x: Tensor, active: Tensor, up: Weight | None, down: Weight) -> Tensor:
        inner = active if up is None else active * self.product(x, up)
        rows = down.dequantize()
        self.watch(self._layers[id(down)], active, inner, rows)
        return inner @ rows

    def watch(self, layer: int, active: Tensor, inner: Tensor, rows: Tensor) -> None:
        """Record one FFN. Shapes: active, inner (m, ffn); rows (ffn, hidden). The FFN's output is inner @ rows."""


class ScoreRecorder(FfnRecorder):
    """Histogram of scores, int64 (n_layers, N_BINS), without first tokens. Each pass must be one whole chunk."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, scores: Scores) -> None:
        super().__init__(spec, weights)
        self._scores = scores
        self.counts = np.zeros((spec.n_layers, N_BINS), np.int64)

    def watch(self, layer: int, active: Tensor, inner: Tensor, rows: Tensor) -> None:
        bits = self._scores(layer, active[FIRST_SPARSE:]).numpy().view(np.int32) >> 16
        self.counts[layer] += np.bincount(bits.ravel(), minlength=N_BINS)

    def quantiles(self, shares: tuple[float, ...]) -> NDArray[np.float32]:
        """Return the quantiles of the scores at these shares, (n_layers, n_shares), accurate to one part in 128."""
        edges = (np.arange(N_BINS + 1, dtype=np.int32) << 16).view(np.float32)
        below = np.concatenate([np.zeros((len(self.counts), 1)), self.counts.cumsum(1)], axis=1)
        below /= np.maximum(1, below[:, -1:])
        return np.array([[edges[np.abs(row - share).argmin()] for share in shares] for row in below], np.float32)


class ErrorRecorder(FfnRecorder):
    """Measures what the last FFN's sum lacks if the neurons below each threshold are skipped.

    thresholds: (n_layers, n_shares). missing: squared norms (n_shares, m).
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, scores: Scores, thresholds: NDArray[np.float32]) -> None:
        super().__init__(spec, weights)
        self._scores, self._thresholds = scores, torch.from_numpy(thresholds)
        self.missing = torch.zeros(0)

    def watch(self, layer: int, active: Tensor, inner: Tensor, rows: Tensor) -> None:
        found = self._scores(layer, active)
        left_out = (inner.masked_fill(found >= threshold, 0.0) @ rows for threshold in self._thresholds[layer])
        self.missing = torch.stack([sums.square().sum(1) for sums in left_out])
