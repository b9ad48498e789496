"""Finds layers that the GPU can run ahead while the CPU computes others, as asynchronous drafting needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_ee.planning.placement import Placement

RESIDENT = Placement.GPU  # without copies to wait for


@dataclass(frozen=True, slots=True)
class Overlap:
    """Layers that a GPU and a CPU can compute at the same time for different tokens."""

    ahead: int  # layers at the beginning that stay on the GPU, 1 or more
    behind: int  # the first layer from which on the CPU computes all, less than the model has

    def layers_ahead(self, exit_layer: int) -> int:
        """Return how many first layers the GPU can run for the next token, if drafts exit at this layer."""
        return min(self.ahead, exit_layer)

    def layers_behind(self, exit_layer: int) -> int:
        """Return the first layer that the CPU verifies meanwhile, if drafts exit at this layer."""
        return max(self.behind, exit_layer)


def overlap(layers: Sequence[set[Placement]]) -> Overlap | None:
    """Return the overlap that decode placements, one set per layer, allow; None if the devices can't work at once."""
    ahead = next((layer for layer, found in enumerate(layers) if found != {RESIDENT}), len(layers))
    behind = max((layer + 1 for layer, found in enumerate(layers) if any(each.on_gpu for each in found)), default=0)
    return Overlap(ahead, behind) if ahead > 0 and behind < len(layers) else None
