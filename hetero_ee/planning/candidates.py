"""Compares placements of the whole model, and chooses the one that serves a typical request fastest."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

from hetero_ee.errors import UsageError
from hetero_ee.options.engine import MODEL_OPTIONS, PLAN_OPTIONS
from hetero_ee.planning.budget import (
    draft_terms,
    embedding_bytes,
    fits_gpu,
    fits_ram,
    memory_terms,
    ram_bytes,
    reserve_terms,
)
from hetero_ee.planning.chain import Chain, PartOptions, chain_bytes, place_chain
from hetero_ee.planning.parts import Part, layer_starts, parts_by_state
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import SEQUENCE
from hetero_ee.planning.prefill import least_streamed, prefill_chains
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.schedule import BEST_OF_DRAFTS, WORTH_IT, Schedule, best_schedule, full_schedule
from hetero_ee.planning.statistics import PromptReading
from hetero_ee.planning.times.early_exits import Passes
from hetero_ee.planning.times.memory import (
    DRAFT_HEAD,
    DRAFT_MODEL,
    DRAFT_ROWS,
    MemoryTerm,
    part_gpu_bytes,
    stream_buffer_bytes,
)
from hetero_ee.planning.times.prompts import Placements, prompt_s
from hetero_ee.planning.times.threads import REQUEST_PROMPT_TOKENS, REQUEST_TEXT_TOKENS
from hetero_ee_profiles.units import GIB

MOST_DEPTHS = 8  # of an early-exit mode that chains are made for: each costs some 10 ms
PREFILL_CHUNKS = (512, 128)  # tokens of a prompt per pass: larger ones read weights less often and need more memory
LARGER_CHUNKS = (1024, 2048, 4096, 8192)  # tried for models that are split: streaming is the same for a larger chunk
LONG_PROMPT_TOKENS, LONG_TEXT_TOKENS = 8192, 512  # of the long requests that they are for, at most the context

Trial = tuple[Chain, int]  # placements when decoding, and tokens of a prompt's chunk


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible plan for the whole model, with its expected times."""

    problem: Problem
    context_tokens: int  # context length for which the times hold
    chunk_tokens: int  # of a prompt per pass
    placements: Placements
    schedule: Schedule
    memory: list[MemoryTerm]
    read_s: float  # of a typical prompt
    request_s: float  # of a typical request

    @property
    def decode(self) -> Chain:
        return tuple(self.placements.decode)

    @property
    def prefill(self) -> Chain:
        return tuple(self.placements.prefill)

    def long_request_s(self) -> float:
        """Return the seconds of a request with a long prompt, which may fill the context."""
        return self.prompt_s(LONG_PROMPT_TOKENS) + LONG_TEXT_TOKENS * self.schedule.token_s

    def prompt_s(self, n_tokens: int) -> float:
        """Return the seconds to read a prompt of n_tokens, or of the whole context if that is shorter."""
        problem, n_tokens = self.problem, min(n_tokens, self.problem.context_tokens)
        return prompt_s(problem.costs, problem.parts, self.placements, n_tokens, self.chunk_tokens, self.reading)

    @property
    def reading(self) -> PromptReading | None:
        """Cost of a draft source that reads prompts; None if there isn't one."""
        return self.problem.statistics.reading(self.schedule.drafts)


Measure = Callable[[Candidate], float]
TYPICAL_S = attrgetter("request_s")


def best_candidate(problem: Problem, context_tokens: int) -> Candidate:
    """Return the fastest candidate within the budgets. Drafts are tried on the CPU and on the GPU.

    If the draft source fits on neither device, the candidate has no drafts.

    Raises:
        UsageError: if no candidate fits.
    """
    try:
        return _best_candidate(_by_draft_device(problem), context_tokens)
    except UsageError:
        if problem.limits.mode == "exact" or not draft_terms(problem, "cpu"):
            raise
    return _best_candidate([replace(problem, statistics=replace(problem.statistics, drafts=None))], context_tokens)


def _by_draft_device(problem: Problem) -> list[Problem]:
    """Return the problem with drafts computed by the CPU and, if possible, a second one with drafts by the GPU."""
    drafts = problem.statistics.drafts
    if drafts is None or drafts.by_gpu is None or not problem.has_gpu or problem.limits.mode not in (None, "exact"):
        return [problem]
    return [problem, replace(problem, statistics=replace(problem.statistics, drafts=drafts.by_gpu))]


