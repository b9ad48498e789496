"""Sizes of what a plan keeps in memory, for the planner's sums and for the user."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from hetero_ee.costs.product import FLOAT_BYTES, tensor_bytes
from hetero_ee.layers.ops import MULTIPLIED
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.blocks import BlockKind, decoder_blocks, layer_buffers, layer_states
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.costs import N_STREAM_BUFFERS
from hetero_ee.weights.sections import MAX_SECTIONS

ALLOCATOR_BYTES = 2 * 2**20  # granularity of torch's CUDA allocator for large tensors
ATTENTION_PART_TOKENS = 256  # positions per program of the attention kernel
N_PINNED_BUFFERS = 3  # one is filled from mapped memory, one is copied, and one keeps them apart
GRAPH_BYTES = 64 * 2**20  # for kernels and library workspaces: an allowance, not measured
GRAPH_LAYER_BYTES = 2**14  # for one layer's CUDA graph with about ten launches: also an allowance
N_STATES = 7  # hidden states outside of buffers: 4 on the link, a segment's result, two of the final norm
CODE_BYTES = 1.125  # an activation as products read it: int8, and an fp32 scale per 32
DRAFT_HEAD, DRAFT_MODEL = "draft head", "draft model"  # the terms whose device computes drafts
SNAPSHOTS = "snapshots of state"
MAX_SNAPSHOTS = 32  # more are not counted, though the budget allows them
DRAFT_ROWS = "draft vocabulary"  # of a draft head that the CPU computes, for the model's head on the GPU


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Bytes for one purpose on one device."""

    device: str  # "gpu", "cpu" or "disk"
    name: str
    n_bytes: int


def rounded(n_bytes: int) -> int:
    """Round a size up to the granularity of torch's CUDA allocator."""
    return -(-n_bytes // ALLOCATOR_BYTES) * ALLOCATOR_BYTES if n_bytes else 0


def part_gpu_bytes(part: Part, placement: Placement, kv_bytes: int) -> int:
    """Return the VRAM that the part occupies permanently: resident weights, and its KV cache if the GPU keeps it."""
    if placement == "gpu":
        return rounded(part.weight_bytes) + rounded(kv_bytes)
    if placement.is_split:
        return rounded(part.weight_bytes - cold_bytes(part, placement))
    return rounded(kv_bytes) if placement == "stream" else 0


def cold_bytes(part: Part, placement: Placement) -> int:
    """Return the bytes of the matrices that a "hot-N" placement leaves to the CPU."""
    units = part.cost.units
    assert units is not None, "has no units that two devices could share"
    n_cold = units.n_units - part.n_hot(placement)
    products = units.group_products(part.cost.products, n_cold, is_first=False)
    return sum(product.n_bytes for product in products) + (units.group(n_cold).n_bytes if n_cold else 0)


def ram_weight_bytes(part: Part, placement: Placement) -> int:
    """Return the bytes of the part's weights that stay in RAM."""
    if placement == Placement.CPU or part.needs_buffers(placement):
        return part.weight_bytes
    return cold_bytes(part, placement) if placement.is_split and not placement.reads_disk else 0


@dataclass(frozen=True, slots=True)
class WorkingSizes:
    """Sizes of the buffers that a model's layers work with."""

    spec: ModelSpec
    width: int  # numbers per token: hidden states and the mixers' buffers
    widest: int  # input of a matrix
    part_values: int  # see State
    rope_features: int  # rotating features, over all tables of rotary angles
    table_bytes: int  # of per-layer embeddings, which are never on a GPU

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        buffers, states = layer_buffers(spec), layer_states(spec)
        widest = max(spec.hidden_size, *(buffers.get(name, 0) for name in MULTIPLIED))
        part_values = max(0 if state is None else state.part_values for state in states)
        rope_features = sum(rope.n_features for rope in spec.ropes)
        tables = [block for block in decoder_blocks(spec) if block.kind is BlockKind.TABLE]
        table_bytes = sum(tensor_bytes(tensor) for block in tables for tensor in block.tensors.values())
        return cls(spec, 3 * spec.hidden_size + sum(buffers.values()), widest, part_values, rope_features, table_bytes)

    def cpu_bytes(self, chunk_tokens: int) -> int:
        """Return the bytes of a pass's activations: hidden states and the mixers' buffers."""
        return chunk_tokens * self.width * FLOAT_BYTES

    def gpu_terms(self, context_tokens: int, chunk_tokens: int) -> list[MemoryTerm]:
        """Return the VRAM of the workspace that all layers on a GPU share, term by term."""
        spec = self.spec
        passing_bytes = N_STATES * spec.hidden_size * FLOAT_BYTES + int(CODE_BYTES * self.widest)
        n_attended = -(-context_tokens // ATTENTION_PART_TOKENS) * self.part_values
        terms = {
            "activations": self.cpu_bytes(chunk_tokens) + chunk_tokens * passing_bytes,
            "attention workspace": MAX_DECODE_TOKENS * n_attended * FLOAT_BYTES,
        }
        if spec.neuron_major:
            width = MAX_SECTIONS * spec.hidden_size + 2 * spec.ffn_size
            terms["sparse sums"] = MAX_DECODE_TOKENS * width * FLOAT_BYTES
        if self.rope_features:
            terms["rotary angles"] = self.rope_features * context_tokens * FLOAT_BYTES
        return [MemoryTerm("gpu", name, rounded(n_bytes)) for name, n_bytes in terms.items()]


def stream_buffer_bytes(parts: Sequence[Part], placements: Sequence[Placement], context_tokens: int) -> int:
    """Return the VRAM of the buffers for streamed parts, which hold weights and, for "visit", the KV cache."""
    streamed = [
        part.weight_bytes + (part.kv_bytes(context_tokens) if placement == "visit" else 0)
        for part, placement in zip(parts, placements, strict=True)
        if part.needs_buffers(placement)
    ]
    return N_STREAM_BUFFERS * rounded(max(streamed)) if streamed else 0


def pinned_buffer_bytes(parts: Sequence[Part], placements: Sequence[Placement]) -> int:
    """Return the RAM of the pinned buffers through which weights are streamed."""
    pairs = zip(parts, placements, strict=True)
    streamed = [part.weight_bytes for part, placement in pairs if part.needs_buffers(placement)]
    return N_PINNED_BUFFERS * max(streamed, default=0)
