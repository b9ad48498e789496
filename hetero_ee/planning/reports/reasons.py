"""Explains the decisions of a plan in one or two sentences each, with the numbers that decided."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from statistics import mean
from typing import Any

from hetero_ee.costs.neurons import NeuronRows, hot_activations
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import EARLY_EXIT_MODES
from hetero_ee.planning.candidates import Candidate, best_candidate
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import EXIT, SEQUENCE, Prediction
from hetero_ee.planning.problem import Problem, resolve
from hetero_ee.planning.reports.explanation import sized
from hetero_ee.planning.schedule import WORTH_IT, is_worth_it, neighbours
from hetero_ee.planning.times.costs import part_work, split_work
from hetero_ee.planning.times.memory import part_gpu_bytes, stream_buffer_bytes
from hetero_ee.planning.times.threads import REQUEST_PROMPT_TOKENS, REQUEST_TEXT_TOKENS

LEAST_SHARE = 0.01  # of a time that is worth mentioning
NO_TREES = (
    "The requested draft trees are not used: they need mode exact or specee, a draft head of known acceptance (a draft "
    "model, n-grams and exits draft chains), and layers without a recurrent state."
)
PROMPT_CLIFF = 0.7  # fewer layers on the GPU are suggested if a prompt needs less than this share of its time with them


def reasons(best: Candidate, prediction: Prediction) -> Iterator[str]:
    """Yield sentences that explain the plan: how the model is split between devices, then the mode."""
    problem = best.problem
    measured, asked = problem.costs.cpu.threads, problem.limits.threads
    if asked and asked != measured:
        yield f"Times are those of {measured} threads: the profile has none for {asked}."
    yield from _disk_reasons(best)
    yield f"{_split_reason(best)} {_largest_term(prediction)}"
    yield from _transfer_reasons(best, prediction)
    yield from _prompt_reasons(best)
    yield from _sparse_reasons(best)
    yield from _hot_reasons(best)
    yield from _mode_reasons(best, prediction)
    if (problem.limits.draft_tree or 1) > 1 == best.schedule.tree_width:
        yield NO_TREES


def _disk_reasons(best: Candidate) -> Iterator[str]:
    """Yield a sentence on weights that don't fit in RAM, with the bytes that a token reads from the disk."""
    problem, rate = best.problem, best.problem.costs.profile.disk_read_bytes_per_s
    pairs = [pair for pair in zip(problem.parts, best.decode, strict=True) if pair[1].reads_disk]
    if not pairs:
        return
    read_bytes = sum(
        (
            split_work(problem.spec, *pair, 1).cold if pair[1].is_split else part_work(problem.spec, pair[0], 1)
        ).read_bytes
        for pair in pairs
    )
    how = "measured" if rate.count else "assumed"
    yield (
        f"{len(pairs)} parts exceed the RAM budget: a token reads {sized(read_bytes)} of them from the disk, "
        f"in {read_bytes / rate.value:.3g} s at {rate.value / 1e9:.2g} GB/s ({how})."
    )


def _split_reason(best: Candidate) -> str:
    """Return a sentence on what keeps more of the model off the GPU."""
    problem, pairs = best.problem, list(zip(best.problem.parts, best.decode, strict=True))
    if not problem.has_gpu:
        why = "-ngl 0 says so" if problem.limits.gpu_layers == 0 else "it has no budget here"
        why = "this machine has none" if problem.costs.profile.gpu is None else why
        return f"Nothing is on the GPU: {why}."
    left_bytes = problem.vram_budget_bytes - sum(term.n_bytes for term in best.memory if term.device == "gpu")
    elsewhere = [part for part, placement in pairs if part.layer is not None and placement != "gpu"]
    if not elsewhere:
        return f"All layers are on the GPU, and {sized(left_bytes)} of its budget are left."
    kept = problem.overrides.cpu_experts
    free = [part for part in elsewhere if problem.pinned(part) is None and part.name not in kept]
    if not free:
        return "The split is as it was pinned."
    smallest = min(free, key=lambda part: part_gpu_bytes(part, Placement.GPU, problem.kv_bytes(part)))
    needed_bytes = part_gpu_bytes(smallest, Placement.GPU, problem.kv_bytes(smallest))
    if left_bytes < needed_bytes:
        return (
            f"The VRAM budget is full: {sized(left_bytes)} are left, and {smallest.name} would take "
            f"{sized(needed_bytes)}."
        )
    return f"{sized(left_bytes)} of VRAM are left, and moving more there would not make a typical request faster."


def _largest_term(prediction: Prediction) -> str:
    total_s = sum(term.seconds for term in prediction.decode_terms)
    largest = max(prediction.decode_terms, key=lambda term: term.seconds)
    return f"Bottleneck: {largest.name}, {largest.seconds / total_s:.0%} of a token's time."


