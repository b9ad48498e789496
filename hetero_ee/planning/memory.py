"""Every byte a plan takes, term by term: the planner's sums and what is shown to the user come from here."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.costs import N_STREAM_BUFFERS
from hetero_ee.planning.parts import FLOAT_BYTES, Part

ALLOCATOR_BYTES = 2 * 2**20  # torch's CUDA allocator takes memory for large tensors in pieces of this size
GRAPH_BYTES = 64 * 2**20  # CUDA graphs, kernels and library workspaces: an allowance, not measured


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Bytes that one thing takes on one device, "gpu", "cpu" or "disk"."""

    device: str
    name: str
    n_bytes: int


def rounded(n_bytes: int) -> int:
    """What the allocator takes for a tensor of this size."""
    return -(-n_bytes // ALLOCATOR_BYTES) * ALLOCATOR_BYTES if n_bytes else 0


def part_gpu_bytes(part: Part, place: str, context_tokens: int) -> int:
    """GPU memory of the part itself: weights where they stay there, keys and values wherever the GPU attends."""
    if place == "gpu":
        return rounded(part.weight_bytes) + rounded(part.kv_bytes(context_tokens))
    return rounded(part.kv_bytes(context_tokens)) if place == "stream" else 0


def working_bytes(spec: ModelSpec, chunk_tokens: int) -> int:
    """Activations of a pass of this many rows: hidden states, qkv, attention's output, and the FFN's inner values."""
    width = 3 * spec.hidden_size + 2 * spec.query_size + 2 * spec.kv_size + (3 if spec.gated else 2) * spec.ffn_size
    return chunk_tokens * width * FLOAT_BYTES


def gpu_reserve_terms(spec: ModelSpec, parts: Sequence[Part], chunk_tokens: int, draft_tokens: int) -> list[MemoryTerm]:
    """What a GPU that computes any layer needs besides the parts placed there; the head comes first."""
    vocabulary_bytes = sum(part.weight_bytes for part in parts if part.name == "head" or part.name == "embedding")
    head = next(part for part in parts if part.name == "head")
    head_bytes = vocabulary_bytes if head.shares_with else head.weight_bytes
    return [
        MemoryTerm("gpu", "head", rounded(head_bytes)),
        MemoryTerm("gpu", "logits", rounded(draft_tokens * spec.vocab_size * FLOAT_BYTES)),
        MemoryTerm("gpu", "activations", rounded(working_bytes(spec, chunk_tokens))),
        MemoryTerm("gpu", "graphs and workspaces", GRAPH_BYTES),
    ]


def stream_buffer_bytes(parts: Sequence[Part], places: Sequence[str]) -> int:
    """The device buffers that streamed parts take turns in."""
    streamed = [part.weight_bytes for part, place in zip(parts, places, strict=True) if place == "stream"]
    return N_STREAM_BUFFERS * rounded(max(streamed)) if streamed else 0
