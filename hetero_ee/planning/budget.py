"""Lists the memory that a model needs on each device with given placements, and compares it with the budgets."""

from collections.abc import Sequence

from hetero_ee.costs.product import FLOAT_BYTES, exit_map_products
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.planning.chain import Chain
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.schedule import BEST_OF_DRAFTS, most_drafted
from hetero_ee.planning.times.memory import (
    DRAFT_ROWS,
    GRAPH_BYTES,
    GRAPH_LAYER_BYTES,
    MAX_SNAPSHOTS,
    SNAPSHOTS,
    MemoryTerm,
    part_gpu_bytes,
    pinned_buffer_bytes,
    ram_weight_bytes,
    rounded,
    stream_buffer_bytes,
)


def memory_terms(problem: Problem, decode: Chain, prefill: Chain, chunk_tokens: int) -> list[MemoryTerm]:
    """Return the memory that a plan uses, term by term: on the CPU, on disk and on the GPU."""
    terms = _ram_terms(problem, decode, prefill, chunk_tokens)
    pairs = zip(problem.parts, decode, strict=True)
    if on_disk := sum(ram_weight_bytes(part, each.in_ram) for part, each in pairs if each.reads_disk):
        terms.append(MemoryTerm("disk", "weights", on_disk))
    if table_bytes := problem.sizes.table_bytes:  # a token reads one row, so the disk is fast enough for the others
        in_ram = n_bytes(terms, "cpu") + table_bytes <= problem.ram_budget_bytes
        terms.append(MemoryTerm("cpu" if in_ram else "disk", "per-layer embeddings", table_bytes))
    return terms + _gpu_terms(problem, decode, prefill, chunk_tokens)


def reserve_terms(problem: Problem, head: Placement, chunk_tokens: int) -> list[MemoryTerm]:
    """Return the VRAM that a GPU needs in addition to its layers: head, workspaces, graphs and drafts."""
    spec, terms = problem.spec, list[MemoryTerm]()
    if head == Placement.GPU:
        draft_length = max(most_drafted(problem), BEST_OF_DRAFTS)
        terms.append(MemoryTerm("gpu", "head", rounded(problem.head.cost.product_bytes)))
        terms.append(MemoryTerm("gpu", "logits", rounded(draft_length * spec.vocab_size * FLOAT_BYTES)))
        exits = problem.statistics.exits
        map_rank = 0 if exits is None else max(exits.map_ranks.values(), default=0)
        if products := exit_map_products(spec.hidden_size, map_rank):
            terms.append(MemoryTerm("gpu", "exit map", sum(rounded(product.n_bytes) for product in products)))
    graph_bytes = GRAPH_BYTES + rounded(MAX_DECODE_TOKENS * spec.n_layers * GRAPH_LAYER_BYTES)
    if pass_bytes := sum(_pass_bytes(problem, part, chunk_tokens) for part in problem.layers):  # wherever they are
        terms.append(MemoryTerm("gpu", "keys and values of large chunks", rounded(pass_bytes)))
    return [
        *terms,
        *problem.sizes.gpu_terms(problem.context_tokens, chunk_tokens),
        MemoryTerm("gpu", "graphs and workspaces", graph_bytes),
        *draft_terms(problem, "gpu", head),
    ]


def _pass_bytes(problem: Problem, part: Part, chunk_tokens: int) -> int:
    """Return the bytes that large chunks of prompts add to the part's keys and values, if it has a sliding window."""
    state = part.cost.state
    sizes = problem.context_tokens, problem.kv_type, chunk_tokens, problem.limits.n_sequences
    return 0 if state is None else state.pass_bytes(*sizes)


def draft_terms(problem: Problem, device: str, head: Placement = Placement.CPU) -> list[MemoryTerm]:
    """Return the memory that the source of draft sequences uses on `device`, if the model's head is at `head`."""
    drafts = problem.statistics.drafts
    if drafts is None or drafts.memory_bytes is None or problem.limits.mode not in (None, "exact"):
        return []
    source_device = "gpu" if drafts.reading is not None and drafts.reading.on_gpu else "cpu"
    if source_device == device:
        n_bytes = drafts.memory_bytes(problem.context_tokens, problem.limits.n_sequences)
        return [MemoryTerm(device, drafts.memory_term, n_bytes)]
    if device == head == "gpu" and drafts.head_rows_bytes > 0:
        return [MemoryTerm(device, DRAFT_ROWS, drafts.head_rows_bytes)]
    return []


