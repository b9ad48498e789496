"""plan(): a pure function that decides where every part goes and how to decode, from a hardware profile's times."""

import hashlib
import json
from dataclasses import asdict, fields
from itertools import zip_longest

from hetero_ee.errors import UsageError, shown
from hetero_ee.models.context_limit import check_context
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import CERTIFIED, RISK
from hetero_ee.planning.candidates import cpu_alone_s
from hetero_ee.planning.context import best_context, best_in_context
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts, parts_by_state
from hetero_ee.planning.plan import PLAN_VERSION, Plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.reports.reasons import reasons
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.prediction import placed_parts, predict
from hetero_ee_profiles.hardware import HardwareProfile

# Fields of ModelSpec with defaults that are in the hash of every plan, as in the first ones of this version.
FIRST_FIELDS = frozenset(
    {"norm_affine", "final_norm", "qk_norm", "rope", "learned_position_offset", "context_is_fixed", "neuron_major"}
)


def plan(
    spec: ModelSpec,
    profile: HardwareProfile,
    limits: Limits | None = None,
    statistics: Statistics | None = None,
    *,
    predict_at_tokens: int = 0,
) -> Plan:
    """Return the fastest plan within the limits.

    Without a context length in the limits, best_context chooses one.

    Args:
        predict_at_tokens: the context length for which rates are predicted; see best_in_context for 0.

    Raises:
        UsageError: if a request can't be met, with the numbers and the option to change.
    """
    problem = resolve(spec, profile, limits or Limits(), statistics or Statistics())
    choose = best_in_context if problem.limits.context_tokens else best_context
    choice = choose(problem, predict_at_tokens)
    best, problem = choice.candidate, choice.candidate.problem
    prediction = predict(best, cpu_alone_s(problem, best.context_tokens))
    return Plan(
        version=PLAN_VERSION,
        model=spec.architecture,
        shapes_sha256=shapes_sha256(spec),
        hardware=profile.name,
        hardware_kind=profile.kind,
        threads=problem.limits.threads or problem.costs.cpu.threads,
        context_tokens=problem.context_tokens,
        kv_type=problem.kv_type,
        mode=best.schedule.mode,
        drafts=best.schedule.drafts,
        exit_layer=best.schedule.exit_layer,
        draft_length=best.schedule.draft_length,
        prefill_chunk_tokens=best.chunk_tokens,
        vram_budget_bytes=problem.vram_budget_bytes,
        ram_budget_bytes=problem.ram_budget_bytes,
        parts=placed_parts(best),
        memory=tuple(best.memory),
        prediction=prediction,
        reasons=(*([choice.reason] if choice.reason else []), *reasons(best, prediction)),
        exit_layers=best.schedule.exit_layers,
        prefill_least_tokens=best.placements.least_tokens,
        n_sequences=problem.limits.n_sequences,
        tree_width=best.schedule.tree_width,
        risk=(problem.limits.risk or RISK) if best.schedule.mode == CERTIFIED else None,
    )


def check_fits(made: Plan, spec: ModelSpec) -> None:
    """Check that the plan was made for a model of these shapes and parts.

    Raises:
        UsageError: if it was made for another model.
    """
    if made.shapes_sha256 != shapes_sha256(spec):
        raise UsageError(f"the plan is of a {shown(made.model)} with other shapes; make one for this model.")
    last = made.exit_layers[-1] if made.exit_layers else made.exit_layer
    if last is not None and last >= spec.n_layers:
        raise UsageError(f"the plan exits after layer {shown(last)} and the model has {spec.n_layers}; make a new one.")
    check_context(spec, made.context_tokens, "the plan's context of")
    parts = model_parts(spec, made.kv_type)
    expected = [(part.name, part.layer) for part in parts]
    found = [(part.name, part.layer) for part in made.parts]
    if found != expected:
        first = next(a or b for a, b in zip_longest(found, expected) if a != b)
        raise UsageError(
            f"the plan's {len(found)} parts are not the model's {len(expected)}, from {shown(first[0])} on; make a new "
            "one."
        )
    for indices in parts_by_state(parts):
        if len({made.parts[index].decode_placement.on_gpu for index in indices}) > 1:
            names = f"{parts[indices[0]].name} and {parts[indices[-1]].name}"
            raise UsageError(f"the plan divides {names} between devices, which read the same keys and values.")
    for placed, part in zip(made.parts, parts, strict=True):
        sizes = part.weight_bytes, part.kv_bytes(made.context_tokens, made.n_sequences)
        if (placed.weight_bytes, placed.kv_bytes) != sizes:
            raise UsageError(
                f"the plan says {placed.weight_bytes} and {placed.kv_bytes} bytes of weights and KV cache of "
                f"{part.name}, the model has {sizes[0]} and {sizes[1]}; make a new one."
            )


def shapes_sha256(spec: ModelSpec) -> str:
    """Return a hash of the model's shapes, by which a plan for another model is refused.

    Fields added later are included only if they differ from their defaults, so that older plans stay valid.
    """
    values, rope = asdict(spec), spec.rope
    # Not shapes of the blocks that are placed.
    for other in ("active_shares", "predicted_share", "hot_curve", "independent_tokens", "activation_terms", "mtp"):
        del values[other]
    for field in fields(spec):
        if field.name not in FIRST_FIELDS and values.get(field.name) == field.default and field.name in values:
            del values[field.name]
    if rope is not None and not rope.interleaved:
        del values["rope"]["interleaved"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