def _transfer_reasons(best: Candidate, prediction: Prediction) -> Iterator[str]:
    """Yield a sentence on the transfers between devices if they need a noticeable share of the time."""
    terms = {term.name: term.seconds for term in prediction.decode_terms}
    link, seconds = best.problem.costs.profile.link, terms.get("transfers", 0.0)
    share = seconds / sum(terms.values())
    if link is None or share < LEAST_SHARE or len({placement.on_gpu for placement in best.decode[1:-1]}) < 2:
        return
    transfer, how = link.transfer, "measured" if link.transfer.count else "assumed"
    yield (
        f"The split depends on the time of a transfer between CPU and GPU, {transfer.value * 1e6:.0f} us ({how}): "
        f"{seconds / transfer.value:.0f} per token are {share:.0%} of its time."
    )


def _prompt_reasons(best: Candidate) -> Iterator[str]:
    """Yield a warning if the requested -ngl or -ncmoe leaves no VRAM to stream prompts' weights and another helps."""
    problem, limits, pairs = best.problem, best.problem.limits, list(zip(best.problem.parts, best.prefill, strict=True))
    n_layers = problem.spec.n_layers
    of_experts = limits.n_cpu_moe is not None and (limits.gpu_layers is None or limits.gpu_layers >= n_layers)
    name, flag = ("n_cpu_moe", "-ncmoe") if of_experts else ("gpu_layers", "-ngl")
    asked, streams_experts = getattr(limits, name), any(part.has_experts and each == "visit" for part, each in pairs)
    computes = any(each.uses_cpu for _, each in pairs[1:-1])
    if asked is None or problem.costs.profile.gpu is None or not computes or streams_experts:
        return
    asked, n_prompt = min(asked, n_layers), min(max(REQUEST_PROMPT_TOKENS, best.chunk_tokens), problem.context_tokens)
    read_s, others = best.prompt_s(n_prompt), dict(_with_limit(best, name, _other_counts(problem, name, asked)))
    others_s = {number: other.prompt_s(n_prompt) for number, other in others.items()}
    least_s = min(others_s.values(), default=read_s)
    if least_s > PROMPT_CLIFF * read_s:
        return
    number = next(number for number, seconds in others_s.items() if seconds <= (1 + LEAST_SHARE) * least_s)
    yield (
        f"With {flag} {asked} {'no room is left' if asked or of_experts else 'the GPU is not there'} for streaming "
        f"prompts' weights: {n_prompt} tokens take {read_s:.3g} s; with {flag} {number} {others_s[number]:.3g} s, and "
        f"text {1 / others[number].schedule.token_s:.3g} instead of {1 / best.schedule.token_s:.3g} tokens/s."
    )


