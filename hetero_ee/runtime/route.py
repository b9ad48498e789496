"""Divides a plan's blocks into segments of consecutive blocks on one device."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_ee.models.blocks import Block
from hetero_ee.planning.parts import layer_placements
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.overlap import overlap
from hetero_ee.runtime.captured import cut

DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive attentions and FFNs with the same placement."""

    place: Placement
    blocks: tuple[Block, ...]
    is_captured: bool = False  # its input is kept

    @property
    def on_gpu(self) -> bool:
        return self.place.on_gpu

    @property
    def is_split(self) -> bool:
        """Whether CPU and GPU each compute some of its neurons."""
        return self.place.is_split

    @property
    def is_streamed(self) -> bool:
        """Whether its weights are copied to the GPU at each use."""
        return self.place.is_streamed


class Route:
    """The segments through which passes run, by the placements of a plan.

    Args:
        blocks: all blocks of the model. The attribute `blocks` has only those of layers.
        capturing: layers at which new segments begin, see Executor.capture.

    Attributes:
        overlap: layers that both devices can compute at the same time, for different tokens.
    """

    def __init__(self, plan: Plan, blocks: Sequence[Block], capturing: Sequence[int] = ()) -> None:
        self._capturing = frozenset(capturing)
        self.blocks = [block for block in blocks if block.layer is not None]
        self._places = {
            DECODE: {part.name: part.decode_placement for part in plan.parts},
            PREFILL: {part.name: part.prefill_placement for part in plan.parts},
        }
        self.overlap = overlap(layer_placements(plan.parts, plan.decode_placements))
        self._known: dict[tuple[str, range], tuple[Segment, ...]] = {}

    def place(self, block: Block, kind: str = DECODE) -> Placement:
        """Return the block's placement in passes of this kind, DECODE or PREFILL."""
        return self._places[kind][block.name]

    def segments(self, kind: str, layers: range) -> tuple[Segment, ...]:
        """Return the segments of these layers in order."""
        key = kind, layers
        if key not in self._known:
            found: list[Segment] = []
            for part in cut(layers, self._capturing):
                blocks = [block for block in self.blocks if block.layer in part]
                groups = itertools.groupby(blocks, key=lambda block: self.place(block, kind))
                segments = [Segment(place, tuple(group)) for place, group in groups]
                found += [replace(segments[0], is_captured=part.start in self._capturing), *segments[1:]]
            self._known[key] = tuple(found)
        return self._known[key]

    def state_layers(self, on_gpu: bool) -> tuple[int, ...]:
        """Return the layers whose KV cache or other state is on this device: where their first block decodes."""
        firsts = {block.layer: block for block in reversed(self.blocks) if block.layer is not None}
        return tuple(layer for layer in sorted(firsts) if self.place(firsts[layer]).on_gpu == on_gpu)
