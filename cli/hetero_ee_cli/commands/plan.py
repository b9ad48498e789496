"""`hetero-ee plan`: where every part of a model would go, why, and how fast that should be."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee.errors import HeteroError
from hetero_ee_cli.options.engine import EngineOptions, ModelArgument, RandomWeights
from hetero_ee_cli.options.flags import Json, with_options
from hetero_ee_cli.options.planning import GIB, Hardware, LimitOptions, hardware_from
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.planning.statistics import Statistics
    from hetero_ee_profiles.hardware import HardwareProfile


@with_options(without={"profile": "it always plans by one"})
def plan(
    limits: LimitOptions,
    engine: EngineOptions,
    model: ModelArgument = None,
    random_weights: RandomWeights = None,
    hardware: Hardware = None,
    published_exits: Annotated[
        bool, typer.Option(help="Use the exit rates published for Llama-2-7B, as if this model had them.")
    ] = False,
    own_drafts: Annotated[
        bool, typer.Option(help="Use the model's own calibration and draft head, as generate does.")
    ] = True,
    curve: Annotated[bool, typer.Option(help="Plot expected tokens per second against the VRAM budget.")] = False,
    curve_file: Annotated[
        Path | None, typer.Option(help="Plot the curve to a PNG file; needs the extra [plot].")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Explain this plan, as printed by --json, instead of making one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan where each part of a model goes, and predict its speed. Nothing is loaded or changed.

    The last line of the output has the options that pin the plan.
    """
    requested = limits.limits(engine)
    with ending_at_once():
        from hetero_ee.planning.explanation import explained
        from hetero_ee.planning.plan import Plan
        from hetero_ee.planning.planner import check_fits
        from hetero_ee.planning.planner import plan as make_plan
        from hetero_ee.planning.statistics import Statistics, published_statistics
        from hetero_ee.planning.what_if import curve_png, curve_text, vram_curve
        from hetero_ee_cli.commands.profile import profile_for
        from hetero_ee_profiles.records import to_json

    with stage_progress() as progress:
        spec, _, folder = engine.model_spec(model, random_weights, progress, configuration_only=True)
        if plan_file is not None:
            made = Plan.load(plan_file)
            check_fits(made, spec)
            print(to_json(made) if as_json else explained(made), end="" if as_json else "\n")
            return
        threads = (requested.threads,) if requested.threads else ()
        profile = hardware_from(hardware) if hardware else profile_for(spec, folder, progress, threads=threads)
        statistics = Statistics()
        if published_exits:
            statistics = Statistics(published_statistics(spec.n_layers))
        elif own_drafts and folder is not None:
            statistics = _own_statistics(spec, folder, profile, requested, engine, lambda text: progress(text, 0, 0))
    made = make_plan(spec, profile, requested, statistics)
    if as_json:
        print(to_json(made), end="")
    elif curve or curve_file:
        points = vram_curve(spec, profile, requested, statistics)
        if curve_file:
            curve_png(points, profile, curve_file)
        else:
            print(curve_text(points, profile))
    else:
        _explain(made, spec, profile, requested, statistics)


def _own_statistics(
    spec: "ModelSpec",
    folder: Path,
    profile: "HardwareProfile",
    limits: "Limits",
    engine: EngineOptions,
    warn: Callable[[str], None],
) -> "Statistics":
    """Of the calibration and the draft head that opening this model would find. warn: told if they can't be read."""
    from hetero_ee.calibration.location import CalibrationPlace
    from hetero_ee.config import cache_folder
    from hetero_ee.planning.statistics import Statistics
    from hetero_ee.speculation.opening import DraftKnowledge
    from hetero_ee.weights.quantization import Quantization
    from hetero_ee.weights.store.conversion import cached_store
    from hetero_ee.weights.store.reader import is_store

    try:
        if is_store(folder):
            place = CalibrationPlace(spec, folder)
        else:
            quantization = Quantization.of_model(folder, engine.arguments()["quantizer"])
            store = cached_store(folder, quantization, cache_folder())
            place = CalibrationPlace(spec, store, folder, quantization)
        knowledge = DraftKnowledge.found(place.find_or_warn(warn), None, folder, spec, warn)
        return knowledge.statistics(spec, profile, limits.threads, on_gpu=profile.gpu is not None)
    except HeteroError as error:
        warn(f"Planned without drafts: {error}")
        return Statistics()


def _explain(
    made: "Plan", spec: "ModelSpec", profile: "HardwareProfile", limits: "Limits", statistics: "Statistics"
) -> None:
    from hetero_ee.planning.explanation import explained, flags
    from hetero_ee.planning.what_if import with_other_vram

    print(explained(made))
    changes = []
    for label, extra_bytes in (("more", GIB), ("less", -GIB)):
        other = with_other_vram(made, spec, profile, limits, statistics, extra_bytes)
        if other is not None:
            changes.append(f"with 1 GiB of VRAM {label} {other.prediction.generated_tokens_per_s:.2f}")
    if changes:
        print(f"{'':10} {', '.join(changes)} tokens/s")
    print(f"\n{flags(made)}")
