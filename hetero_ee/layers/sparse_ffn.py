"""The sparse FFN: act(first(x)) decides which neurons a token needs, and the others are not read.

A predictor, two matrices of low rank, may decide before that which rows of the first matrix to compute. An FFN may be
split by sections of neurons between a GPU and the CPU: the sections are added from the last to the first, so that the
sum has the same bits however the FFN is split.
"""

from dataclasses import dataclass, replace
from typing import Any

from hetero_ee.layers.ffn import FfnSpec
from hetero_ee.layers.ops import INNER, Array, Matrix, Mixer, Neurons, Ops, Parameters, Rows
from hetero_ee.layers.tensors import TensorRole, Tensors

SCORES_LOW = "scores_low"  # a predictor's inner values


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseFfnSpec(FfnSpec):
    """Parameters of one layer's sparse FFN, whose weights are stored neuron by neuron.

    Matrices that are not read for inactive neurons have a row for each neuron: up if there is a gate, and down, whose
    rows are the columns of the dense matrix.
    """

    first_in_rows: bool  # stores the first matrix by neurons, too, so that a predictor can skip rows
    predictor_rank: int  # rank of the neuron predictor; 0 without one

    @property
    def first_matrix(self) -> str:
        """Short name of the matrix that decides which neurons are active."""
        return "gate" if self.activation.gated else "up"

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare the predictor's matrices, the first matrix, and up and down with a row per neuron."""
        if self.predictor_rank:
            tensors.matrix("predictor_in", self.predictor_rank, hidden_size)
            tensors.matrix("predictor_out", self.size, self.predictor_rank, bias=True)
        role = TensorRole.FIRST_ROWS if self.first_in_rows else None
        tensors.matrix(self.first_matrix, self.size, hidden_size, bias=self.bias, role=role)
        rows = ("up", "down") if self.activation.gated else ("down",)
        for short in rows:
            tensors.matrix(short, self.size, hidden_size, role=TensorRole.NEURONS)
        for short in rows if self.bias else ():
            tensors.vector(f"{short}_bias", hidden_size if short == "down" else self.size)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> "SparseFfn":
        return SparseFfn(self, parameters)


class SparseFfn(Mixer):
    """One layer's sparse FFN with its parameters on a device."""

    def __init__(self, spec: SparseFfnSpec, parameters: Parameters) -> None:
        self.n_neurons = spec.size
        self.first, self._down_bias = parameters.matrix(spec.first_matrix), parameters.vector("down_bias")
        self._activation = replace(spec.activation, gated=False)
        up = parameters.matrix("up") if spec.activation.gated else None
        self.neurons = Neurons(up, parameters.matrix("down"), parameters.least())
        self._predictor: tuple[Matrix, Matrix] | None = None
        if spec.predictor_rank:
            self._predictor = parameters.matrix("predictor_in"), parameters.matrix("predictor_out")

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        scores = self.scores(ops, x) if rows.some_may_skip else None
        active = self.activations(ops, self.first, x, scores, rows)
        return self.biased(ops, ops.sparse_ffn(x, active, self.neurons, scores, rows))

    def scores(self, ops: Ops, x: Array) -> Array | None:
        """Return the predictor's scores (m, ffn), above 0 for neurons to compute; None without a predictor."""
        if self._predictor is None:
            return None
        inner, outer = self._predictor
        return ops.linear(ops.linear(x, inner, SCORES_LOW), outer, INNER)

    def activations(self, ops: Ops, first: Matrix, x: Array, scores: Array | None, rows: Rows) -> Array:
        """Return the activations (m, n) of the neurons in `first`, the first matrix or a part of it."""
        return ops.activate(ops.masked_linear(x, first, scores, rows), self._activation)

    def biased(self, ops: Ops, summed: Array) -> Array:
        """Add the bias of down to the complete sum."""
        return summed if self._down_bias is None else ops.add(summed, self._down_bias)

    def part(self, ops: Ops, chosen: slice, section: int) -> "SplitPart":
        """Return one device's part of an FFN that is split between two devices.

        Args:
            chosen: the device's neurons.
            section: number of sections on the GPU.
        """
        least = self.neurons.least
        neurons = replace(self.neurons, least=None if least is None else least[chosen], chosen=chosen, section=section)
        return SplitPart(self, ops.part(self.first, chosen), neurons)


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One device's neurons of a split FFN. Scores may be those of these neurons or of all."""

    ffn: SparseFfn
    first: Matrix
    neurons: Neurons

    def first_sums(self, ops: Ops, x: Array, scores: Array | None, rows: Rows) -> Array:
        """Begin the split FFN's sum with these neurons. Returns sums for end()."""
        active = self.ffn.activations(ops, self.first, x, scores, rows)
        return ops.first_sections(x, active, self.neurons, scores, rows)

    def rest(self, ops: Ops, x: Array, scores: Array | None, rows: Rows) -> Array:
        """Return the sum (m, hidden) of these neurons, which follow those of the other device."""
        active = self.ffn.activations(ops, self.first, x, scores, rows)
        return ops.rest_sections(x, active, self.neurons, scores, rows)

    def end(self, ops: Ops, x: Array, sums: Array, rest: Array) -> Array:
        """Combine both devices' sums and return the FFN's output (m, hidden)."""
        return self.ffn.biased(ops, ops.fold_sections(x, sums, rest, self.neurons))
