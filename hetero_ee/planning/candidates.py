"""The placements worth comparing, and which of them serves a typical request fastest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero_ee.errors import UsageError
from hetero_ee.models.blocks import BlockKind
from hetero_ee.planning.limits import MAX_DRAFT_LENGTH
from hetero_ee.planning.neuron_split import SplitTimes, place_split_chain
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Option, chain_bytes, place_chain
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.schedule import BEST_OF_DRAFTS, Schedule, best_schedule
from hetero_ee.planning.split_parts import split_times, with_splits
from hetero_ee.planning.times.costs import ON_GPU, SPLIT, STREAMED
from hetero_ee.planning.times.memory import (
    MemoryTerm,
    gpu_reserve_terms,
    part_gpu_bytes,
    pinned_buffer_bytes,
    rounded,
    stream_buffer_bytes,
    working_bytes,
)
from hetero_ee.planning.times.prompts import Ways, prompt_s

REQUEST_PROMPT_TOKENS, REQUEST_TEXT_TOKENS = 512, 128  # what is made fast where decoding and prompts compete
PINNED = "pinned buffers"
PREFILL_CHUNKS = (512, 128)  # rows of a prompt in one pass: more read weights less often, and take more memory

Places = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """problem: with the parts as they are split. places: of every part when decoding; prefill: when a prompt is read,
    chunk_tokens at a time. request_s: seconds of a typical request."""

    problem: Problem
    chunk_tokens: int
    places: Places
    prefill: Places
    schedule: Schedule
    memory: list[MemoryTerm]
    request_s: float


def best_candidate(problem: Problem, context_tokens: int) -> Candidate:
    """The candidate of least request_s that keeps the budgets. Raises UsageError where none does."""
    options = problem.layer_options(1, context_tokens)
    chunks = sorted({min(chunk, problem.context_tokens) for chunk in PREFILL_CHUNKS})
    placed = [(_with_disk(problem, p, chunk), chunk) for chunk in chunks for p in _placements(problem, options, chunk)]
    if not placed:
        raise UsageError(_does_not_fit(problem, options))
    fitting = [each for each in placed if _ram_bytes(problem, *each) <= problem.ram_budget_bytes]
    if not fitting:
        raise UsageError(_too_little_ram(problem, min(_ram_bytes(problem, *each) for each in placed)))
    every = (_completed(problem, places, chunk, context_tokens) for places, chunk in dict.fromkeys(fitting))
    found = [each for each in every if _gpu_bytes(each.memory) <= problem.vram_budget_bytes]
    if not found:
        raise UsageError(_does_not_fit(problem, options))
    splits = split_times(problem, options)
    found += [each for chunk in chunks for each in _split_candidates(problem, options, splits, chunk, context_tokens)]
    return min(found, key=lambda candidate: candidate.request_s)


def _completed(problem: Problem, places: Places, chunk: int, context_tokens: int) -> Candidate:
    schedule = best_schedule(problem, places, context_tokens)
    n_prompt = min(REQUEST_PROMPT_TOKENS, problem.context_tokens)
    prompts_s = {
        prefill: prompt_s(problem.costs, problem.parts, Ways(prefill, places), n_prompt, chunk)
        for prefill in _prefill_ways(problem, places, chunk)
    }
    prefill, read_s = min(prompts_s.items(), key=lambda item: item[1])
    request_s = read_s + REQUEST_TEXT_TOKENS * schedule.round.seconds_per_token
    return Candidate(
        problem, chunk, places, prefill, schedule, memory_terms(problem, places, prefill, chunk), request_s
    )


def _split_candidates(
    problem: Problem,
    options: Sequence[dict[str, Option]],
    splits: Mapping[int, SplitTimes],
    chunk: int,
    context_tokens: int,
) -> Iterator[Candidate]:
    """The fastest chains with FFNs in two, for full mode, where it is known how often neurons are active."""
    if not splits or problem.limits.mode == "exact" or problem.limits.pinned_place("head") == "cpu":
        return
    for allowed, left in _rooms(problem, options, "gpu", chunk):
        chain = place_split_chain(allowed, splits, left, problem.costs.transfer_s(1), ends_on_gpu=True)
        if chain is None or not chain.n_blocks:
            continue
        split = with_splits(problem, chain.n_blocks)
        places = _with_disk(split, ("cpu", *(place or SPLIT for place in chain.places), "gpu"), chunk)
        if _ram_bytes(split, places, chunk) <= problem.ram_budget_bytes:
            candidate = _completed(split, places, chunk, context_tokens)
            if _gpu_bytes(candidate.memory) <= problem.vram_budget_bytes:
                yield candidate


def _placements(problem: Problem, options: Sequence[dict[str, Option]], chunk: int) -> Iterator[Places]:
    """Everything on the CPU; then with the head on the GPU: the fastest chain, and as many first layers as fit, each
    with room for streaming prompts' weights and without."""
    pinned_head = problem.limits.pinned_place("head")
    if all("cpu" in option for option in options) and pinned_head in (None, "cpu"):
        yield ("cpu", *("cpu" for _ in options), "cpu")
    if not problem.has_gpu:
        return
    head_place = pinned_head or "gpu"
    transfer_s = problem.costs.transfer_s(1)
    for allowed, left in _rooms(problem, options, head_place, chunk):
        chain = place_chain(allowed, left, transfer_s, ends_on_gpu=head_place == "gpu")
        for places in (chain, _prefix(allowed, left)):
            if places is not None and (pinned_head == "gpu" or any(place in ON_GPU for place in places)):
                yield ("cpu", *places, head_place)


