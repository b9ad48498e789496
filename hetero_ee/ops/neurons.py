"""Count the FFN neurons that tokens use in neuron-major FFNs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_ee.kv.batch import Batch


@dataclass(slots=True)
class NeuronCounts:
    """Counts, over all layers and tokens that may skip neurons, of all, used and predicted neurons."""

    n_used: int = 0
    n_neurons: int = 0
    n_predicted: int = 0

    def count(self, active: Any, batch: Batch, scores: Any = None) -> None:
        """Add one FFN's neurons from activations (m, ffn), 0 for skipped neurons, and a predictor's scores (m, ffn)."""
        rows = batch.may_skip()
        self.n_used += int(np.count_nonzero(active[rows]))
        self.n_neurons += int(rows.sum()) * active.shape[1]
        if scores is not None:
            self.n_predicted += int(np.count_nonzero(scores[rows] > 0))

    def __add__(self, other: "NeuronCounts") -> "NeuronCounts":
        n_predicted = self.n_predicted + other.n_predicted
        return NeuronCounts(self.n_used + other.n_used, self.n_neurons + other.n_neurons, n_predicted)

    def since(self, before: "NeuronCounts") -> tuple[float, float] | None:
        """Return the shares of neurons used and predicted since `before`; None if no token was counted."""
        n_neurons = self.n_neurons - before.n_neurons
        if not n_neurons:
            return None
        return (self.n_used - before.n_used) / n_neurons, (self.n_predicted - before.n_predicted) / n_neurons
