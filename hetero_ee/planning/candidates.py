"""The placements worth comparing, and which of them serves a typical request fastest."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_ee.errors import UsageError
from hetero_ee.models.blocks import BlockKind
from hetero_ee.planning.hot import SPLITS
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Option, PartOptions, chain_bytes, place_chain
from hetero_ee.planning.plan import SEQUENCE
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.schedule import BEST_OF_DRAFTS, Schedule, best_schedule, full_schedule
from hetero_ee.planning.statistics import PromptReading
from hetero_ee.planning.times.costs import ON_GPU, STREAMED
from hetero_ee.planning.times.early_exits import Passes
from hetero_ee.planning.times.memory import (
    DRAFT_HEAD,
    DRAFT_ROWS,
    MemoryTerm,
    gpu_reserve_terms,
    part_gpu_bytes,
    pinned_buffer_bytes,
    rounded,
    stream_buffer_bytes,
    working_bytes,
)
from hetero_ee.planning.times.prompts import Placements, prompt_s

REQUEST_PROMPT_TOKENS, REQUEST_TEXT_TOKENS = 512, 128  # what is made fast where decoding and prompts compete
MOST_DEPTHS = 8  # of an early-exit mode that chains are made for: each takes some 10 ms
PREFILL_CHUNKS = (512, 128)  # tokens of a prompt in one pass: more read weights less often, and take more memory

Placement = tuple[str, ...]  # of every part


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan in the making."""

    problem: Problem
    context_tokens: int  # that its times hold for
    chunk_tokens: int  # of a prompt at a time
    decode: Placement
    prefill: Placement
    schedule: Schedule
    memory: list[MemoryTerm]
    read_s: float  # of a typical prompt
    request_s: float  # of a typical request

    @property
    def reading(self) -> PromptReading | None:
        """What its drafts take of a prompt's time."""
        return self.problem.statistics.reading(self.schedule.drafts)


def best_candidate(problem: Problem, context_tokens: int) -> Candidate:
    """The candidate of least request_s that keeps the budgets, wherever its drafts are computed; without drafts where
    none has room for their source. Raises UsageError where none keeps them."""
    found, refusal = list[Candidate](), None
    for each in _by_draft_device(problem):
        try:
            found.append(_best_candidate(each, context_tokens))
        except UsageError as error:
            refusal = refusal or error
    if found:
        return min(found, key=lambda candidate: candidate.request_s)
    assert refusal is not None, "what has no candidate was refused"
    if problem.limits.mode == "exact" or not _draft_terms(problem, "cpu"):
        raise refusal
    return _best_candidate(replace(problem, statistics=replace(problem.statistics, drafts=None)), context_tokens)


def _by_draft_device(problem: Problem) -> list[Problem]:
    """With drafts by the CPU, and by the GPU where it can."""
    drafts = problem.statistics.drafts
    if drafts is None or drafts.by_gpu is None or not problem.has_gpu or problem.limits.mode not in (None, "exact"):
        return [problem]
    return [problem, replace(problem, statistics=replace(problem.statistics, drafts=drafts.by_gpu))]


def _best_candidate(problem: Problem, context_tokens: int) -> Candidate:
    """Every chain is tried with every chunk, so that pinning the parts of the best one gives the same plan."""
    options = problem.layer_options(context_tokens)
    chunks = sorted({min(chunk, problem.context_tokens) for chunk in PREFILL_CHUNKS})
    ways = [options, *_exit_options(problem, context_tokens)]
    chains = dict.fromkeys(chain for chunk in chunks for way in ways for chain in _placements(problem, way, chunk))
    if _draft_terms(problem, "gpu"):
        chains = {chain: None for chain in chains if chain[-1] in ON_GPU}
    placed = dict.fromkeys((_with_disk(problem, chain, chunk), chunk) for chain in chains for chunk in chunks)
    if not placed:
        raise UsageError(_does_not_fit(problem, options))
    fitting = [each for each in placed if _ram_bytes(problem, *each) <= problem.ram_budget_bytes]
    if not fitting:
        raise UsageError(_too_little_ram(problem, min(_ram_bytes(problem, *each) for each in placed)))
    fitting = [(every, chunk) for each, chunk in fitting for every in _with_embedding(problem, each, chunk)]
    if not fitting:
        raise UsageError(_does_not_fit(problem, options))
    schedules = {decode: best_schedule(problem, decode, context_tokens) for decode, _ in dict.fromkeys(fitting)}
    found = [completed(problem, decode, chunk, context_tokens, schedules[decode]) for decode, chunk in fitting]
    return min(found, key=lambda candidate: candidate.request_s)


