"""The parts of a model that the planner places: embedding, attention and FFN of each layer, head."""

from dataclasses import dataclass, replace

from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.product import tensor_bytes
from hetero_ee.models.blocks import BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of placement."""

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
        """Bytes of its tensors as stored."""
        return self.cost.weight_bytes

    def kv_bytes(self, context_tokens: int) -> int:
        """Return the bytes of state that the cache keeps of one sequence of this length."""
        return self.cost.state_bytes(context_tokens)


def model_parts(spec: ModelSpec, kv_type: str) -> list[Part]:
    """Return the parts in the order in which a token passes them."""
    blocks = decoder_blocks(spec)
    norms = [tensor for b in blocks if b.kind is BlockKind.FINAL_NORM for tensor in b.tensors.values()]
    shapes: dict[object, int] = {}
    parts = []
    for block in blocks:
        if block.kind is BlockKind.FINAL_NORM:
            continue
        cost = BlockCost.of(spec, block, kv_type)
        if block.kind is BlockKind.HEAD:
            cost = replace(cost, weight_bytes=cost.weight_bytes + sum(map(tensor_bytes, norms)))
        shape = shapes.setdefault((block.kind, cost), len(shapes))
        parts.append(Part(block.name, block.kind, block.layer, cost, shape))
    return parts
