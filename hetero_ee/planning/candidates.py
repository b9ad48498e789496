"""The placements worth comparing, and which of them serves a typical request fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_ee.errors import UsageError
from hetero_ee.planning.costs import ON_GPU
from hetero_ee.planning.limits import MAX_DRAFT_TOKENS
from hetero_ee.planning.memory import (
    MemoryTerm,
    gpu_reserve_terms,
    part_gpu_bytes,
    rounded,
    stream_buffer_bytes,
    working_bytes,
)
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Option, chain_bytes, place_chain
from hetero_ee.planning.prediction import prompt_times
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.schedule import BEST_OF_DRAFTS, Schedule, best_schedule

REQUEST_PROMPT_TOKENS, REQUEST_TEXT_TOKENS = 512, 128  # what is made fast where decoding and prompts compete
PREFILL_CHUNKS = (512, 128)  # rows of a prompt in one pass: more read weights less often, and take more memory

Places = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """places: of every part when decoding; prefill: when a prompt is read, chunk_tokens at a time. request_s: seconds
    of a typical request."""

    chunk_tokens: int
    places: Places
    prefill: Places
    schedule: Schedule
    memory: list[MemoryTerm]
    request_s: float


def best_candidate(problem: Problem, context_tokens: int) -> Candidate:
    """The candidate of least request_s. Raises UsageError where nothing fits."""
    options = [problem.options(part, 1, context_tokens) for part in problem.layers]
    chunks = sorted({min(chunk, problem.context_tokens) for chunk in PREFILL_CHUNKS})
    found = [
        _completed(problem, places, chunk, context_tokens)
        for chunk in chunks
        for places in _placements(problem, options, chunk)
    ]
    if not found:
        raise UsageError(_does_not_fit(problem, options))
    return min(found, key=lambda candidate: candidate.request_s)


def _completed(problem: Problem, places: Places, chunk: int, context_tokens: int) -> Candidate:
    places = _with_disk(problem, places, chunk)
    prefill = _prefill_places(problem, places, chunk)
    schedule = best_schedule(problem, places, context_tokens)
    n_prompt = min(REQUEST_PROMPT_TOKENS, problem.context_tokens)
    prompt_s, _ = prompt_times(problem.costs, problem.parts, prefill, n_prompt, chunk)
    request_s = prompt_s + REQUEST_TEXT_TOKENS * schedule.round.seconds_per_token
    return Candidate(chunk, places, prefill, schedule, memory_terms(problem, places, prefill, chunk), request_s)


def _placements(problem: Problem, options: Sequence[dict[str, Option]], chunk: int) -> Iterator[Places]:
    """Everything on the CPU; then with the head on the GPU: the fastest chain, and as many first layers as fit, each
    with room for streaming prompts' weights and without."""
    head_place = problem.limits.pinned_place("head")
    if all("cpu" in option for option in options) and head_place in (None, "cpu"):
        yield ("cpu", *("cpu" for _ in options), "cpu")
    head_place = head_place or "gpu"
    reserved = sum(term.n_bytes for term in _reserve(problem, head_place, chunk))
    crossing_s = problem.costs.crossing_s(1)
    for buffer_bytes in (0, stream_buffer_bytes(problem.layers, ["stream"] * len(options))):
        budget = problem.vram_budget_bytes - reserved - buffer_bytes
        if budget < 0 or not problem.has_gpu:
            continue
        allowed = options if buffer_bytes else _without_streaming(options)
        for places in (
            place_chain(allowed, budget, crossing_s, ends_on_gpu=head_place == "gpu"),
            _prefix(allowed, budget),
        ):
            if places is not None and any(place in ON_GPU for place in places):
                yield ("cpu", *places, head_place)


def _without_streaming(options: Sequence[dict[str, Option]]) -> list[dict[str, Option]]:
    """The options but for streaming; what is pinned to it stays, and then fits only where there are buffers."""
    return [{name: o for name, o in part.items() if name != "stream"} or part for part in options]


def prefix_places(problem: Problem, n_layers: int) -> Places:
    """The first n_layers and the head on the GPU, the rest on the CPU."""
    n_parts = 2 * n_layers
    return ("cpu", *["gpu"] * n_parts, *["cpu"] * (len(problem.layers) - n_parts), "gpu")


def _prefix(options: Sequence[dict[str, Option]], budget_bytes: int) -> Places | None:
    """The first layers on the GPU, whole, as many as fit; the rest where it is pinned, else on the CPU."""
    for n_parts in range(len(options), -1, -2):
        wanted = ["gpu"] * n_parts + ["cpu"] * (len(options) - n_parts)
        places = tuple(w if w in option else next(iter(option)) for w, option in zip(wanted, options, strict=True))
        if chain_bytes(options, places) <= budget_bytes:
            return places
    return None


