"""The parts of a model that the planner places: embedding, attention and FFN of each layer, head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.experts import ExpertRows
from hetero_ee.costs.product import tensor_bytes
from hetero_ee.models.blocks import BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.placement import Placement
from hetero_ee.weights.sections import MAX_SECTIONS

LEVELS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 26)  # sections that the planner tries: more gain little and take longer


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model that is placed as a whole, such as one layer's attention."""

    name: str
    kind: BlockKind
    layer: int | None
    cost: BlockCost  # of the head with the final norm's weights
    shape: int  # the same number for all parts that cost the same

    @property
    def label(self) -> str:
        """Name of the part within its layer, such as "attention" or "ffn"."""
        return self.name.rpartition(".")[2]

    @property
    def weight_bytes(self) -> int:
        return self.cost.weight_bytes

    @property
    def state_layer(self) -> int | None:
        """Layer that keeps the state which this part reads."""
        state = self.cost.state
        return self.layer if state is None or state.source is None else state.source

    @property
    def has_experts(self) -> bool:
        return isinstance(self.cost.units, ExpertRows)

    @property
    def has_shared_expert(self) -> bool:
        units = self.cost.units
        return isinstance(units, ExpertRows) and bool(units.group_products(self.cost.products, 0, is_first=True))

    def splits(self, *, every: bool = False) -> list[Placement]:
        """Return the "hot-N" placements that leave units for both devices: all if `every`, else those worth trying.

        "hot-0" is one for experts.
        """
        units, first = self.cost.units, 0 if self.has_experts else 1
        if units is None:
            return []
        numbers = range(first, MAX_SECTIONS) if every else (*range(first, 1), *LEVELS)
        found = {units.first_units(n): Placement.hot(n) for n in reversed(numbers)}
        return [placement for n_units, placement in sorted(found.items()) if n_units < units.n_units]

    def n_hot(self, placement: Placement) -> int:
        """Return how many neurons or experts are on the GPU with a "hot-N" placement."""
        assert self.cost.units is not None, "has no units that two devices could share"
        return self.cost.units.first_units(placement.n_sections)

    def prefill_choices(self, decode: Placement) -> tuple[Placement, ...]:
        """Return the placements that prefill may use. Sparse FFNs are only split for tokens that skip neurons."""
        return (Placement.VISIT,) if decode.is_split and not self.has_experts else decode.prefill_choices

    def needs_buffers(self, placement: Placement) -> bool:
        """Return whether the weights are copied to the GPU at each use, or have to be for prompts."""
        return placement.is_streamed or (placement.is_split and not self.has_experts)

    def kv_bytes(self, context_tokens: int, n_sequences: int = 1) -> int:
        """Return the bytes of this part's KV cache or other state for sequences of context_tokens tokens together."""
        return self.cost.state_bytes(context_tokens, n_sequences)


def parts_by_state(parts: Sequence[Part]) -> list[list[int]]:
    """Return the indices of parts that read one state, which must be on one device, for each state that is shared."""
    readers: dict[int | None, list[int]] = {}
    for index, part in enumerate(parts):
        if part.cost.state is not None:
            readers.setdefault(part.state_layer, []).append(index)
    return [indices for indices in readers.values() if len(indices) > 1]


class InLayer(Protocol):
    """A part of a model or plan, whose `layer` is None for the embedding and the head."""

    @property
    def layer(self) -> int | None: ...


def layer_starts(parts: Sequence[InLayer]) -> list[int]:
    """Return the index of each layer's first part, followed by the index of the head."""
    starts = (i for i, part in enumerate(parts) if part.layer is not None and part.layer != parts[i - 1].layer)
    return [*starts, len(parts) - 1]


def layer_placements(parts: Sequence[InLayer], placements: Sequence[Placement]) -> list[set[Placement]]:
    """Return, for each layer, the set of its parts' placements."""
    return [set(placements[start:end]) for start, end in pairwise(layer_starts(parts))]


def model_parts(spec: ModelSpec, kv_type: str) -> list[Part]:
    """Return the model's parts in the order in which a token passes them. Their sizes depend on kv_type."""
    blocks = decoder_blocks(spec)
    norms = [tensor for b in blocks if b.kind is BlockKind.FINAL_NORM for tensor in b.tensors.values()]
    shapes: dict[object, int] = {}
    parts = []
    for block in blocks:
        if block.kind in (BlockKind.FINAL_NORM, BlockKind.TABLE):
            continue
        cost = BlockCost.of(spec, block, kv_type)
        if block.kind is BlockKind.HEAD:
            cost = replace(cost, weight_bytes=cost.weight_bytes + sum(map(tensor_bytes, norms)))
        shape = shapes.setdefault((block.kind, cost), len(shapes))
        parts.append(Part(block.name, block.kind, block.layer, cost, shape))
    return parts