def _exit_options(problem: Problem, context_tokens: int) -> Iterator[list[PartOptions]]:
    """What layers cost by how often a token of an early-exit mode passes them, so that those hardly needed go to the
    slowest place: for each of the known depths, or some of many."""
    depths, most = problem.depths, problem.limits.draft_length or BEST_OF_DRAFTS
    for known in depths[:: -(-len(depths) // MOST_DEPTHS)] if depths else ():
        yield problem.layer_options(context_tokens, Passes.of(known, most))


def cpu_alone_s(problem: Problem, context_tokens: int) -> float | None:
    """Seconds of a token in full mode on the CPU alone; None where its memory is too small."""
    chunk = min(*PREFILL_CHUNKS, problem.context_tokens)
    decode = _with_disk(problem, ("cpu",) * len(problem.parts), chunk)
    if _ram_bytes(problem, decode, chunk) > problem.ram_budget_bytes:
        return None
    return full_schedule(problem, decode, context_tokens).token_s


def bytes_for_all(problem: Problem) -> int:
    """GPU memory that every layer and the head take there."""
    layers = sum(part_gpu_bytes(part, "gpu", problem.context_tokens) for part in problem.layers)
    reserve = _reserve(problem, "gpu", min(*PREFILL_CHUNKS, problem.context_tokens))
    return layers + sum(term.n_bytes for term in reserve)


def completed(problem: Problem, decode: Placement, chunk: int, context_tokens: int, schedule: Schedule) -> Candidate:
    """Of this schedule, or of full mode where drafts take more of the prompt's time than they save of the text's."""
    schedules = [schedule]
    if problem.limits.mode is None and problem.statistics.reading(schedule.drafts) is not None:
        full = full_schedule(problem, decode, context_tokens)
        schedules.append(replace(full, other_mode_s=schedule.token_s))
    n_prompt = min(REQUEST_PROMPT_TOKENS, problem.context_tokens)
    prefills, found = _prefill_placements(problem, decode, chunk), []
    for each in schedules:
        reading = problem.statistics.reading(each.drafts)
        prompts_s = {
            prefill: prompt_s(problem.costs, problem.parts, Placements(prefill, decode), n_prompt, chunk, reading)
            for prefill in prefills
        }
        prefill, read_s = min(prompts_s.items(), key=lambda item: item[1])
        request_s = read_s + REQUEST_TEXT_TOKENS * each.token_s
        memory = _memory_terms(problem, decode, prefill, chunk)
        if each.drafts != SEQUENCE:
            memory = [term for term in memory if term.name not in (DRAFT_HEAD, DRAFT_ROWS)]
        found.append(Candidate(problem, context_tokens, chunk, decode, prefill, each, memory, read_s, request_s))
    return min(found, key=lambda candidate: candidate.request_s)


def _placements(problem: Problem, options: Sequence[PartOptions], chunk: int) -> Iterator[Placement]:
    """Everything on the CPU; then with the head on the GPU: the fastest chain, and as many first layers as fit, each
    with room for streaming prompts' weights and without."""
    pinned_head = problem.limits.pinned("head")
    if all("cpu" in option for option in options) and pinned_head in (None, "cpu"):
        yield ("cpu",) * len(problem.parts)
    if not problem.has_gpu:
        return
    head = pinned_head or "gpu"
    for allowed, left_bytes in _rooms(problem, options, head, chunk):
        chain = place_chain(allowed, left_bytes, problem.costs.transfer_s(1), ends_on_gpu=head == "gpu")
        for layers in (chain, _prefix(allowed, left_bytes)):
            if layers is not None and (pinned_head == "gpu" or any(placement in ON_GPU for placement in layers)):
                yield ("cpu", *layers, head)


def _rooms(
    problem: Problem, options: Sequence[PartOptions], head: str, chunk: int
) -> Iterator[tuple[Sequence[PartOptions], int]]:
    """What may be chosen and the bytes left for it: without streaming, with buffers for weights, and with buffers for
    weights and keys and values."""
    budget = problem.vram_budget_bytes - sum(term.n_bytes for term in _reserve(problem, head, chunk))
    budget -= _embedding_bytes(problem, head) if problem.limits.pinned("embedding") == "gpu" else 0
    buffers = [
        stream_buffer_bytes(problem.layers, [placement] * len(options), problem.context_tokens)
        for placement in ("stream", "visit")
    ]
    streamed = {"stream", *SPLITS}  # by prompts at least
    if not any(streamed.issuperset(option) for option in options):  # nothing is pinned to it
        buffers = [0, *buffers]
    resident = [{name: option for name, option in part.items() if name not in streamed} for part in options]
    for buffer_bytes in buffers:
        if budget >= buffer_bytes:
            yield options if buffer_bytes else resident, budget - buffer_bytes


def _prefix(options: Sequence[PartOptions], budget_bytes: int) -> Placement | None:
    """The first layers on the GPU, whole, as many as fit; the rest where it is pinned, else on the CPU."""
    on_gpu, on_cpu = ([w if w in option else next(iter(option)) for option in options] for w in ("gpu", "cpu"))
    n_bytes = chain_bytes(options, on_gpu)
    for n_parts in range(len(options), -1, -2):
        if n_bytes <= budget_bytes:
            return (*on_gpu[:n_parts], *on_cpu[n_parts:])
        last = slice(max(0, n_parts - 2), n_parts)
        n_bytes += chain_bytes(options[last], on_cpu[last]) - chain_bytes(options[last], on_gpu[last])
    return None


def _reserve(problem: Problem, head: str, chunk: int) -> list[MemoryTerm]:
    drafts = 0 if head != "gpu" else max(problem.limits.draft_length or 0, BEST_OF_DRAFTS)
    exits = problem.statistics.exits
    map_rank = 0 if exits is None else max(exits.map_ranks.values(), default=0)
    terms = gpu_reserve_terms(problem.spec, problem.parts, problem.context_tokens, chunk, drafts, map_rank)
    return terms + _draft_terms(problem, "gpu", head)


def _draft_terms(problem: Problem, device: str, head: str = "cpu") -> list[MemoryTerm]:
    """What the source of draft sequences takes there, with the model's head in that place."""
    drafts = problem.statistics.drafts
    if drafts is None or drafts.memory_bytes is None or problem.limits.mode not in (None, "exact"):
        return []
    place = "gpu" if drafts.reading is not None and drafts.reading.on_gpu else "cpu"
    if place == device:
        return [MemoryTerm(device, DRAFT_HEAD, drafts.memory_bytes(problem.context_tokens))]
    is_beside = device == head == "gpu" and drafts.head_rows_bytes > 0
    return [MemoryTerm(device, DRAFT_ROWS, drafts.head_rows_bytes)] if is_beside else []


def _does_not_fit(problem: Problem, options: Sequence[PartOptions]) -> str:
    needed = sum(min(option.gpu_bytes for option in part.values()) for part in options)
    reserve = sum(term.n_bytes for term in _reserve(problem, "gpu", min(PREFILL_CHUNKS)))
    return (
        f"what is pinned to the GPU needs {(needed + reserve) / 2**30:.2f} GiB and the budget is "
        f"{problem.vram_budget_bytes / 2**30:.2f} GiB; lower gpu_layers or the context size, drop an override, or "
        "raise vram_budget."
    )


def _too_little_ram(problem: Problem, needed_bytes: int) -> str:
    return (
        f"keys and values, activations and what is streamed need {needed_bytes / 2**30:.2f} GiB of RAM and "
        f"{problem.ram_budget_bytes / 2**30:.2f} GiB are available; choose a shorter context (context_tokens), drop an "
        "override, or raise ram_budget."
    )


def _with_disk(problem: Problem, decode: Placement, chunk: int) -> Placement:
    """Parts beyond the RAM budget stay on the disk, the last first: as few as are enough, all where none are."""
    movable = [index for index in range(len(decode) - 1, 0, -1) if decode[index] == "cpu"]

    def moved(n_parts: int) -> Placement:
        on_disk = set(movable[:n_parts])
        return tuple("disk" if index in on_disk else placement for index, placement in enumerate(decode))

    def fits(n_parts: int) -> bool:
        return _ram_bytes(problem, moved(n_parts), chunk) <= problem.ram_budget_bytes

    return moved(bisect_left(range(len(movable)), True, key=fits))


def _with_embedding(problem: Problem, decode: Placement, chunk: int) -> Iterator[Placement]:
    """The embedding on the CPU, and on the GPU where the first layer is computed there, as far as there is room: then
    tokens enter without hidden states on the link. Where nothing is left for prompts to visit, on the GPU alone."""
    pinned, on_gpu = problem.limits.pinned("embedding"), ("gpu", *decode[1:])
    may_enter = pinned == "gpu" or (pinned is None and decode[1] in ON_GPU)
    enters = may_enter and any(placement in ON_GPU for placement in decode) and _fits_gpu(problem, on_gpu, chunk)
    if enters:
        yield on_gpu
    is_all = enters and all(placement in ON_GPU for placement in decode[1:])
    if not is_all and pinned != "gpu" and _fits_gpu(problem, decode, chunk):
        yield decode


def _embedding_bytes(problem: Problem, head: str) -> int:
    """GPU memory of the embedding there: none where it is the head's matrix too."""
    return 0 if problem.spec.tied_head and head == "gpu" else rounded(problem.parts[0].weight_bytes)


def _fits_gpu(problem: Problem, decode: Placement, chunk: int) -> bool:
    return _n_bytes(_memory_terms(problem, decode, decode, chunk), "gpu") <= problem.vram_budget_bytes


def _ram_bytes(problem: Problem, decode: Sequence[str], chunk: int) -> int:
    return _n_bytes(_ram_terms(problem, chunk, decode, decode), "cpu")


def _ram_terms(problem: Problem, chunk: int, decode: Sequence[str], prefill: Sequence[str]) -> list[MemoryTerm]:
    pairs = list(zip(problem.parts, decode, strict=True))
    weights = sum(part.weight_bytes for part, placement in pairs if placement in ("cpu", "stream", *SPLITS))
    kv_bytes = sum(part.kv_bytes(problem.context_tokens) for part, placement in pairs if placement not in ON_GPU)
    pinned = max(pinned_buffer_bytes(problem.parts, each) for each in (decode, prefill))
    return [
        MemoryTerm("cpu", "weights", weights),
        MemoryTerm("cpu", "keys and values", kv_bytes),
        MemoryTerm("cpu", "activations", working_bytes(problem.spec, chunk)),
        *([MemoryTerm("cpu", "pinned buffers", pinned)] if pinned else []),
        *_draft_terms(problem, "cpu"),
    ]


def _memory_terms(problem: Problem, decode: Placement, prefill: Placement, chunk: int) -> list[MemoryTerm]:
    """Every byte of the plan, device by device."""
    terms = _ram_terms(problem, chunk, decode, prefill)
    pairs = list(zip(problem.parts, decode, strict=True))
    on_disk = sum(part.weight_bytes for part, placement in pairs if placement == "disk")
    if on_disk:
        terms.append(MemoryTerm("disk", "weights", on_disk))
    if not any(placement in ON_GPU for placement in decode):
        return terms
    layers = [(part, placement) for part, placement in pairs if part.layer is not None]
    weights = sum(part_gpu_bytes(part, placement, 0) for part, placement in layers)
    kv_bytes = sum(part_gpu_bytes(part, "stream", problem.context_tokens) for part, p in layers if p in ON_GPU)
    buffers = max(stream_buffer_bytes(problem.parts, each, problem.context_tokens) for each in (decode, prefill))
    terms += [MemoryTerm("gpu", "weights", weights), MemoryTerm("gpu", "keys and values", kv_bytes)]
    terms += [MemoryTerm("gpu", "stream buffers", buffers)] if buffers else []
    embedding_bytes = _embedding_bytes(problem, decode[-1]) if decode[0] == "gpu" else 0
    terms += [MemoryTerm("gpu", "embedding", embedding_bytes)] if embedding_bytes else []
    return terms + _reserve(problem, decode[-1], chunk)


def _n_bytes(terms: Sequence[MemoryTerm], device: str) -> int:
    return sum(term.n_bytes for term in terms if term.device == device)


def _prefill_placements(problem: Problem, decode: Placement, chunk: int) -> list[Placement]:
    """Parts in RAM are computed where they lie, or visit the GPU where that is faster for a chunk and there is room.

    What fits into the buffers' room decides who may: all, the FFNs alone, which have no keys and values, or none.
    """
    found = [tuple("visit" if placement in SPLITS else placement for placement in decode)]
    may_visit = any(placement in ON_GPU for placement in decode)
    for kinds in ((BlockKind.ATTENTION, BlockKind.FFN), (BlockKind.FFN,)) if may_visit else ():
        tried = _visiting(problem, decode, chunk, kinds)
        terms = _memory_terms(problem, decode, tried, chunk)
        fits_ram = _n_bytes(terms, "cpu") <= problem.ram_budget_bytes
        if fits_ram and _n_bytes(terms, "gpu") <= problem.vram_budget_bytes:
            found.append(tried)
    return found


def _visiting(problem: Problem, decode: Placement, chunk: int, kinds: Sequence[BlockKind]) -> Placement:
    """The fastest chain for a chunk where parts of these kinds may visit."""
    options = []
    known: dict[object, PartOptions] = {}  # alike for parts of one shape
    for part, placement in zip(problem.layers, decode[1:-1], strict=True):
        key = part.shape, placement
        if key not in known:
            allowed = [placement, "visit"] if placement == "cpu" and part.kind in kinds else [placement]
            allowed = ["visit"] if placement in SPLITS else allowed
            known[key] = {each: _prefill_option(problem, part, each, chunk) for each in allowed}
        options.append(known[key])
    chain = place_chain(options, 0, problem.costs.transfer_s(chunk), ends_on_gpu=decode[-1] in ON_GPU)
    assert chain is not None, "nothing here takes memory"
    return (decode[0], *chain, decode[-1])


def _prefill_option(problem: Problem, part: Part, placement: str, chunk: int) -> Option:
    seconds = problem.costs.part_s(part, placement, chunk, chunk)
    if placement in STREAMED:
        seconds = max(seconds, problem.costs.copy_s(part, placement, chunk))
    return Option(seconds, 0, on_gpu=placement in ON_GPU)