def _reserve(problem: Problem, head_place: str, chunk: int) -> list[MemoryTerm]:
    drafts = problem.limits.draft_tokens or BEST_OF_DRAFTS
    assert drafts <= MAX_DRAFT_TOKENS
    terms = gpu_reserve_terms(problem.spec, problem.parts, chunk, drafts)
    return [term for term in terms if head_place == "gpu" or term.name not in ("head", "logits")]


def _does_not_fit(problem: Problem, options: Sequence[dict[str, Option]]) -> str:
    needed = sum(min(option.gpu_bytes for option in part.values()) for part in options)
    reserve = sum(term.n_bytes for term in _reserve(problem, "gpu", min(PREFILL_CHUNKS)))
    return (
        f"what is pinned to the GPU needs {(needed + reserve) / 2**30:.2f} GiB and the budget is "
        f"{problem.vram_budget_bytes / 2**30:.2f} GiB; lower --gpu-layers or the context size, drop an override, or "
        "raise --vram-budget."
    )


def _with_disk(problem: Problem, places: Places, chunk: int) -> Places:
    """Parts beyond the RAM budget stay on the disk, the last first. Raises UsageError where the rest is too much."""
    places_now = list(places)
    for index in range(len(places) - 1, 0, -1):
        if _ram_bytes(problem, places_now, chunk) <= problem.ram_budget_bytes:
            break
        if places_now[index] == "cpu":
            places_now[index] = "disk"
    needed = _ram_bytes(problem, places_now, chunk)
    if needed > problem.ram_budget_bytes:
        raise UsageError(
            f"context and activations alone need {needed / 2**30:.2f} GiB of RAM and "
            f"{problem.ram_budget_bytes / 2**30:.2f} GiB can be had; choose a shorter context (--ctx-size)."
        )
    return tuple(places_now)


def _ram_bytes(problem: Problem, places: Sequence[str], chunk: int) -> int:
    return sum(term.n_bytes for term in _ram_terms(problem, places, chunk))


def _ram_terms(problem: Problem, places: Sequence[str], chunk: int) -> list[MemoryTerm]:
    pairs = list(zip(problem.parts, places, strict=True))
    weights = sum(part.weight_bytes for part, place in pairs if place in ("cpu", "stream"))
    kv_bytes = sum(part.kv_bytes(problem.context_tokens) for part, place in pairs if place not in ON_GPU)
    return [
        MemoryTerm("cpu", "weights", weights),
        MemoryTerm("cpu", "keys and values", kv_bytes),
        MemoryTerm("cpu", "activations", working_bytes(problem.spec, chunk)),
    ]


def memory_terms(problem: Problem, places: Places, prefill: Places, chunk: int) -> list[MemoryTerm]:
    """Every byte of the plan, device by device."""
    terms = _ram_terms(problem, places, chunk)
    pairs = list(zip(problem.parts, places, strict=True))
    on_disk = sum(part.weight_bytes for part, place in pairs if place == "disk")
    if on_disk:
        terms.append(MemoryTerm("disk", "weights", on_disk))
    if not any(place in ON_GPU for place in places):
        return terms
    layers = [(part, place) for part, place in pairs if part.layer is not None]
    weights = sum(rounded(part.weight_bytes) for part, place in layers if place == "gpu")
    kv_bytes = sum(part_gpu_bytes(part, "stream", problem.context_tokens) for part, place in layers if place in ON_GPU)
    buffers = max(stream_buffer_bytes(problem.parts, each) for each in (places, prefill))
    terms += [MemoryTerm("gpu", "weights", weights), MemoryTerm("gpu", "keys and values", kv_bytes)]
    terms += [MemoryTerm("gpu", "stream buffers", buffers)] if buffers else []
    return terms + _reserve(problem, places[-1], chunk)


def _prefill_places(problem: Problem, places: Places, chunk: int) -> Places:
    """Parts in RAM are computed where they lie, or streamed where that is faster for a whole chunk and buffers fit."""
    spare = problem.vram_budget_bytes - sum(
        term.n_bytes for term in memory_terms(problem, places, places, chunk) if term.device == "gpu"
    )
    options = []
    for part, place in zip(problem.layers, places[1:-1], strict=True):
        allowed = ["cpu", "stream"] if place == "cpu" and problem.has_gpu and places[-1] in ON_GPU else [place]
        options.append({each: _prefill_option(problem, part, each, chunk) for each in allowed})
    streamed = place_chain(options, 0, problem.costs.crossing_s(chunk), ends_on_gpu=places[-1] in ON_GPU)
    assert streamed is not None, "nothing here takes memory"
    if stream_buffer_bytes(problem.layers, streamed) > spare:
        return places
    found = (places[0], *streamed, places[-1])
    costs = problem.costs
    return min((places, found), key=lambda each: costs.pass_time(problem.parts, each, chunk, chunk).seconds)


def _prefill_option(problem: Problem, part: Part, place: str, chunk: int) -> Option:
    seconds = problem.costs.part_s(part, place, chunk, chunk)
    if place == "stream":
        seconds = max(seconds, problem.costs.copy_s(part))
    return Option(seconds, 0, on_gpu=place in ON_GPU)
