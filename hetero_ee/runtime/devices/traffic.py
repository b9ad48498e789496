"""Counts the bytes moved over the link and the weights read by the CPU, on real and emulated machines.

Their names are those of planning/times/traffic.py, which predicts the same numbers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hetero_ee.costs.head_cost import CHOICE
from hetero_ee.costs.product import Product
from hetero_ee.costs.work import Work
from hetero_ee.planning.times.traffic import CPU_WEIGHTS, over_link


@dataclass(slots=True)
class Traffic:
    """Bytes moved since this object was made, by kind and direction."""

    n_bytes: Counter[str] = field(default_factory=Counter)
    _known: dict[tuple[Product, ...], int] = field(default_factory=dict, repr=False)  # by products

    def moved(self, kind: str, n_bytes: int, *, to_gpu: bool) -> None:
        """Add bytes of a kind that were moved over the link."""
        self.n_bytes[over_link(kind, to_gpu=to_gpu)] += n_bytes

    def read(self, works: Iterable[Work]) -> None:
        """Add the weights that the CPU read for these works.

        A matrix is read once for all tokens. From a sparse FFN, the rows are read that any token is expected to need.
        """
        for work in works:
            if work.products not in self._known:
                self._known[work.products] = sum(product.n_bytes for product in work.products)
            if work.name != CHOICE:
                self.n_bytes[CPU_WEIGHTS] += self._known[work.products]
            if work.units is not None:
                self.n_bytes[CPU_WEIGHTS] += work.units.read_bytes(work.shares, work.m)


@dataclass(frozen=True, slots=True)
class TextTraffic:
    """Bytes that a call's tokens moved, excluding each sequence's first token, which prefill produces."""

    n_bytes: Mapping[str, int]
    n_tokens: int

    @property
    def per_token(self) -> dict[str, float]:
        """Bytes per generated token by kind; empty if no tokens were generated."""
        return {name: n / self.n_tokens for name, n in self.n_bytes.items()} if self.n_tokens else {}
