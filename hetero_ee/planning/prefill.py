"""Chooses where parts are computed while a prompt is read, given their placements when decoding."""

from hetero_ee.layers.state import MAX_DECODE_TOKENS, KvState
from hetero_ee.planning.budget import memory_terms, n_bytes
from hetero_ee.planning.chain import Chain, Option, PartOptions, place_chain
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.times.prompts import Placements, prompt_s


def prefill_chains(problem: Problem, decode: Chain, chunk_tokens: int) -> list[Chain]:
    """Return the prefill placements worth comparing for these decode placements.

    The first one leaves parts where they are. In the others, parts in RAM also use the placement "visit" if that is
    faster for a chunk: all parts, or only those without a KV cache. Of these there is a version in which some parts
    stay, so that the CPU computes them while others are copied. Chains that exceed a budget are left out.
    """
    found = [tuple(part.prefill_choices(placement)[0] for part, placement in zip(problem.parts, decode, strict=True))]
    if not any(placement.on_gpu for placement in decode):
        return found
    for with_state in (True, False):
        visiting = _visiting(problem, decode, chunk_tokens, with_state=with_state)
        for tried in (visiting, _shared(problem, found[0], visiting, chunk_tokens)):
            terms = memory_terms(problem, decode, tried, chunk_tokens)
            fits_ram = n_bytes(terms, "cpu") <= problem.ram_budget_bytes
            if fits_ram and n_bytes(terms, "gpu") <= problem.vram_budget_bytes:
                found.append(tried)
    return list(dict.fromkeys(found))


def least_streamed(problem: Problem, decode: Chain, prefill: Chain, chunk_tokens: int) -> int | None:
    """Return the least tokens of a prompt for which the prefill placements are faster, see Plan.prefill_least_tokens.

    Parts that need other placements for prompts, as a sparse FFN's neurons do, use them for every prompt.
    """
    costs, parts = problem.costs, problem.parts
    changed = [pair for pair in zip(parts, decode, prefill, strict=True) if pair[1] != pair[2]]
    if not all(placement in part.prefill_choices(placement) for part, placement, _ in changed):
        return None
    n_tokens = MAX_DECODE_TOKENS
    while changed and n_tokens < chunk_tokens:
        n_more = min(2 * n_tokens, chunk_tokens)
        streamed, there = (Placements(placements, decode) for placements in (prefill, decode))
        if prompt_s(costs, parts, streamed, n_more, n_more) <= prompt_s(costs, parts, there, n_more, n_more):
            break
        n_tokens = n_more
    return n_tokens + 1 if n_tokens > MAX_DECODE_TOKENS else None


def _shared(problem: Problem, there: Chain, visiting: Chain, chunk_tokens: int) -> Chain:
    """Return the chain in which the CPU computes parts for as long as the others, also all experts, are copied.

    The parts that stay `there` are spread evenly, since copies run only a few parts ahead.
    """
    costs, parts, shared = problem.costs, problem.parts, list(visiting)
    pairs = enumerate(zip(there, visiting, strict=True))
    places = [i for i, (each, other) in pairs if each != other or (each.is_split and not each.reads_disk)]
    there_s = sum(costs.part_s(parts[place], there[place], chunk_tokens, chunk_tokens) for place in places)
    copied_s = sum(costs.copy_s(parts[place], Placement.VISIT, chunk_tokens) for place in places)
    n_there = int(len(places) * copied_s / (there_s + copied_s)) if places else 0
    stay = {places[(2 * number + 1) * len(places) // (2 * n_there)] for number in range(n_there)}
    for place in places:
        shared[place] = there[place] if place in stay else Placement.VISIT
    return tuple(shared)


def _visiting(problem: Problem, decode: Chain, chunk_tokens: int, *, with_state: bool) -> Chain:
    """Return the fastest placements for a chunk if CPU parts, or only those without a KV cache, may "visit" the GPU."""
    options = []
    known: dict[object, PartOptions] = {}  # the same for parts of one shape
    for part, placement in zip(problem.layers, decode[1:-1], strict=True):
        key = part.shape, placement
        if key not in known:
            state = part.cost.state  # a recurrent one does not visit: it would be copied whole, to and fro
            may_visit = state is None or placement.is_split or (with_state and isinstance(state, KvState))
            may_visit = may_visit and part.state_layer == part.layer  # other layers' keys and values are not copied
            allowed = part.prefill_choices(placement) if may_visit else (placement,)
            known[key] = {each: _option(problem, part, each, chunk_tokens) for each in allowed}
        options.append(known[key])
    chain = place_chain(options, 0, problem.costs.transfer_s(chunk_tokens), ends_on_gpu=decode[-1].on_gpu)
    assert chain is not None, "nothing here takes memory"
    return (decode[0], *chain, decode[-1])


def _option(problem: Problem, part: Part, placement: Placement, chunk_tokens: int) -> Option:
    seconds = problem.costs.part_s(part, placement, chunk_tokens, chunk_tokens)
    if placement.is_streamed:
        seconds = max(seconds, problem.costs.copy_s(part, placement, chunk_tokens))
    return Option(seconds, 0, on_gpu=placement.on_gpu)
