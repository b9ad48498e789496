"""plan(): decides where every part goes and how to decode, from measured or derived times. A pure function."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict

from hetero_ee.errors import UsageError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.candidates import Candidate, best_candidate
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import PLAN_VERSION, Plan
from hetero_ee.planning.prediction import placed_parts, predict
from hetero_ee.planning.problem import Problem, resolve
from hetero_ee.planning.statistics import ExitStatistics
from hetero_ee_profiles.hardware import HardwareProfile


def plan(
    spec: ModelSpec,
    profile: HardwareProfile,
    limits: Limits | None = None,
    statistics: ExitStatistics | None = None,
    *,
    predict_at_tokens: int = 0,
) -> Plan:
    """The plan of least expected time within the limits. predict_at_tokens: the context its rates hold for, 0 for half.

    Raises UsageError where a wish can't be had, with the numbers and the knob to turn.
    """
    problem = resolve(spec, profile, limits or Limits(), statistics)
    context = predict_at_tokens or max(1, problem.context_tokens // 2)
    best = best_candidate(problem, context)
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
        boundary=best.schedule.boundary,
        draft_tokens=best.schedule.draft_tokens,
        prefill_chunk_tokens=best.chunk_tokens,
        vram_budget_bytes=problem.vram_budget_bytes,
        ram_budget_bytes=problem.ram_budget_bytes,
        parts=placed_parts(problem, best.places, best.prefill, best.chunk_tokens, context),
        memory=tuple(best.memory),
        prediction=predict(
            problem, best.places, best.prefill, best.schedule, best.request_s, best.chunk_tokens, context
        ),
        reasons=tuple(_reasons(problem, best)),
    )


def check_fits(made: Plan, spec: ModelSpec) -> None:
    """Raises UsageError where the plan was made for a model of other shapes."""
    if made.shapes_sha256 != shapes_sha256(spec):
        raise UsageError(f"the plan is of a {made.model} with other shapes; make one for this model.")


def shapes_sha256(spec: ModelSpec) -> str:
    """Identifies what a plan was made for: a model of other numbers can't use it."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:16]


def _reasons(problem: Problem, best: Candidate) -> Iterator[str]:
    measured, asked = problem.costs.cpu.threads, problem.limits.threads
    if asked and asked != measured:
        yield f"Times are those of {measured} threads: the profile has none for {asked}."
    n_on_disk = best.places.count("disk")
    if n_on_disk:
        yield f"{n_on_disk} parts exceed the RAM budget and are read from the disk at every token."
    if problem.statistics is None:
        yield "Exact mode was not considered: there are no exit statistics."
    elif best.schedule.mode == "full":
        yield f"Exact mode was declined: with {problem.statistics.source} it promises too little over full mode."
    else:
        yield f"Exits as in {problem.statistics.source}."