def _rooms(
    problem: Problem, options: Sequence[dict[str, Option]], head_place: str, chunk: int
) -> Iterator[tuple[Sequence[dict[str, Option]], int]]:
    """What may be chosen and the bytes left for it, with and without buffers for streaming."""
    budget = problem.vram_budget_bytes - sum(term.n_bytes for term in _reserve(problem, head_place, chunk))
    for buffer_bytes in _buffers(problem, options):
        if budget >= buffer_bytes:
            yield options if buffer_bytes else _without_streaming(options), budget - buffer_bytes


def _buffers(problem: Problem, options: Sequence[dict[str, Option]]) -> list[int]:
    """Bytes to set aside for streaming: none, what weights take, and what weights with keys and values take."""
    streamed, visiting = (
        stream_buffer_bytes(problem.layers, [place] * len(options), problem.context_tokens)
        for place in ("stream", "visit")
    )
    is_pinned = any(set(option) == {"stream"} for option in options)
    return [streamed, visiting] if is_pinned else [0, streamed, visiting]


def _without_streaming(options: Sequence[dict[str, Option]]) -> list[dict[str, Option]]:
    """The options but for streaming, to which nothing is pinned."""
    return [{name: option for name, option in part.items() if name != "stream"} for part in options]


def prefix_places(problem: Problem, n_layers: int) -> Places:
    """The first n_layers and the head on the GPU, the rest on the CPU."""
    n_parts = 2 * n_layers
    return ("cpu", *["gpu"] * n_parts, *["cpu"] * (len(problem.layers) - n_parts), "gpu")


def _prefix(options: Sequence[dict[str, Option]], budget_bytes: int) -> Places | None:
    """The first layers on the GPU, whole, as many as fit; the rest where it is pinned, else on the CPU."""
    on_gpu, on_cpu = ([w if w in option else next(iter(option)) for option in options] for w in ("gpu", "cpu"))
    n_bytes = chain_bytes(options, on_gpu)
    for n_parts in range(len(options), -1, -2):
        if n_bytes <= budget_bytes:
            return (*on_gpu[:n_parts], *on_cpu[n_parts:])
        last = slice(max(0, n_parts - 2), n_parts)
        n_bytes += chain_bytes(options[last], on_cpu[last]) - chain_bytes(options[last], on_gpu[last])
    return None


def _reserve(problem: Problem, head_place: str, chunk: int) -> list[MemoryTerm]:
    drafts = problem.limits.draft_length or BEST_OF_DRAFTS
    assert drafts <= MAX_DRAFT_LENGTH
    terms = gpu_reserve_terms(problem.spec, problem.parts, problem.context_tokens, chunk, drafts)
    return [term for term in terms if head_place == "gpu" or term.name not in ("head", "logits")]


def _does_not_fit(problem: Problem, options: Sequence[dict[str, Option]]) -> str:
    needed = sum(min(option.gpu_bytes for option in part.values()) for part in options)
    reserve = sum(term.n_bytes for term in _reserve(problem, "gpu", min(PREFILL_CHUNKS)))
    return (
        f"what is pinned to the GPU needs {(needed + reserve) / 2**30:.2f} GiB and the budget is "
        f"{problem.vram_budget_bytes / 2**30:.2f} GiB; lower --gpu-layers or the context size, drop an override, or "
        "raise --vram-budget."
    )


def _too_little_ram(problem: Problem, needed_bytes: int) -> str:
    return (
        f"keys and values, activations and what is streamed need {needed_bytes / 2**30:.2f} GiB of RAM and "
        f"{problem.ram_budget_bytes / 2**30:.2f} GiB can be had; choose a shorter context (--ctx-size), drop an "
        "override, or raise --ram-budget."
    )


def _with_disk(problem: Problem, places: Places, chunk: int) -> Places:
    """Parts beyond the RAM budget stay on the disk, the last first."""
    places_now = list(places)
    for index in range(len(places) - 1, 0, -1):
        if _ram_bytes(problem, places_now, chunk) <= problem.ram_budget_bytes:
            break
        if places_now[index] == "cpu":
            places_now[index] = "disk"
    return tuple(places_now)