def _best_candidate(problems: Sequence[Problem], context_tokens: int) -> Candidate:
    """Return the fastest candidate for a typical request, or one with larger chunks that serve long requests better.

    Both kinds of requests count alike, relative to the times without larger chunks, whose VRAM layers could use: one
    measure for all problems, which differ in the device of their drafts.
    """
    asked = problems[0].limits.chunk_tokens
    if asked and asked <= max(PREFILL_CHUNKS):
        return _best_of(problems, context_tokens, (asked,))
    best = _best_of(problems, context_tokens, PREFILL_CHUNKS)
    is_split = len({placement == Placement.GPU for placement in best.decode[1:]}) > 1
    usual_s, long_s = best.request_s, best.long_request_s()

    def relative_s(candidate: Candidate) -> float:
        return candidate.request_s / usual_s + candidate.long_request_s() / long_s

    if asked:
        return _best_of(problems, context_tokens, (asked,), relative_s)
    for chunk in LARGER_CHUNKS if is_split else ():
        if chunk > problems[0].context_tokens:
            break
        with suppress(UsageError):
            larger = _best_of(problems, context_tokens, (chunk,), relative_s)
            best = larger if relative_s(larger) < WORTH_IT * relative_s(best) else best
    return best


def _best_of(
    problems: Sequence[Problem], context_tokens: int, chunks: Sequence[int], key: Measure = TYPICAL_S
) -> Candidate:
    """Return the best candidate of all problems. Raises: UsageError: the first problem's, if none has a candidate."""
    found, refusals = list[Candidate](), list[UsageError]()
    for each in problems:
        try:
            found.append(_best_with_chunks(each, context_tokens, chunks, key))
        except UsageError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    return min(found, key=key)


def _best_with_chunks(problem: Problem, context_tokens: int, chunks: Sequence[int], key: Measure) -> Candidate:
    options = problem.layer_options(context_tokens)
    trials = _trials(problem, options, context_tokens, chunks)
    if not trials:
        raise _does_not_fit(problem, options)
    fitting = [trial for trial in trials if fits_ram(problem, *trial)]
    if not fitting:
        raise _too_little_ram(problem, min(ram_bytes(problem, *trial) for trial in trials))
    schedules = {decode: best_schedule(problem, decode, context_tokens) for decode, _ in dict.fromkeys(fitting)}
    found = [completed(problem, decode, chunk, context_tokens, schedules[decode], key) for decode, chunk in fitting]
    return min(found, key=key)


def _trials(
    problem: Problem, options: Sequence[PartOptions], context_tokens: int, chunks: Sequence[int]
) -> list[Trial]:
    """Combine every chain with every chunk size, so that a plan whose parts are pinned by the user is found again."""
    chunks = sorted({min(chunk, problem.context_tokens) for chunk in chunks})
    every_option = [
        one for each in (options, *_exit_options(problem, context_tokens)) for one in _by_state(problem, each)
    ]
    chains: dict[Chain, None] = {}
    for chunk in chunks:
        for each in every_option:
            chains |= dict.fromkeys(_chains(problem, each, chunk))
    if draft_terms(problem, "gpu"):
        chains = {chain: None for chain in chains if chain[-1].on_gpu}
    pairs = itertools.product(chains, chunks)
    placed = ((chain, chunk) for each, chunk in pairs for chain in _with_embedding(problem, each, chunk))
    return list(dict.fromkeys((_with_disk(problem, *trial), trial[1]) for trial in placed))


def _by_state(problem: Problem, options: Sequence[PartOptions]) -> Iterator[list[PartOptions]]:
    """Yield the options with each choice of a device for layers that read the same keys and values."""
    groups = parts_by_state(problem.layers)
    for devices in itertools.product((False, True), repeat=len(groups)):
        found = list(options)
        for on_gpu, indices in zip(devices, groups, strict=True):
            for index in indices:
                found[index] = {name: each for name, each in found[index].items() if each.on_gpu == on_gpu}
        if all(found):
            yield found


