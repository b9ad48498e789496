"""Compute how many of a layer's experts a batch uses, and how many seconds they take.

A token uses n_active of n experts, and experts that several tokens use are read once. If tokens choose independently,
m tokens use n (1 - (1 - n_active / n)^m) different experts. Consecutive tokens tend to choose the same experts, so a
calibration measures how many independent tokens would need as many as m adjacent ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from hetero_ee.costs.neurons import NeuronShares
from hetero_ee.costs.product import FLOAT_BYTES, VOCABULARY_LAYOUT, Product, tensor_product
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.models.blocks import Block
from hetero_ee_profiles.hardware import DeviceTimes, interpolated, needed_share

SECTIONS = 32  # a split placement has a number of 32nds of the experts on the GPU
ROUTE_VALUES = 2  # per chosen expert that are sent to the CPU: its index and its weight


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Matrices of a layer's routed experts, or of some of them, and of the router."""

    n_units: int  # number of experts
    n_active: int  # experts per token, of all
    products: tuple[Product, ...]  # of one expert
    router: Product
    independent_tokens: tuple[float, ...] = ()  # see ModelSpec

    @classmethod
    def of(cls, block: Block) -> Self | None:
        """Return the experts of a mixture of experts, None for other blocks. The router is fp32, read whole."""
        mixer = block.mixer
        if not isinstance(mixer, MoeSpec):
            return None
        n_experts, hidden_size = block.tensors["router"].shape
        whole = (tensor_product(block.tensors[short]) for short in mixer.expert_matrices)
        products = tuple(product._replace(n_rows=product.n_rows // n_experts) for product in whole)
        router = Product(VOCABULARY_LAYOUT, FLOAT_BYTES * n_experts, hidden_size)
        return cls(n_experts, mixer.router.n_active, products, router)

    @property
    def shares(self) -> NeuronShares:
        """Share of the experts that one token needs."""
        return NeuronShares(self.n_active / self.n_units)

    @property
    def n_bytes(self) -> int:
        return self.n_units * sum(product.n_bytes for product in self.products)

    def read_bytes(self, shares: NeuronShares, m: int) -> int:
        """Return the expected bytes of the experts that m tokens use."""
        return int(self._needed_share(shares, m) * self.n_bytes)

    def read_s(self, times: DeviceTimes, shares: NeuronShares, m: int, n_terms: int) -> float:
        """Return the seconds that a device needs to multiply m tokens by their experts, as one product of all of them.

        Each needed expert multiplies the same number of tokens, on average.
        """
        needed = self._needed_share(shares, m)
        if not needed:
            return 0.0
        n_rows = n_terms * m * shares.active / needed
        products = (product._replace(n_rows=self.n_units * product.n_rows) for product in self.products)
        return sum((times.matmul_s(*product, n_rows, needed) for product in products), 0.0)

    def _needed_share(self, shares: NeuronShares, m: int) -> float:
        """Return the share of the experts that m adjacent tokens use."""
        n_tokens = interpolated(list(enumerate(self.independent_tokens, 1)), m) if self.independent_tokens else m
        return needed_share(shares.active, n_tokens)

    def first_units(self, n_sections: int) -> int:
        """Return how many experts the first n_sections of SECTIONS have."""
        return n_sections * self.n_units // SECTIONS

    def group(self, n_units: int) -> Self:
        return replace(self, n_units=n_units)

    def first_products(self, products: Sequence[Product]) -> tuple[Product, ...]:
        """Return the block's products that come before its experts."""
        return (self.router,)

    def group_products(self, products: Sequence[Product], n_units: int, *, is_first: bool) -> tuple[Product, ...]:
        """Return the products of a shared expert, which the device with the first experts computes."""
        return tuple(product for product in products if product != self.router) if is_first else ()

    def sent_values(self, *, is_predicted: bool) -> int:
        """Return the values per token that a split block sends to the CPU: its input and its routes."""
        return self.router.n_columns + ROUTE_VALUES * self.n_active
