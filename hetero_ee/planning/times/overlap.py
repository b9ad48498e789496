"""Which layers can run ahead on the GPU while the CPU computes others: what drafting ahead takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_ee.planning.times.costs import ON_GPU

RESIDENT = "gpu"  # weights stay on the GPU: no copy stands in the way


@dataclass(frozen=True, slots=True)
class Overlap:
    """ahead: layers at the beginning that stay on the GPU, 1 or more. behind: the first layer from which on the CPU
    computes all of them, before the end."""

    ahead: int
    behind: int

    def layers_ahead(self, exit_layer: int) -> int:
        """How many layers a row passes ahead of a round whose rows wait at this exit layer."""
        return min(self.ahead, exit_layer)

    def layers_behind(self, exit_layer: int) -> int:
        """The first layer of the waiting rows that the CPU computes meanwhile."""
        return max(self.behind, exit_layer)


def overlap(places: Sequence[str]) -> Overlap | None:
    """Of a plan's decode places, part by part: embedding, attention and FFN of each layer, head. None without layers of
    both kinds."""
    layers = [set(places[first : first + 2]) for first in range(1, len(places) - 1, 2)]
    ahead = next((layer for layer, found in enumerate(layers) if found != {RESIDENT}), len(layers))
    behind = max((layer + 1 for layer, found in enumerate(layers) if found & set(ON_GPU)), default=0)
    return Overlap(ahead, behind) if ahead > 0 and behind < len(layers) else None
