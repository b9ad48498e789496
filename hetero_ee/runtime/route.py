"""The way of a pass through a plan: segments of consecutive blocks on one device."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_ee.models.blocks import Block
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.overlap import overlap
from hetero_ee.runtime.captured import cut

DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True)
class Segment:
    """Attentions and FFNs in one place, see PlacedPart. is_captured: what comes in is to be kept."""

    place: Placement
    blocks: tuple[Block, ...]
    is_captured: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU computes it."""
        return self.place.on_gpu

    @property
    def is_split(self) -> bool:
        """Whether the CPU computes some neurons of it meanwhile."""
        return self.place.is_split

    @property
    def is_streamed(self) -> bool:
        """Whether its weights come over the link each time."""
        return self.place.is_streamed


class Route:
    """plan: its parts are those of `blocks`, which are all of the model's. Its own `blocks` are those of layers.

    overlap: the layers that devices compute at the same time, each for other tokens, when decoding. capturing: layers
    at which segments begin, see Executor.capture.
    """

    def __init__(self, plan: Plan, blocks: Sequence[Block], capturing: Sequence[int] = ()) -> None:
        self._capturing = frozenset(capturing)
        self.blocks = [block for block in blocks if block.layer is not None]
        self._places = {
            DECODE: {part.name: part.decode_placement for part in plan.parts},
            PREFILL: {part.name: part.prefill_placement for part in plan.parts},
        }
        self.overlap = overlap([part.decode_placement for part in plan.parts])
        self._known: dict[tuple[str, range], tuple[Segment, ...]] = {}

    def place(self, block: Block, kind: str = DECODE) -> Placement:
        """Where the block is; kind: "decode" or "prefill"."""
        return self._places[kind][block.name]

    def segments(self, kind: str, layers: range) -> tuple[Segment, ...]:
        """Through these layers in order."""
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

    def attention_layers(self, on_gpu: bool) -> tuple[int, ...]:
        """Return the layers whose state is on the GPU, or on the CPU: where it is read when decoding."""
        return tuple(layer for layer in range(len(self.blocks) // 2) if self.attention_on_gpu(layer) == on_gpu)

    def attention_on_gpu(self, layer: int) -> bool:
        """Return whether the layer's state is on the GPU."""
        return self.place(self.blocks[2 * layer]).on_gpu
