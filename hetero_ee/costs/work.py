"""Estimate the work of m tokens in one block, and the seconds that a device of a hardware profile needs for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.costs.neurons import ALL_NEURONS, NeuronRows, NeuronShares, hot_activations
from hetero_ee.costs.product import Product
from hetero_ee.layers.state import State
from hetero_ee.models.spec import ModelSpec
from hetero_ee_profiles.hardware import DeviceTimes


class Overhead(Enum):
    """Costs of a block in addition to products and state."""

    NONE = "none"
    HALF_LAYER = "half a layer"  # norms, activations and bookkeeping of an attention or FFN
    PASS = "pass"  # what a pass costs outside of its layers; charged to the head


@dataclass(frozen=True, slots=True)
class Work:
    """The work of m tokens in one block, or in a part of one."""

    name: str
    m: int
    products: tuple[Product, ...] = ()
    state: State | None = None  # of its mixer
    overhead: Overhead = Overhead.NONE
    disk_bytes: int = 0  # read from the disk meanwhile
    neurons: NeuronRows | None = None  # of a sparse FFN
    shares: NeuronShares = ALL_NEURONS  # of those neurons, per token
    context_tokens: int = 0  # of the longest sequence, including its tokens here
    kv_type: str = KV_TYPE  # of keys and values
    activation_terms: int = 1  # each costs a product as much as a token

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices, including all rows of neurons."""
        return sum(product.n_bytes for product in self.products) + (self.neurons.n_bytes if self.neurons else 0)

    @property
    def read_bytes(self) -> int:
        """Bytes of matrices and neurons that the m tokens are expected to read."""
        n_bytes = sum(product.n_bytes for product in self.products)
        return n_bytes + (self.neurons.read_bytes(self.shares, self.m) if self.neurons else 0)

    def seconds(self, times: DeviceTimes, disk_bytes_per_s: float, spec: ModelSpec) -> float:
        """Return the seconds that a device needs, or those of reading from the disk if they are more.

        Raises:
            KeyError: if the profile did not time a layout.
        """
        seconds = self.products_s(times) + self.overhead_s(times, spec)
        if self.state is not None:
            seconds += self.state.read_s(times, self.m, self.context_tokens, self.kv_type)
        return max(seconds, self.disk_bytes / disk_bytes_per_s)

    def products_s(self, times: DeviceTimes) -> float:
        """Return the seconds of all products, including those with rows of neurons."""
        seconds = sum(product.seconds(times, self.m * self.activation_terms) for product in self.products)
        if self.neurons is not None:
            seconds += self.neurons.read_s(times, self.shares, self.m)
        return seconds

    def overhead_s(self, times: DeviceTimes, spec: ModelSpec) -> float:
        """Return the seconds of the overhead, which products and state don't include."""
        if self.overhead is Overhead.HALF_LAYER:
            return times.layer_overhead_s(spec.hidden_size, spec.ffn_size, self.m) / 2
        if self.overhead is Overhead.PASS:
            return times.pass_overhead_s(spec.hidden_size, spec.ffn_size, self.m)
        return 0.0

    def split(self, n_hot: int, hot_curve: Sequence[float] = ()) -> "SplitWork":
        """Divide a sparse FFN: the first n_hot neurons and the others. `hot_curve` is ModelSpec's, empty if unknown."""
        rows = self.neurons
        assert rows is not None, "not a sparse FFN"
        size, activations = rows.n_neurons, hot_activations(hot_curve, n_hot / rows.n_neurons)
        by_neuron = [each for each in self.products if each[1:] == (size, rows.n_columns)]
        first = tuple(each for each in self.products if each not in by_neuron)

        def group(n: int, activations: float, overhead: Overhead) -> Work:
            products = tuple(each._replace(n_rows=n) for each in by_neuron)
            shares = self.shares.among(n, size, activations)
            return replace(self, products=products, neurons=rows.group(n), shares=shares, overhead=overhead)

        hot, cold = group(n_hot, activations, Overhead.NONE), group(size - n_hot, 1 - activations, self.overhead)
        return SplitWork(replace(self, products=first, neurons=None), hot, cold)


class SplitWork(NamedTuple):
    """Work of a sparse FFN that a GPU and the CPU compute at the same time."""

    first: Work  # by the GPU, before the neurons
    hot: Work  # the GPU's neurons
    cold: Work  # the CPU's neurons

    @property
    def input_values(self) -> int:
        """Values per token sent to the CPU: the FFN's input and, with a predictor, its neurons' scores."""
        rows = self.cold.neurons
        assert rows is not None, "not a sparse FFN"
        return rows.n_columns + (rows.n_neurons if self.first.products else 0)
