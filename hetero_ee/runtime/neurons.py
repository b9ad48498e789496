"""How many FFN neurons tokens used, where FFNs are neuron-major."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_ee.runtime.batch import Batch


@dataclass(slots=True)
class NeuronCounts:
    """Of the tokens that may skip neurons, all layers together: neurons used and neurons there were."""

    n_used: int = 0
    n_neurons: int = 0

    def count(self, active: Any, batch: Batch) -> None:
        """active: (m, ffn) of one FFN, 0 where a neuron was skipped."""
        rows = batch.may_skip()
        self.n_used += int(np.count_nonzero(active[rows]))
        self.n_neurons += int(rows.sum()) * active.shape[1]

    def __add__(self, other: "NeuronCounts") -> "NeuronCounts":
        return NeuronCounts(self.n_used + other.n_used, self.n_neurons + other.n_neurons)

    def since(self, before: "NeuronCounts") -> float | None:
        """The share used since then; None where no token passed."""
        n_neurons = self.n_neurons - before.n_neurons
        return (self.n_used - before.n_used) / n_neurons if n_neurons else None