def _exit_options(problem: Problem, context_tokens: int) -> Iterator[list[PartOptions]]:
    """Yield the layers' options for early-exit modes, where a layer costs as much as the share of tokens that reach it.

    Layers that few tokens reach then go to the slowest device. At most MOST_DEPTHS of the known depths are used.
    """
    depths, most = problem.depths, problem.limits.draft_length or BEST_OF_DRAFTS
    stride = max(1, -(-len(depths) // MOST_DEPTHS))
    for known in depths[::stride]:
        yield problem.layer_options(context_tokens, Passes.of(known, most))


def cpu_alone_s(problem: Problem, context_tokens: int) -> float | None:
    """Return the seconds per token of full mode on the CPU without a GPU; None if RAM is too small."""
    chunk = min(*PREFILL_CHUNKS, problem.context_tokens)
    decode = _with_disk(problem, (Placement.CPU,) * len(problem.parts), chunk)
    if not fits_ram(problem, decode, chunk):
        return None
    return full_schedule(problem, decode, context_tokens).token_s


def bytes_for_all(problem: Problem) -> int:
    """Return the VRAM that the whole model on the GPU needs, apart from its embedding."""
    layers = sum(part_gpu_bytes(part, Placement.GPU, problem.kv_bytes(part)) for part in problem.layers)
    reserve = reserve_terms(problem, Placement.GPU, min(*PREFILL_CHUNKS, problem.context_tokens))
    return layers + sum(term.n_bytes for term in reserve)


def completed(
    problem: Problem,
    decode: Chain,
    chunk: int,
    context_tokens: int,
    schedule: Schedule,
    key: Measure = TYPICAL_S,
) -> Candidate:
    """Complete a candidate that decodes by `schedule`, or in full mode if drafts slow prompts more than they save."""
    schedules = [schedule]
    if problem.limits.mode is None and problem.statistics.reading(schedule.drafts) is not None:
        full = full_schedule(problem, decode, context_tokens)
        schedules.append(replace(full, other_mode_s=schedule.token_s))
    prefills = prefill_chains(problem, decode, chunk)
    found = [_with_prefill(problem, decode, prefills, chunk, context_tokens, each) for each in schedules]
    return min(found, key=key)


def _with_prefill(
    problem: Problem, decode: Chain, prefills: Sequence[Chain], chunk: int, context_tokens: int, schedule: Schedule
) -> Candidate:
    """Return the candidate whose prefill placements, one of `prefills`, read a typical prompt fastest.

    Chunks that are larger than a typical prompt are for long ones.
    """
    n_prompt, costs, parts = min(REQUEST_PROMPT_TOKENS, problem.context_tokens), problem.costs, problem.parts
    reading = problem.statistics.reading(schedule.drafts)
    n_read = max(n_prompt, chunk)
    prompts_s = {
        prefill: prompt_s(costs, parts, Placements(prefill, decode), n_read, chunk, reading) for prefill in prefills
    }
    prefill, read_s = min(prompts_s.items(), key=lambda item: item[1])
    placements = Placements(prefill, decode, least_streamed(problem, decode, prefill, chunk))
    if n_read > n_prompt:
        read_s = prompt_s(costs, parts, placements, n_prompt, chunk, reading)
    request_s = read_s + REQUEST_TEXT_TOKENS * schedule.token_s
    memory = memory_terms(problem, decode, prefill, chunk)
    if schedule.drafts != SEQUENCE:
        memory = [term for term in memory if term.name not in (DRAFT_HEAD, DRAFT_MODEL, DRAFT_ROWS)]
    return Candidate(problem, context_tokens, chunk, placements, schedule, memory, read_s, request_s)


def _chains(problem: Problem, options: Sequence[PartOptions], chunk: int) -> Iterator[Chain]:
    """Yield decode placements worth comparing.

    They are: the whole model on the CPU and, with a GPU, the fastest chain and the one with as many first layers on the
    GPU as fit. Chains that use the GPU come in versions with and without VRAM for streaming weights.
    """
    pinned_head = problem.pinned(problem.head)
    if all(Placement.CPU in option for option in options) and pinned_head in (None, Placement.CPU):
        yield (Placement.CPU,) * len(problem.parts)
    if not problem.has_gpu:
        return
    head = pinned_head or Placement.GPU
    for allowed, left_bytes in _rooms(problem, options, head, chunk):
        fastest = place_chain(allowed, left_bytes, problem.costs.transfer_s(1), ends_on_gpu=head == Placement.GPU)
        for layers in (fastest, _first_layers(problem, allowed, left_bytes)):
            if layers is None:
                continue
            if pinned_head == Placement.GPU or any(placement.on_gpu for placement in layers):
                yield (Placement.CPU, *layers, head)


def _rooms(
    problem: Problem, options: Sequence[PartOptions], head: Placement, chunk: int
) -> Iterator[tuple[Sequence[PartOptions], int]]:
    """Yield pairs of the options that layers may choose from and the VRAM left for them.

    Without stream buffers, options that need buffers are left out. Buffers are tried in two sizes: for weights only,
    and for weights with the KV cache.
    """
    budget = problem.vram_budget_bytes - sum(term.n_bytes for term in reserve_terms(problem, head, chunk))
    if problem.overrides.pinned("embedding") == Placement.GPU:
        budget -= embedding_bytes(problem, head)
    buffers = [
        stream_buffer_bytes(problem.layers, [placement] * len(options), problem.context_tokens)
        for placement in (Placement.STREAM, Placement.VISIT)
    ]
    resident = [_resident(*pair) for pair in zip(problem.layers, options, strict=True)]
    if all(resident):  # nothing is pinned to be streamed
        buffers = [0, *buffers]
    for buffer_bytes in buffers:
        if budget >= buffer_bytes:
            yield options if buffer_bytes else resident, budget - buffer_bytes


def _resident(part: Part, options: PartOptions) -> PartOptions:
    """Return a part's options that need no stream buffers."""
    return {placement: option for placement, option in options.items() if not part.needs_buffers(placement)}


def _first_layers(problem: Problem, options: Sequence[PartOptions], budget_bytes: int) -> Chain | None:
    """Return a chain with as many whole first layers on the GPU as fit, and the others on the CPU or where pinned."""
    on_gpu, on_cpu = _preferring(options, Placement.GPU), _preferring(options, Placement.CPU)
    n_bytes, ends = chain_bytes(options, on_gpu), [start - 1 for start in layer_starts(problem.parts)]
    for n_parts, n_fewer in pairwise([*reversed(ends), 0]):
        if n_bytes <= budget_bytes:
            return (*on_gpu[:n_parts], *on_cpu[n_parts:])
        last = slice(n_fewer, n_parts)
        n_bytes += chain_bytes(options[last], on_cpu[last]) - chain_bytes(options[last], on_gpu[last])
    return None


def _preferring(options: Sequence[PartOptions], placement: Placement) -> list[Placement]:
    return [placement if placement in part else next(iter(part)) for part in options]


def _does_not_fit(problem: Problem, options: Sequence[PartOptions]) -> UsageError:
    needed = sum(min(option.gpu_bytes for option in part.values()) for part in options)
    reserve = sum(term.n_bytes for term in reserve_terms(problem, Placement.GPU, min(PREFILL_CHUNKS)))
    return UsageError(
        f"what is pinned to the GPU needs {(needed + reserve) / GIB:.2f} GiB and the budget is "
        f"{problem.vram_budget_bytes / GIB:.2f} GiB; lower ",
        PLAN_OPTIONS["gpu_layers"],
        " or the context size, drop an ",
        PLAN_OPTIONS["override"],
        ", or raise ",
        PLAN_OPTIONS["vram_budget"],
        ".",
    )


def _too_little_ram(problem: Problem, needed_bytes: int) -> UsageError:
    return UsageError(
        f"keys and values, activations and what is streamed need {needed_bytes / GIB:.2f} GiB of RAM and "
        f"{problem.ram_budget_bytes / GIB:.2f} GiB are available; choose a shorter context (",
        MODEL_OPTIONS["context_tokens"],
        "), drop an ",
        PLAN_OPTIONS["override"],
        ", or raise ",
        PLAN_OPTIONS["ram_budget"],
        ".",
    )


def _with_disk(problem: Problem, decode: Chain, chunk: int) -> Chain:
    """Move as few CPU parts to the disk as the RAM budget requires: experts, of which a token reads few, before others.

    The last parts are the first to go.
    """
    parts, places = problem.parts, range(len(decode) - 1, 0, -1)
    able = [i for i in places if decode[i] == Placement.CPU or (decode[i].is_split and parts[i].has_experts)]
    movable = sorted(able, key=lambda place: not parts[place].has_experts)

    def moved(n_parts: int) -> Chain:
        on_disk = set(movable[:n_parts])
        return tuple(each.from_disk if place in on_disk else each for place, each in enumerate(decode))

    def fits(n_parts: int) -> bool:
        return fits_ram(problem, moved(n_parts), chunk)

    return decode if fits(0) else moved(bisect_left(range(len(movable)), True, key=fits))


def _with_embedding(problem: Problem, decode: Chain, chunk: int) -> Iterator[Chain]:
    """Yield the chain with the embedding on the GPU, on the CPU, or both versions, as far as they fit.

    If the embedding and the first layer are on the GPU, no hidden states have to be copied to it. If all layers are on
    the GPU, only the version with the embedding on the GPU is tried.
    """
    pinned, on_gpu = problem.overrides.pinned("embedding"), (Placement.GPU, *decode[1:])
    may_enter = pinned == Placement.GPU or (pinned is None and decode[1].on_gpu)
    uses_gpu = any(placement.on_gpu for placement in decode)
    enters = may_enter and uses_gpu and fits_gpu(problem, on_gpu, chunk)
    if enters:
        yield on_gpu
    is_all = enters and all(placement == Placement.GPU for placement in decode[1:])
    if not is_all and pinned != Placement.GPU and fits_gpu(problem, decode, chunk):
        yield decode