def snapshot_terms(problem: Problem) -> list[MemoryTerm]:
    """Return the RAM for snapshots of recurrent state, and of keys and values within sliding windows."""
    states = [part.cost.state for part in problem.parts]
    sizes = (problem.context_tokens, problem.kv_type)
    n_bytes = sum(state.snapshot_bytes(*sizes) for state in states if state is not None)
    n_bytes = min(problem.limits.snapshot_budget_bytes, MAX_SNAPSHOTS * n_bytes)
    return [MemoryTerm("cpu", SNAPSHOTS, n_bytes)] if n_bytes else []


def ram_bytes(problem: Problem, decode: Chain, chunk_tokens: int) -> int:
    """Return the RAM that a plan with these decode placements uses."""
    return n_bytes(_ram_terms(problem, decode, decode, chunk_tokens), "cpu")


def fits_ram(problem: Problem, decode: Chain, chunk_tokens: int) -> bool:
    return ram_bytes(problem, decode, chunk_tokens) <= problem.ram_budget_bytes


def fits_gpu(problem: Problem, decode: Chain, chunk_tokens: int) -> bool:
    return n_bytes(_gpu_terms(problem, decode, decode, chunk_tokens), "gpu") <= problem.vram_budget_bytes


def embedding_bytes(problem: Problem, head: Placement) -> int:
    """Return the VRAM that an embedding on the GPU adds: 0 if a head on the GPU shares its matrix."""
    return 0 if problem.spec.tied_head and head == Placement.GPU else rounded(problem.parts[0].weight_bytes)


def n_bytes(terms: Sequence[MemoryTerm], device: str) -> int:
    return sum(term.n_bytes for term in terms if term.device == device)


def _ram_terms(problem: Problem, decode: Chain, prefill: Chain, chunk_tokens: int) -> list[MemoryTerm]:
    weight_bytes = kv_bytes = 0
    for part, placement, of_prompts in zip(problem.parts, decode, prefill, strict=True):
        weight_bytes += part.weight_bytes if of_prompts.is_streamed else ram_weight_bytes(part, placement)
        if not placement.on_gpu:
            kv_bytes += problem.kv_bytes(part) + _pass_bytes(problem, part, chunk_tokens)
    pinned = max(pinned_buffer_bytes(problem.parts, each) for each in {decode, prefill})
    return [
        MemoryTerm("cpu", "weights", weight_bytes),
        MemoryTerm("cpu", "keys and values", kv_bytes),
        MemoryTerm("cpu", "activations", problem.sizes.cpu_bytes(chunk_tokens)),
        *([MemoryTerm("cpu", "pinned buffers", pinned)] if pinned else []),
        *snapshot_terms(problem),
        *draft_terms(problem, "cpu"),
    ]


def _gpu_terms(problem: Problem, decode: Chain, prefill: Chain, chunk_tokens: int) -> list[MemoryTerm]:
    if not any(placement.on_gpu for placement in decode):
        return []
    layers = [pair for pair in zip(problem.parts, decode, strict=True) if pair[0].layer is not None]
    context_tokens, head = problem.context_tokens, decode[-1]
    weights = sum(part_gpu_bytes(part, placement, 0) for part, placement in layers)
    kv_bytes = sum(rounded(problem.kv_bytes(part)) for part, placement in layers if placement.on_gpu)
    buffers = max(stream_buffer_bytes(problem.parts, each, context_tokens) for each in {decode, prefill})
    embedding = embedding_bytes(problem, head) if decode[0] == Placement.GPU else 0
    terms = [MemoryTerm("gpu", "weights", weights), MemoryTerm("gpu", "keys and values", kv_bytes)]
    terms += [MemoryTerm("gpu", "stream buffers", buffers)] if buffers else []
    terms += [MemoryTerm("gpu", "embedding", embedding)] if embedding else []
    return terms + reserve_terms(problem, head, chunk_tokens)
