"""Estimate the work of m tokens in one block, and the seconds that a device of a hardware profile needs for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from hetero_ee.costs.experts import ExpertRows
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.costs.neurons import ALL_NEURONS, NeuronRows, NeuronShares, hot_activations
from hetero_ee.costs.product import Product
from hetero_ee.layers.state import State
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee_profiles.hardware import DeviceTimes

Units = NeuronRows | ExpertRows  # neurons of a sparse FFN, or experts of a mixture


def units_of(block: Block) -> Units | None:
    """Return a block's neurons or experts of which a token needs some, None if it has none."""
    return ExpertRows.of(block) or NeuronRows.of(block)


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
    units: Units | None = None  # of which a token needs some, in addition to the products
    shares: NeuronShares = ALL_NEURONS  # of those units, per token
    context_tokens: int = 0  # of the longest sequence, including its tokens here
    kv_type: str = KV_TYPE  # of keys and values
    activation_terms: int = 1  # each costs a product as much as a token

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices, including those of all units."""
        return sum(product.n_bytes for product in self.products) + (self.units.n_bytes if self.units else 0)

    @property
    def read_bytes(self) -> int:
        """Bytes of matrices and units that the m tokens are expected to read."""
        n_bytes = sum(product.n_bytes for product in self.products)
        return n_bytes + (self.units.read_bytes(self.shares, self.m) if self.units else 0)

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
        """Return the seconds of all products, including those of the units that the tokens need."""
        seconds = sum(product.seconds(times, self.m * self.activation_terms) for product in self.products)
        if self.units is not None:
            seconds += self.units.read_s(times, self.shares, self.m, self.activation_terms)
        return seconds

    def overhead_s(self, times: DeviceTimes, spec: ModelSpec) -> float:
        """Return the seconds of the overhead, which products and state don't include."""
        if self.overhead is Overhead.HALF_LAYER:
            return times.layer_overhead_s(spec.hidden_size, spec.ffn_size, self.m) / 2
        if self.overhead is Overhead.PASS:
            return times.pass_overhead_s(spec.hidden_size, spec.ffn_size, self.m)
        return 0.0

    def from_disk(self) -> "Work":
        """Return the same work with all that it reads on the disk."""
        return replace(self, disk_bytes=self.read_bytes)

    def split(self, n_hot: int, hot_curve: Sequence[float] = (), *, reads_disk: bool = False) -> "SplitWork":
        """Divide the units: the first n_hot and the others, which are on the disk if reads_disk.

        `hot_curve` is ModelSpec's, empty if unknown.
        """
        units = self.units
        assert units is not None, "has no units that two devices could share"
        size, activations = units.n_units, hot_activations(hot_curve, n_hot / units.n_units)

        def group(n: int, activations: float, overhead: Overhead, *, is_first: bool) -> Work:
            products = units.group_products(self.products, n, is_first=is_first)
            shares = self.shares.among(n, size, activations) if n else self.shares
            some = units.group(n) if n else None
            return replace(self, products=products, units=some, shares=shares, overhead=overhead)

        first = replace(self, products=units.first_products(self.products), units=None)
        hot = group(n_hot, activations, Overhead.NONE, is_first=True)
        cold = group(size - n_hot, 1 - activations, self.overhead, is_first=False)
        return SplitWork(first, hot, cold.from_disk() if reads_disk else cold)


class SplitWork(NamedTuple):
    """Work of a block whose units a GPU and the CPU compute at the same time."""

    first: Work  # by the GPU, before the units
    hot: Work  # the GPU's units, and all else that needs no result of the CPU
    cold: Work  # the CPU's units

    @property
    def input_values(self) -> int:
        """Values per token sent to the CPU: the block's input, and what selects units."""
        units = self.cold.units
        assert units is not None, "has no units that two devices could share"
        return units.sent_values(is_predicted=bool(self.first.products))