def _ram_bytes(problem: Problem, places: Sequence[str], chunk: int) -> int:
    return sum(term.n_bytes for term in _ram_terms(problem, places, chunk))


def _ram_terms(problem: Problem, places: Sequence[str], chunk: int) -> list[MemoryTerm]:
    pairs = list(zip(problem.parts, places, strict=True))
    weights = sum(part.cpu_bytes for part, place in pairs if place in ("cpu", "stream", SPLIT))
    kv_bytes = sum(part.kv_bytes(problem.context_tokens) for part, place in pairs if place not in ON_GPU)
    return [
        MemoryTerm("cpu", "weights", weights),
        MemoryTerm("cpu", "keys and values", kv_bytes),
        MemoryTerm("cpu", "activations", working_bytes(problem.spec, chunk)),
        *_pinned_terms(problem, places),
    ]


def _pinned_terms(problem: Problem, *ways: Sequence[str]) -> list[MemoryTerm]:
    """What streamed weights go through on their way to the GPU."""
    n_bytes = max(pinned_buffer_bytes(problem.parts, places) for places in ways)
    return [MemoryTerm("cpu", PINNED, n_bytes)] if n_bytes else []


def memory_terms(problem: Problem, places: Places, prefill: Places, chunk: int) -> list[MemoryTerm]:
    """Every byte of the plan, device by device."""
    terms = [term for term in _ram_terms(problem, places, chunk) if term.name != PINNED]
    terms += _pinned_terms(problem, places, prefill)
    pairs = list(zip(problem.parts, places, strict=True))
    on_disk = sum(part.weight_bytes for part, place in pairs if place == "disk")
    if on_disk:
        terms.append(MemoryTerm("disk", "weights", on_disk))
    if not any(place in ON_GPU for place in places):
        return terms
    layers = [(part, place) for part, place in pairs if part.layer is not None]
    weights = sum(rounded(part.weight_bytes) for part, place in layers if place == "gpu")
    weights += sum(rounded(part.gpu_bytes) for part, place in layers if place == SPLIT)
    kv_bytes = sum(part_gpu_bytes(part, "stream", problem.context_tokens) for part, place in layers if place in ON_GPU)
    buffers = max(stream_buffer_bytes(problem.parts, each, problem.context_tokens) for each in (places, prefill))
    terms += [MemoryTerm("gpu", "weights", weights), MemoryTerm("gpu", "keys and values", kv_bytes)]
    terms += [MemoryTerm("gpu", "stream buffers", buffers)] if buffers else []
    return terms + _reserve(problem, places[-1], chunk)


def _gpu_bytes(terms: Sequence[MemoryTerm]) -> int:
    return sum(term.n_bytes for term in terms if term.device == "gpu")


def _prefill_ways(problem: Problem, places: Places, chunk: int) -> list[Places]:
    """Parts in RAM are computed where they lie, or visit the GPU where that is faster for a chunk and there is room.

    What fits into the buffers' room decides who may: all, the FFNs alone, which have no keys and values, or none.
    """
    found = [places]
    may_visit = problem.has_gpu and places[-1] in ON_GPU
    for kinds in ((BlockKind.ATTENTION, BlockKind.FFN), (BlockKind.FFN,)) if may_visit else ():
        tried = _visiting(problem, places, chunk, kinds)
        terms = memory_terms(problem, places, tried, chunk)
        fits_ram = sum(term.n_bytes for term in terms if term.device == "cpu") <= problem.ram_budget_bytes
        if fits_ram and _gpu_bytes(terms) <= problem.vram_budget_bytes:
            found.append(tried)
    return found


def _visiting(problem: Problem, places: Places, chunk: int, kinds: Sequence[BlockKind]) -> Places:
    """The fastest chain for a chunk where parts of these kinds may visit."""
    options = []
    known: dict[object, dict[str, Option]] = {}  # alike for parts of one shape
    for part, place in zip(problem.layers, places[1:-1], strict=True):
        key = part.shape, part.split, place
        if key not in known:
            allowed = [place, "visit"] if place in ("cpu", SPLIT) and part.kind in kinds else [place]
            known[key] = {each: _prefill_option(problem, part, each, chunk) for each in allowed}
        options.append(known[key])
    chain = place_chain(options, 0, problem.costs.transfer_s(chunk), ends_on_gpu=places[-1] in ON_GPU)
    assert chain is not None, "nothing here takes memory"
    return (places[0], *chain, places[-1])


def _prefill_option(problem: Problem, part: Part, place: str, chunk: int) -> Option:
    seconds = problem.costs.part_s(part, place, chunk, chunk)
    if place == SPLIT:
        return Option(seconds + 2 * problem.costs.transfer_s(chunk), 0, on_gpu=None)
    if place in STREAMED:
        seconds = max(seconds, problem.costs.copy_s(part, place, chunk))
    return Option(seconds, 0, on_gpu=place in ON_GPU)
