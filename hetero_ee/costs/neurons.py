"""Estimate how many neurons of sparse FFNs a token needs, and the cost of reading them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from hetero_ee.costs.product import Product
from hetero_ee.layers.tensors import TensorRole, is_in_rows
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.rows import row_sizes
from hetero_ee.weights.sections import section_neurons
from hetero_ee_profiles.hardware import DeviceTimes, interpolated, needed_share


@dataclass(frozen=True, slots=True)
class NeuronShares:
    """Expected shares of an FFN's neurons that one token needs."""

    active: float = 1.0  # share of the rows of up and down
    first: float = 1.0  # share of the first matrix's rows, some of which a predictor may skip

    @classmethod
    def of(cls, spec: ModelSpec, *, is_prompt: bool) -> Self:
        """Return the shares that the model's calibration expects. Prefill does not use the predictor."""
        decode_share, prefill_share = spec.active_shares
        return cls(prefill_share) if is_prompt else cls(decode_share, spec.predicted_share)

    def among(self, n_units: int, of: int, activations: float) -> Self:
        """Return the shares within a group of n_units of `of` neurons that has this share of all activations."""
        return type(self)(*(min(1.0, share * activations * of / n_units) for share in (self.active, self.first)))


ALL_NEURONS = NeuronShares()


@dataclass(frozen=True, slots=True)
class NeuronRows:
    """A sparse FFN's matrices that are stored by neuron: down, up if there is a gate, the first one for a predictor."""

    n_rows: int  # rows of up and down together
    n_columns: int
    n_first_rows: int = 0
    n_units: int = 0  # number of neurons

    @classmethod
    def of(cls, block: Block) -> Self | None:
        """Return the rows of a sparse FFN, None for other blocks."""
        rows = [tensor for tensor in block.tensors.values() if is_in_rows(tensor.role)]
        if not rows:
            return None
        n_first = sum(tensor.shape[0] for tensor in rows if tensor.role is TensorRole.FIRST_ROWS)
        n_neurons, n_columns = rows[0].shape
        return cls(sum(tensor.shape[0] for tensor in rows) - n_first, n_columns, n_first, n_neurons)

    @property
    def n_bytes(self) -> int:
        return sum(row_sizes(self.n_rows + self.n_first_rows, self.n_columns))

    def read_bytes(self, shares: NeuronShares, m: int) -> int:
        """Return the bytes that m tokens read if each token needs the given shares of the neurons."""
        n_rows = needed_share(shares.active, m) * self.n_rows + needed_share(shares.first, m) * self.n_first_rows
        return int(n_rows * sum(row_sizes(1, self.n_columns)))

    def read_s(self, times: DeviceTimes, shares: NeuronShares, m: int, n_terms: int) -> float:
        """Return the seconds a device needs to multiply m tokens by the rows that they need. Rows have one term."""
        seconds = times.rows_s(self.n_rows, self.n_columns, m, shares.active)
        if self.n_first_rows:
            seconds += times.rows_s(self.n_first_rows, self.n_columns, m, shares.first)
        return seconds

    def first_units(self, n_sections: int) -> int:
        """Return how many neurons the first n_sections have."""
        return n_sections * section_neurons(self.n_units)

    def group(self, n_units: int) -> Self:
        """Return the rows of only n_units of the neurons."""
        n_rows, n_first_rows = (rows // self.n_units * n_units for rows in (self.n_rows, self.n_first_rows))
        return type(self)(n_rows, self.n_columns, n_first_rows, n_units)

    def first_products(self, products: Sequence[Product]) -> tuple[Product, ...]:
        """Return the block's products that come before its neurons, of a predictor."""
        return tuple(product for product in products if not self._is_by_neuron(product))

    def group_products(self, products: Sequence[Product], n_units: int, *, is_first: bool) -> tuple[Product, ...]:
        """Return the products of a group of n_units neurons, the first ones or the others."""
        return tuple(product._replace(n_rows=n_units) for product in products if self._is_by_neuron(product))

    def sent_values(self, *, is_predicted: bool) -> int:
        """Return the values per token sent to the CPU for its group: the input and a predictor's scores."""
        return self.n_columns + (self.n_units if is_predicted else 0)

    def _is_by_neuron(self, product: Product) -> bool:
        return (product.n_rows, product.n_columns) == (self.n_units, self.n_columns)


def hot_activations(curve: Sequence[float], share: float) -> float:
    """Return the share of a token's active neurons that are among the first `share` of all neurons.

    Args:
        curve: see ModelSpec.hot_curve; empty if it is unknown.
    """
    points = enumerate((0.0, *(curve or (1.0,))))
    return interpolated([(i / max(1, len(curve)), found) for i, found in points], share)
