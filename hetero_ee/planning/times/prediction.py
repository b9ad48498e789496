"""What a plan is expected to do: rates and where the time goes."""

from collections.abc import Sequence
from dataclasses import replace

from hetero_ee.models.blocks import BlockKind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import Part, Split, model_parts
from hetero_ee.planning.plan import PlacedPart, Plan, Prediction, TimeTerm
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.schedule import Schedule
from hetero_ee.planning.times.costs import ON_GPU, SPLIT, Costs
from hetero_ee.planning.times.lanes import Lanes, PassTime, pass_time
from hetero_ee.planning.times.prompts import Ways, prompt_s, read_prompt
from hetero_ee_profiles.hardware import HardwareProfile


def predict(
    problem: Problem,
    places: Sequence[str],
    prefill: Sequence[str],
    schedule: Schedule,
    request_s: float,
    chunk_tokens: int,
    context_tokens: int,
) -> Prediction:
    """Rates at this context: prompts of that length, and decoding behind it."""
    costs, parts = problem.costs, problem.parts
    decode = pass_time(costs, parts, places, 1, context_tokens)
    read_s = prompt_s(costs, parts, Ways(prefill, places), context_tokens, chunk_tokens)
    m = min(chunk_tokens, context_tokens)
    chunk = pass_time(costs, parts[:-1], prefill[:-1], m, context_tokens)
    return Prediction(
        context_tokens=context_tokens,
        prompt_tokens_per_s=context_tokens / read_s,
        generated_tokens_per_s=1 / schedule.round.seconds_per_token,
        ceiling_tokens_per_s=1 / _reading_s(problem, places),
        rows_per_pass=schedule.round.rows,
        tokens_per_pass=schedule.round.tokens,
        request_s=request_s,
        decode_terms=_terms(costs, parts, places, decode, 1, context_tokens),
        prefill_terms=_terms(costs, parts[:-1], prefill[:-1], chunk, m, context_tokens),
    )


def predicted_run_s(
    spec: ModelSpec, profile: HardwareProfile, made: Plan, n_prompt: int, n_gen: int, n_depth: int
) -> float:
    """Seconds of a run in full mode with this plan: n_prompt tokens, then n_gen, behind n_depth others."""
    costs, parts = Costs(spec, profile, made.threads), _planned_parts(spec, made)
    places = [part.decode_place for part in made.parts]
    ways = Ways([part.prefill_place for part in made.parts], places)
    lanes, first = Lanes(costs), n_depth + n_prompt
    if n_prompt:
        read_prompt(lanes, parts, ways, range(n_depth, first, made.prefill_chunk_tokens), first)
    for context_tokens in range(first + 1, first + n_gen + 1):
        lanes.whole_pass(parts, places, 1, context_tokens)
    return lanes.spent.seconds


def _planned_parts(spec: ModelSpec, made: Plan) -> list[Part]:
    """The parts as the plan splits them."""
    return [
        part
        if placed.gpu_neurons is None or placed.cpu_active_share is None
        else replace(part, split=Split(placed.gpu_neurons, spec.ffn_size, placed.cpu_active_share))
        for part, placed in zip(model_parts(spec, made.kv_type), made.parts, strict=True)
    ]


def placed_parts(
    problem: Problem, places: Sequence[str], prefill: Sequence[str], chunk_tokens: int, context_tokens: int
) -> tuple[PlacedPart, ...]:
    """Every part with its places and what it takes there."""
    return tuple(
        PlacedPart(
            name=part.name,
            layer=part.layer,
            weight_bytes=part.weight_bytes,
            kv_bytes=part.kv_bytes(problem.context_tokens),
            decode_place=place,
            prefill_place=prefill_place,
            decode_s=problem.costs.part_s(part, place, 1, context_tokens),
            prefill_s=problem.costs.part_s(part, prefill_place, chunk_tokens, chunk_tokens),
            gpu_neurons=part.split.gpu_neurons if part.split else None,
            cpu_active_share=part.split.active_share if part.split else None,
        )
        for part, place, prefill_place in zip(problem.parts, places, prefill, strict=True)
    )


def _terms(
    costs: Costs, parts: Sequence[Part], places: Sequence[str], whole: PassTime, m: int, context_tokens: int
) -> tuple[TimeTerm, ...]:
    """The pass's seconds by what is computed where; transfers and waiting are the rest."""
    seconds: dict[str, float] = {}
    for part, place in zip(parts, places, strict=True):
        if part.kind is BlockKind.EMBEDDING:
            continue
        where = "both" if place == SPLIT else "the GPU" if place in ON_GPU else "the CPU"
        name = f"{part.kind.value} on {where}"
        seconds[name] = seconds.get(name, 0.0) + costs.part_s(part, place, m, context_tokens)
    seconds["transfers"] = whole.transfer_s
    seconds["waiting for copies"] = whole.waited_s
    return tuple(TimeTerm(name, value) for name, value in seconds.items() if value > 0)


def _reading_s(problem: Problem, places: Sequence[str]) -> float:
    """Seconds to read every weight once from where it lies, caches aside: what full mode can't beat."""
    profile, costs = problem.costs.profile, problem.costs
    seconds = 0.0
    for part, place in zip(problem.parts, places, strict=True):
        n_bytes = part.weight_bytes
        if part.layer is None:  # of the embedding one row
            n_bytes = sum(product.n_bytes for product in part.products)
        if place == "gpu" and profile.gpu is not None:
            seconds += n_bytes / profile.gpu.read_bytes_per_s.value
        elif place == SPLIT and part.split is not None and profile.gpu is not None:
            needed_bytes = part.cpu_bytes * part.split.active_share
            seconds += max(
                part.gpu_bytes / profile.gpu.read_bytes_per_s.value, needed_bytes / costs.cpu.read_bytes_per_s.value
            )
        elif place == "stream":
            seconds += costs.copy_s(part)
        elif place == "disk":
            seconds += n_bytes / profile.disk_read_bytes_per_s.value
        else:
            seconds += n_bytes / costs.cpu.read_bytes_per_s.value
    return seconds
