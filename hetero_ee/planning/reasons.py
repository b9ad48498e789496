"""Why a plan is as it is: a sentence or two for each decision, with the numbers that decided."""

from collections.abc import Iterator

from hetero_ee.planning.candidates import REQUEST_PROMPT_TOKENS, REQUEST_TEXT_TOKENS, Candidate
from hetero_ee.planning.explanation import sized
from hetero_ee.planning.plan import EXIT, Prediction
from hetero_ee.planning.schedule import WORTH_IT, is_worth_it, neighbours
from hetero_ee.planning.times.memory import part_gpu_bytes


def reasons(best: Candidate, prediction: Prediction) -> Iterator[str]:
    """Of the split, then of the mode."""
    problem = best.problem
    measured, asked = problem.costs.cpu.threads, problem.limits.threads
    if asked and asked != measured:
        yield f"Times are those of {measured} threads: the profile has none for {asked}."
    n_on_disk = best.decode.count("disk")
    if n_on_disk:
        yield f"{n_on_disk} parts exceed the RAM budget and are read from the disk at every token."
    yield f"{_split_reason(best)} {_largest_term(prediction)}"
    yield from _neuron_reasons(best)
    yield from _mode_reasons(best, prediction)


def _split_reason(best: Candidate) -> str:
    """What keeps more of the model from the GPU."""
    problem, pairs = best.problem, list(zip(best.problem.parts, best.decode, strict=True))
    if not problem.has_gpu:
        why = "this machine has none" if problem.costs.profile.gpu is None else "it has no budget here"
        return f"Nothing is on the GPU: {why}."
    left_bytes = problem.vram_budget_bytes - sum(term.n_bytes for term in best.memory if term.device == "gpu")
    elsewhere = [part for part, placement in pairs if part.layer is not None and placement != "gpu"]
    if not elsewhere:
        return f"All layers are on the GPU, and {sized(left_bytes)} of its budget are left."
    free = [part for part in elsewhere if not problem.is_pinned(part)]
    if not free:
        return "The split is as it was pinned."
    smallest = min(free, key=lambda part: part_gpu_bytes(part, "gpu", problem.context_tokens))
    needed_bytes = part_gpu_bytes(smallest, "gpu", problem.context_tokens)
    if left_bytes < needed_bytes:
        return (
            f"The VRAM budget is full: {sized(left_bytes)} are left, and {smallest.name} would take "
            f"{sized(needed_bytes)}."
        )
    return f"{sized(left_bytes)} of VRAM are left, and moving more there would not make a typical request faster."


def _largest_term(prediction: Prediction) -> str:
    total_s = sum(term.seconds for term in prediction.decode_terms)
    largest = max(prediction.decode_terms, key=lambda term: term.seconds)
    return f"What takes longest of a token is {largest.name}: {largest.seconds / total_s:.0%}."


def _neuron_reasons(best: Candidate) -> Iterator[str]:
    split = [part.split for part in best.problem.parts if part.split]
    neurons = best.problem.statistics.neurons
    if split and neurons is not None:
        fewest, most = (choose(each.gpu_neurons for each in split) for choose in (min, max))
        yield (
            f"{len(split)} FFNs are split: {fewest} to {most} of their {split[0].n_neurons} neurons lie on the GPU, "
            f"the most often active first, with {neurons.source}; no kernel executes that yet."
        )


def _mode_reasons(best: Candidate, prediction: Prediction) -> Iterator[str]:
    known, schedule = best.problem.statistics, best.schedule
    sources = " and ".join(each.source for each in (known.exits, known.drafts) if each is not None)
    other, rate = prediction.other_mode_tokens_per_s, prediction.generated_tokens_per_s
    if not sources:
        yield (
            "Exact mode was not considered: nothing is known of this model's exits and drafts; hetero-ee calibrate "
            "measures them."
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


def _why_declined(exact_per_s: float, full_per_s: float) -> str:
    if not is_worth_it(exact_per_s, full_per_s):
        return f"it is taken from {1 / WORTH_IT - 1:+.0%} on"
    return (
        f"its drafts read prompts too, which for {REQUEST_PROMPT_TOKENS} tokens takes more time than they save of "
        f"{REQUEST_TEXT_TOKENS} new ones: --mode exact is for shorter prompts and longer texts"
    )


def _gain(best: Candidate) -> str:
    """What a step is expected to bring, and what other steps would."""
    schedule, context_tokens = best.schedule, best.context_tokens
    step, others = schedule.step, neighbours(best.problem, best.decode, context_tokens, schedule)
    rates = ", ".join(f"{words} {1 / other.token_s:.2f}" for words, other in others.items())
    return (
        f"a draft-verify step of {step.batch:.1f} tokens is expected to take {step.seconds * 1e3:.3g} ms and to bring "
        f"{step.tokens:.1f} tokens. That makes {1 / schedule.token_s:.2f} tokens/s; {rates}."
    )
