"""plan(): decides where every part goes and how to decode, from measured or derived times. A pure function."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest

from hetero_ee.errors import UsageError, shown
from hetero_ee.models.context_limit import check_context
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.candidates import Candidate, best_candidate
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.plan import EXIT, PLAN_VERSION, Plan
from hetero_ee.planning.problem import Problem, resolve
from hetero_ee.planning.schedule import Schedule
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.prediction import placed_parts, predict
from hetero_ee_profiles.hardware import HardwareProfile


def plan(
    spec: ModelSpec,
    profile: HardwareProfile,
    limits: Limits | None = None,
    statistics: Statistics | None = None,
    *,
    predict_at_tokens: int = 0,
) -> Plan:
    """The plan of least expected time within the limits. predict_at_tokens: the context its rates hold for, 0 for half.

    Raises UsageError where a request can't be met, with the numbers and the knob to turn.
    """
    problem = resolve(spec, profile, limits or Limits(), statistics or Statistics())
    context = predict_at_tokens or max(1, problem.context_tokens // 2)
    best = best_candidate(problem, context)
    problem = best.problem
    return Plan(
        version=PLAN_VERSION,
        model=spec.architecture,
        shapes_sha256=shapes_sha256(spec),
        hardware=profile.name,
        hardware_kind=profile.kind,
        threads=problem.limits.threads or problem.costs.cpu.threads,
        context_tokens=problem.context_tokens,
        kv_type=problem.limits.kv_type,
        mode=best.schedule.mode,
        drafts=best.schedule.drafts,
        exit_layer=best.schedule.exit_layer,
        draft_length=best.schedule.draft_length,
        prefill_chunk_tokens=best.chunk_tokens,
        vram_budget_bytes=problem.vram_budget_bytes,
        ram_budget_bytes=problem.ram_budget_bytes,
        parts=placed_parts(best, context),
        memory=tuple(best.memory),
        prediction=predict(best, context),
        reasons=tuple(_reasons(problem, best)),
    )


def check_fits(made: Plan, spec: ModelSpec) -> None:
    """Raises UsageError where the plan was made for a model of other shapes, or names other parts than this one's."""
    if made.shapes_sha256 != shapes_sha256(spec):
        raise UsageError(f"the plan is of a {shown(made.model)} with other shapes; make one for this model.")
    if made.exit_layer is not None and made.exit_layer >= spec.n_layers:
        raise UsageError(
            f"the plan exits after layer {shown(made.exit_layer)} and the model has {spec.n_layers}; make a new one."
        )
    check_context(spec, made.context_tokens, "the plan's context of")
    expected = [(part.name, part.layer) for part in model_parts(spec, made.kv_type)]
    found = [(part.name, part.layer) for part in made.parts]
    if found != expected:
        first = next(a or b for a, b in zip_longest(found, expected) if a != b)
        raise UsageError(
            f"the plan's {len(found)} parts are not the model's {len(expected)}, from {shown(first[0])} on; make a new "
            "one."
        )
    for placed in made.parts:
        is_ffn = placed.layer is not None and placed.name.endswith(".ffn")
        if placed.gpu_neurons is not None and not (is_ffn and placed.gpu_neurons <= spec.ffn_size):
            raise UsageError(
                f"the plan splits off {shown(placed.gpu_neurons)} neurons of {placed.name}; at most {spec.ffn_size} "
                "of an FFN can be; make a new one."
            )


def shapes_sha256(spec: ModelSpec) -> str:
    """Identifies what a plan was made for: a model of other numbers can't use it."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:16]


def _reasons(problem: Problem, best: Candidate) -> Iterator[str]:
    measured, asked = problem.costs.cpu.threads, problem.limits.threads
    if asked and asked != measured:
        yield f"Times are those of {measured} threads: the profile has none for {asked}."
    n_on_disk = best.decode.count("disk")
    if n_on_disk:
        yield f"{n_on_disk} parts exceed the RAM budget and are read from the disk at every token."
    yield from _split_reasons(best)
    yield from _mode_reasons(problem.statistics, best.schedule)


def _split_reasons(best: Candidate) -> Iterator[str]:
    split = [part.split for part in best.problem.parts if part.split]
    neurons = best.problem.statistics.neurons
    if split and neurons is not None:
        fewest, most = (choose(each.gpu_neurons for each in split) for choose in (min, max))
        yield (
            f"{len(split)} FFNs are split: {fewest} to {most} of their {split[0].n_neurons} neurons lie on the GPU, "
            f"the most often active first, with {neurons.source}; no kernel executes that yet."
        )


def _mode_reasons(known: Statistics, schedule: Schedule) -> Iterator[str]:
    sources = [each.source for each in (known.exits, known.drafts) if each is not None]
    if not sources:
        yield "Exact mode was not considered: nothing is known of this model's exits and drafts."
    elif schedule.mode == "full":
        yield f"Exact mode was declined: with {' and '.join(sources)} it promises too little over full mode."
    elif schedule.drafts == EXIT and known.exits is not None:
        yield f"Drafts are early exits, with {known.exits.source}; {_gain(schedule)}."
    elif known.drafts is not None:
        yield f"Drafts come from {known.drafts.source}; {_gain(schedule)}."


def _gain(schedule: Schedule) -> str:
    """What a step is expected to bring."""
    step = schedule.step
    return (
        f"a draft-verify step of {step.batch:.1f} tokens is expected to take {step.seconds * 1e3:.3g} ms and to bring "
        f"{step.tokens:.1f} tokens"
    )
