"""Predicts the speed of a plan: rates, seconds by purpose, and draft-verify steps."""

from collections.abc import Mapping, Sequence

from hetero_ee.models.blocks import BlockKind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MAX_DRAFT_LENGTH
from hetero_ee.planning.candidates import Candidate
from hetero_ee.planning.parts import Part, model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import EXIT, SEQUENCE, BytesTerm, PlacedPart, Plan, Prediction, TimeTerm
from hetero_ee.planning.statistics import PromptReading, Statistics
from hetero_ee.planning.times.costs import Costs, part_work, reads_on_cpu, split_work
from hetero_ee.planning.times.early_exits import Passes, early_step
from hetero_ee.planning.times.lanes import Lanes, PassTime, pass_time
from hetero_ee.planning.times.prompts import Placements, prompt_s, read_prompt
from hetero_ee.planning.times.steps import Step, StepTimes
from hetero_ee.planning.times.traffic import Traversal, token_bytes
from hetero_ee_profiles.hardware import HardwareProfile


def predict(made: Candidate, cpu_s: float | None) -> Prediction:
    """Return the candidate's expected speed: reading a prompt of its context length, and decoding after it.

    Args:
        cpu_s: seconds per token on the CPU only, None if RAM is too small.
    """
    context_tokens, costs, parts, step = made.context_tokens, made.problem.costs, made.problem.parts, made.schedule.step
    decode = pass_time(costs, parts, made.decode, 1, context_tokens)
    reading, placements = made.reading, made.placements
    read_s = prompt_s(costs, parts, placements, context_tokens, made.chunk_tokens, reading)
    m = min(made.chunk_tokens, context_tokens)
    chunk = pass_time(costs, parts[:-1], made.prefill[:-1], m, context_tokens)
    return Prediction(
        context_tokens=context_tokens,
        prompt_tokens_per_s=context_tokens / read_s,
        generated_tokens_per_s=1 / step.seconds_per_token,
        ceiling_tokens_per_s=1 / _reading_s(costs, parts, made.decode),
        batch_per_pass=step.batch,
        tokens_per_pass=step.tokens,
        cpu_tokens_per_s=1 / cpu_s if cpu_s else None,
        other_mode_tokens_per_s=1 / made.schedule.other_mode_s if made.schedule.other_mode_s else None,
        first_token_s=made.read_s,
        request_s=made.request_s,
        decode_terms=_terms(costs, parts, made.decode, decode, 1, context_tokens),
        prefill_terms=(
            *_terms(costs, parts[:-1], made.prefill[:-1], chunk, m, context_tokens),
            *([TimeTerm("reading for drafts", reading.chunk_s(m, context_tokens))] if reading is not None else []),
        ),
        mean_depth=_mean_depth(made),
        moved_terms=_moved_terms(made),
        layer_terms=_layer_terms(costs, parts[1:-1], context_tokens, beside_cpu=reads_on_cpu(parts, made.decode)),
    )


def _mean_depth(made: Candidate) -> float | None:
    schedule, problem = made.schedule, made.problem
    if schedule.depths is None:
        return None
    return Passes.of(schedule.depths, schedule.draft_length).mean_depth(problem.spec.n_layers)


def _moved_terms(made: Candidate) -> tuple[BytesTerm, ...]:
    schedule, problem, exits = made.schedule, made.problem, made.problem.statistics.exits
    traversal = Traversal()
    if schedule.depths is not None:
        traversal = Traversal.of_exits(schedule.depths, schedule.draft_length)
    elif schedule.exit_layer is not None:
        traversal = Traversal.of_step(schedule.exit_layer, schedule.step)
    ranks = {} if exits is None else exits.map_ranks
    found = token_bytes(problem.spec, problem.parts, made.decode, traversal, ranks)
    return tuple(BytesTerm(name, n_bytes) for name, n_bytes in found.items())


def predicted_run_s(
    spec: ModelSpec,
    profile: HardwareProfile,
    made: Plan,
    n_prompt: int,
    n_gen: int,
    n_depth: int,
    reading: PromptReading | None = None,
) -> float:
    """Return the seconds to read n_prompt tokens and generate n_gen in full mode, after n_depth tokens of context.

    `reading` is the cost of a draft source that reads the prompt too.
    """
    costs, parts = Costs(spec, profile, made.threads), model_parts(spec, made.kv_type)
    prefill = [part.prefill_placement for part in made.parts]
    placements = Placements(prefill, made.decode_placements, made.prefill_least_tokens)
    lanes, first = Lanes(costs, beside_cpu=reads_on_cpu(parts, placements.decode)), n_depth + n_prompt
    if n_prompt:
        read_prompt(lanes, parts, placements, range(n_depth, first, made.prefill_chunk_tokens), first, reading)
    for context_tokens in range(first + 1, first + n_gen + 1):
        lanes.whole_pass(parts, placements.decode, 1, context_tokens)
    return lanes.spent.seconds