def _other_counts(problem: Problem, name: str, asked: int) -> range:
    """Return values of the limit that free VRAM, one layer at a time, until buffers for prompts surely fit."""
    needed_bytes = stream_buffer_bytes(problem.layers, [Placement.VISIT] * len(problem.layers), problem.context_tokens)
    if name == "n_cpu_moe":
        expert_bytes = max(part.weight_bytes for part in problem.layers if part.has_experts)
        return range(asked + 1, min(problem.spec.n_layers, asked + 1 + needed_bytes // expert_bytes) + 1)
    first = [part for part in problem.layers if part.layer == 0]
    layer_bytes = sum(part_gpu_bytes(part, Placement.GPU, problem.kv_bytes(part)) for part in first)
    return range(max(1, asked - 1), max(0, asked - 2 - needed_bytes // layer_bytes), -1)


def _with_limit(best: Candidate, name: str, numbers: Iterable[int]) -> Iterator[tuple[int, Candidate]]:
    """Yield the best candidate for each value of a limit that fits."""
    problem = best.problem
    for number in numbers:
        changes: dict[str, Any] = {"context_tokens": problem.context_tokens, name: number}
        limits = replace(problem.limits, **changes)
        with suppress(UsageError):
            found = resolve(problem.spec, problem.costs.profile, limits, problem.statistics)
            yield number, best_candidate(found, best.context_tokens)


def _sparse_reasons(best: Candidate) -> Iterator[str]:
    """Yield the expected gain of skipping neurons, and the largest share of active ones at which it pays."""
    costs, spec = best.problem.costs, best.problem.spec
    known = {
        "GPU" if placement.on_gpu else "CPU": (part, placement)
        for part, placement in zip(best.problem.parts, best.decode, strict=True)
        if isinstance(part.cost.units, NeuronRows)
    }
    for device, (part, placement) in known.items():
        times = costs.cpu if device == "CPU" else costs.profile.gpu
        gain, even = costs.sparse_gain(part, placement)
        pays = f"it pays with up to {even:.0%} active" if even >= 0.005 else "it never pays"
        if times is None or not times.rows:
            pays = "that is not measured: rows are taken to cost what tiles do a byte"
        yield (
            f"On the {device} an FFN with {spec.active_shares[0]:.0%} of its neurons active takes {gain:.2f} of a "
            f"dense one's time; {pays}."
        )


def _hot_reasons(best: Candidate) -> Iterator[str]:
    """Yield a sentence on how many neurons or experts of split FFNs are on the GPU."""
    spec, pairs = best.problem.spec, zip(best.problem.parts, best.decode, strict=True)
    shares = [
        (part, part.n_hot(placement) / part.cost.units.n_units)
        for part, placement in pairs
        if placement.is_split and part.cost.units is not None
    ]
    if not shares:
        return
    first, share, what = shares[0][0], mean(share for _, share in shares), "neurons"
    both = f"{len(shares)} FFNs are computed on both devices at once: the GPU has"
    if first.has_experts:
        shared = ", shared experts" if first.has_shared_expert else ""
        what, both = "experts", f"{both} their routers{shared} and"
    if not share:
        yield f"{both} none of their experts."
        return
    taken = mean(hot_activations(spec.hot_curve, share) for _, share in shares)
    which = ", the ones most often active" if spec.hot_curve else ""
    yield f"{both} {share:.0%} of their {what}{which}, which is {taken:.0%} of what a token needs."


def _mode_reasons(best: Candidate, prediction: Prediction) -> Iterator[str]:
    known, schedule = best.problem.statistics, best.schedule
    sources = " and ".join(each.source for each in (known.exits, known.drafts) if each is not None)
    other, rate = prediction.other_mode_tokens_per_s, prediction.generated_tokens_per_s
    if schedule.mode in EARLY_EXIT_MODES:
        yield _exit_reason(best, prediction)
    elif schedule.drafts == SEQUENCE and known.drafts is None:
        yield (
            "Drafts are n-grams of the text, since nothing exits at any calibrated layer and no draft head or draft "
            "model is known: no speed is promised except full mode's."
        )
    elif not sources:
        yield (
            "Exact mode was not considered: this model has no calibration yet; hetero-ee calibrate measures its exits "
            "and drafts."
        )
    elif schedule.drafts == EXIT and known.exits is not None:
        yield f"Drafts are early exits, with {known.exits.source}; {_gain(best)}"
    elif schedule.drafts is not None and known.drafts is not None:
        yield f"Drafts come from {known.drafts.source}; {_gain(best)}"
    elif best.problem.limits.mode is None and other is None:
        yield f"Exact mode was declined: with {sources}, no token is known before the last layer."
    elif best.problem.limits.mode is None and other is not None:
        yield (
            f"Exact mode was declined: with {sources} it would reach {other:.2f} tokens/s at best, "
            f"{other / rate - 1:+.0%} against full mode; {_why_declined(other, rate)}."
        )


def _exit_reason(best: Candidate, prediction: Prediction) -> str:
    """Return a sentence on how deep tokens are expected to go in an early-exit mode."""
    schedule, n_layers = best.schedule, best.problem.spec.n_layers
    if schedule.depths is None or prediction.mean_depth is None:
        return (
            f"How deep tokens go in mode {schedule.mode} is not known for this model: parts are placed as for full "
            "mode, and no speed is promised except full mode's."
        )
    exits = schedule.depths
    return (
        f"With {exits.source} {sum(exits.shares):.0%} of the tokens would exit; {prediction.mean_depth:.1f} of "
        f"{n_layers} layers are run for a token, and the last ones once for {schedule.step.tokens:.1f}. Their text is "
        "not full mode's."
    )


def _why_declined(exact_per_s: float, full_per_s: float) -> str:
    if not is_worth_it(exact_per_s, full_per_s):
        return f"exact mode is used only if it is at least {1 / WORTH_IT - 1:.0%} faster"
    return (
        f"its drafts read prompts too, which for {REQUEST_PROMPT_TOKENS} tokens takes more time than they save of "
        f"{REQUEST_TEXT_TOKENS} new ones: --mode exact is for shorter prompts and longer texts"
    )


def _gain(best: Candidate) -> str:
    """Return a sentence on the expected gain of a draft-verify step, compared with neighbouring schedules."""
    schedule, context_tokens = best.schedule, best.context_tokens
    step, others = schedule.step, neighbours(best.problem, best.decode, context_tokens, schedule)
    rates = ", ".join(f"{words} {1 / other.token_s:.2f}" for words, other in others.items())
    return (
        f"a draft-verify step of {step.batch:.1f} tokens is expected to take {step.seconds * 1e3:.3g} ms and to bring "
        f"{step.tokens:.1f} tokens. That makes {1 / schedule.token_s:.2f} tokens/s; {rates}."
    )