def step_times(
    spec: ModelSpec,
    profile: HardwareProfile,
    made: Plan,
    context_tokens: int | None = None,
    map_ranks: Mapping[int, int] | None = None,
) -> StepTimes:
    """Return the times of this plan's drafts and of verifications of up to MAX_DRAFT_LENGTH tokens.

    Args:
        context_tokens: None for half the plan's context.
        map_ranks: see StepTimes.
    """
    context = max(1, made.context_tokens // 2) if context_tokens is None else context_tokens
    costs, parts = Costs(spec, profile, made.threads), model_parts(spec, made.kv_type)
    return StepTimes(costs, parts, made.decode_placements, context, MAX_DRAFT_LENGTH, map_ranks=map_ranks)


def predicted_step(
    spec: ModelSpec, profile: HardwareProfile, made: Plan, statistics: Statistics, context_tokens: int
) -> Step | None:
    """Return the average step of a plan in exact or an early-exit mode, after context_tokens of context.

    It is None if the statistics that it needs are missing.
    """
    n, exits, exit_layer = made.draft_length, statistics.exits, made.exit_layer
    times = step_times(spec, profile, made, context_tokens, None if exits is None else exits.map_ranks)
    drafts = statistics.of_plan(made).drafts
    if (depths := statistics.depths_of(made)) is not None:
        draft_s = 0.0 if drafts is None else drafts.seconds(made.decode_placements)
        return early_step(times, depths, n, draft_s)
    if exit_layer is None:
        return None
    if made.drafts == EXIT and exits is not None:
        return times.exit_steps(exit_layer, exits.rates_at(exit_layer), n)[-1]
    if made.drafts != SEQUENCE or drafts is None:
        return None
    return times.tree_step(drafts, n, made.tree_width) if made.tree_width > 1 else times.sequence_step(drafts, n)


def predicted_text_s(
    spec: ModelSpec, profile: HardwareProfile, made: Plan, statistics: Statistics, n_new: int, n_depth: int
) -> float | None:
    """Return the seconds to generate n_new tokens after n_depth tokens of context; None if statistics are missing."""
    if made.mode == "full":
        return predicted_run_s(spec, profile, made, 0, n_new, n_depth)
    step = predicted_step(spec, profile, made, statistics, n_depth + max(1, n_new // 2))
    return None if step is None else n_new * step.seconds_per_token


def placed_parts(made: Candidate) -> tuple[PlacedPart, ...]:
    """Return every part of the candidate with its placements, bytes and seconds."""
    problem, chunk = made.problem, made.chunk_tokens
    return tuple(
        PlacedPart(
            name=part.name,
            layer=part.layer,
            weight_bytes=part.weight_bytes,
            kv_bytes=problem.kv_bytes(part),
            decode_placement=decode,
            prefill_placement=prefill,
            decode_s=problem.costs.part_s(part, decode, 1, made.context_tokens),
            prefill_s=problem.costs.part_s(part, prefill, chunk, chunk),
        )
        for part, decode, prefill in zip(problem.parts, made.decode, made.prefill, strict=True)
    )


def _terms(
    costs: Costs, parts: Sequence[Part], placements: Sequence[Placement], whole: PassTime, m: int, context_tokens: int
) -> tuple[TimeTerm, ...]:
    """Return a pass's seconds by kind of part and device, and those of transfers and of waiting for copies."""
    seconds: dict[str, float] = {}
    for part, placement in zip(parts, placements, strict=True):
        if part.kind is BlockKind.EMBEDDING:
            continue
        where = "both" if placement.is_split else "the GPU" if placement.on_gpu else "the CPU"
        name = f"{part.label} on {where}"
        seconds[name] = seconds.get(name, 0.0) + costs.part_s(part, placement, m, context_tokens)
    seconds["transfers"] = whole.transfer_s
    seconds["waiting for copies"] = whole.waited_s
    return tuple(TimeTerm(name, value) for name, value in seconds.items() if value > 0)


def _layer_terms(
    costs: Costs, layers: Sequence[Part], context_tokens: int, *, beside_cpu: bool
) -> tuple[TimeTerm, ...]:
    """Return an average layer's seconds per token on the CPU, on the GPU and streamed. beside_cpu: see Costs.copy_s."""
    seconds = {"CPU": sum(costs.part_s(part, Placement.CPU, 1, context_tokens) for part in layers)}
    if costs.profile.gpu is not None:
        on_gpu = [costs.part_s(part, Placement.GPU, 1, context_tokens) for part in layers]
        seconds["GPU"] = sum(on_gpu)
        copies = [costs.copy_s(part, beside_cpu=beside_cpu) for part in layers]
        seconds["streamed"] = sum(map(max, on_gpu, copies))
    n_layers = len({part.layer for part in layers})
    return tuple(TimeTerm(name, value / n_layers) for name, value in seconds.items())


def _reading_s(costs: Costs, parts: Sequence[Part], placements: Sequence[Placement]) -> float:
    """Return the seconds to read every weight once from where it is kept: a lower bound for a token of full mode."""
    profile, cpu, gpu = costs.profile, costs.cpu, costs.profile.gpu
    seconds = 0.0
    for part, placement in zip(parts, placements, strict=True):
        work = part_work(costs.spec, part, 1)
        n_bytes = work.read_bytes  # of the embedding one row
        if part.layer is not None:
            n_bytes += part.weight_bytes - work.matrix_bytes  # norms and biases
        if placement.is_split and gpu is not None:
            cold = split_work(costs.spec, part, placement, 1).cold
            there_s = (n_bytes - cold.read_bytes) / gpu.read_bytes_per_s.value
            rate = profile.disk_read_bytes_per_s if placement.reads_disk else cpu.read_bytes_per_s
            seconds += max(there_s, cold.read_bytes / rate.value)
        elif placement == "gpu" and gpu is not None:
            seconds += n_bytes / gpu.read_bytes_per_s.value
        elif placement == "stream":
            seconds += costs.copy_s(part)
        elif placement == "disk":
            seconds += n_bytes / profile.disk_read_bytes_per_s.value
        else:
            seconds += n_bytes / cpu.read_bytes_per_s.value
    return seconds
