"""`hetero-ee plan`: shows where every part of a model would be placed, why, and the expected speed."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.errors import HeteroError, ModelError, UsageError
from hetero_ee.hub.model_id import local_folder
from hetero_ee.models.known_shapes import known_shapes, similar_names
from hetero_ee.options.engine import CERTIFIED, UNQUANTIZED
from hetero_ee.serving.settings import N_EXPRESS, SERVER_OPTIONS
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions, RandomWeights
from hetero_ee_cli.options.flags import Json, typer_option, with_options
from hetero_ee_cli.options.placement import Hardware, LimitOptions
from hetero_ee_cli.reports.plan_report import PROMPT, curve_text, show, what_if_lines
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.reports.what_if import Request
    from hetero_ee.planning.statistics import Statistics
    from hetero_ee_profiles.hardware import HardwareProfile


N_SLOTS = replace(
    SERVER_OPTIONS["n_slots"],
    help="Plan for a server that runs this many requests at a time.",
    default_text="no server",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommandOptions:
    """Options for the machine and the drafts to plan with, and for the output."""

    random_weights: RandomWeights = None
    hardware: Hardware = None
    n_slots: Annotated[int | None, typer_option(N_SLOTS)] = None
    own_drafts: Annotated[
        bool, typer.Option(help="Use the model's own calibration and draft head, as generate does.")
    ] = True
    curve: Annotated[bool, typer.Option(help="Plot expected tokens per second against the VRAM budget.")] = False
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Explain this plan, as printed by --json, instead of making one.")
    ] = None
    as_json: Json = False


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model and the machine to plan for, as named by the user."""

    model: str | None
    wanted: PlanCommandOptions
    quantizer: str | None
    sparsity: str | None
    activations: str | None

    @property
    def name(self) -> str | None:
        """Name of the model; None for the demo model."""
        return self.wanted.random_weights or read_settings().value("model", self.model)

    def words(self, mode: str) -> list[str]:
        """Return a command that runs this plan of this mode, without the options that pin it.

        Some statistics and weights are available in some commands only, which determines the command.
        """
        wanted = self.wanted
        named = ["-m", self.name] if self.name else []
        machine = ["--hardware", wanted.hardware] if wanted.hardware else []
        weights = ["--random-weights", wanted.random_weights] if wanted.random_weights else []
        sparse = ["--sparsity", self.sparsity] if self.sparsity else []
        sparse += ["--activations", self.activations] if self.activations else []
        slots = [] if wanted.n_slots is None else ["-np", str(wanted.n_slots)]
        if weights and (slots or mode != "full"):
            return ["plan", *weights, *machine, *slots, *sparse]
        if weights:
            return ["simulate" if machine else "bench", *weights, *machine, *sparse]
        unquantized = ["--quantizer", UNQUANTIZED] if self.quantizer == UNQUANTIZED else []
        return [*(["serve", *slots] if slots else ["generate", PROMPT]), *named, *unquantized, *sparse]


@with_options(without={"profile": "it always plans with a profile"})
def plan(wanted: PlanCommandOptions, limits: LimitOptions, engine: ModelOptions, model: ModelArgument = None) -> None:
    """Plan where each part of a model goes, and predict its speed. Nothing is loaded or changed.

    The last line of the output is a command that runs this plan. From -m or -c on, it pins the plan in other commands
    too.
    """
    requested, named = limits.limits(engine), engine.named(model)
    if wanted.n_slots is not None:
        N_SLOTS.check(wanted.n_slots)
        requested = replace(requested, n_sequences=wanted.n_slots + N_EXPRESS)
    if wanted.random_weights is None and named in known_shapes() and local_folder(named) is None:
        named, wanted = None, replace(wanted, random_weights=named)
    weights = engine.arguments()["quantizer"], engine.given.get("sparsity"), engine.given.get("activations")
    subject = _Subject(named, wanted, *weights)
    if wanted.plan_file is not None:
        limits.check_alone(wanted.plan_file)
        _explain_file(wanted.plan_file, subject, engine)
        return
    with stage_progress() as progress:
        request = _planned(subject, engine, requested, progress)
    if wanted.as_json:
        from hetero_ee_profiles.records import to_json

        print(to_json(request.made.sealed), end="")
    elif wanted.curve:
        show(curve_text(request))
    else:
        _explain(request, subject)


def _planned(subject: _Subject, engine: ModelOptions, limits: "Limits", progress: Progress) -> "Request":
    with ending_at_once():
        from hetero_ee.models.blocks import in_layout
        from hetero_ee.planning.hardware import hardware_from
        from hetero_ee.planning.planner import plan as make_plan
        from hetero_ee.planning.reports.what_if import Request
        from hetero_ee.planning.statistics import Statistics
        from hetero_ee.weights.store.reader import is_store
        from hetero_ee_cli.commands.profile import profile_for
        from hetero_ee_profiles.host.process import usable_threads

    weights = subject.wanted.random_weights
    try:
        spec, _, folder = engine.model_spec(subject.model, weights, progress, configuration_only=True)
    except (ModelError, UsageError) as error:
        raise _with_names(error, subject.name) if weights is None else error from error
    if subject.quantizer is not None and folder is not None and not is_store(folder):
        spec = in_layout(spec, subject.quantizer)  # whatever codes the model's files have
    threads = (limits.threads,) if limits.threads else ()
    if subject.wanted.hardware:
        profile = hardware_from(subject.wanted.hardware)
    else:
        profile = profile_for(spec, folder, progress, threads=threads)
        limits = replace(limits, threads=limits.threads and usable_threads(limits.threads))
    statistics = Statistics()
    if subject.wanted.own_drafts:
        spec, statistics = _own_statistics(spec, folder, profile, limits, subject, progress)
    made = make_plan(spec, profile, limits, statistics)
    return Request(spec, profile, limits, statistics, replace(made, name=subject.name))


def _with_names(error: HeteroError, model: str | None) -> HeteroError:
    """Return an error about a model that was not found with the names that plan knows, unless it is a path or an id."""
    if model is None or "/" in model or Path(model).exists():
        return error
    return type(error)(f"{error} Without a download, plan knows {', '.join(similar_names(model))}.")


def _own_statistics(
    spec: "ModelSpec",
    folder: Path | None,
    profile: "HardwareProfile",
    limits: "Limits",
    subject: _Subject,
    progress: Progress,
) -> "tuple[ModelSpec, Statistics]":
    """Return the model and the statistics by the calibration and the draft head that opening this model would find.

    If they can't be read, `progress` receives a notice.
    """
    from hetero_ee.calibration.location import CalibrationPlace
    from hetero_ee.config import cache_folder, warner
    from hetero_ee.hub.gguf.folder import gguf_files
    from hetero_ee.planning.statistics import Statistics
    from hetero_ee.planning.times.threads import fastest_threads
    from hetero_ee.sparsity.expert_order import ExpertOrder
    from hetero_ee.speculation.opening import DraftKnowledge
    from hetero_ee.weights.store.reader import is_store

    warn = warner(progress)
    try:
        knowledge = DraftKnowledge.found(None, None, folder, spec, warn)
        has_files = folder and (is_store(folder) or gguf_files(folder) or any(folder.glob("*.safetensors")))
        if folder is not None and has_files:  # else a plan on paper
            layout = {"neuron_major": spec.neuron_major, "first_in_rows": spec.first_in_rows}
            place = CalibrationPlace.of_model(spec, folder, cache_folder(), subject.quantizer, **layout)
            knowledge = replace(knowledge, calibration=place.find_or_warn(warn))
            if knowledge.calibration is not None and (order := ExpertOrder.of(spec, knowledge.calibration.routes)):
                spec = order.expected(spec)
            if limits.mode == CERTIFIED and knowledge.calibration is not None:
                knowledge = replace(knowledge, certificate=place.certificate(knowledge.calibration))
        threads = limits.threads or fastest_threads(spec, profile)
        return spec, knowledge.statistics(spec, profile, threads, limits.risk, limits.exit_schedule)
    except HeteroError as error:
        warn(f"Planned without drafts: {error}")
        return spec, Statistics()


def _explain_file(file: Path, subject: _Subject, engine: ModelOptions) -> None:
    """Print the plan in the file. If a model is named, check that the plan fits it."""
    with ending_at_once():
        from hetero_ee.planning.plan import Plan
        from hetero_ee.planning.planner import check_fits
        from hetero_ee.planning.reports.explanation import explained
        from hetero_ee_profiles.records import to_json

    made = Plan.load(file)
    if subject.model is not None or subject.wanted.random_weights is not None:
        with stage_progress() as progress:
            named = subject.model, subject.wanted.random_weights
            spec, _, _ = engine.model_spec(*named, progress, configuration_only=True)
        check_fits(made, spec)
    if subject.wanted.as_json:
        print(to_json(made.sealed), end="")
    else:
        show(explained(made))


def _explain(request: "Request", subject: _Subject) -> None:
    from hetero_ee.planning.reports.explanation import explained
    from hetero_ee.planning.reports.pins import pins

    options = [word for pin in pins(request.made, request.limits) for word in pin]
    advice, command = what_if_lines(request), shlex.join(["hetero-ee", *subject.words(request.made.mode), *options])
    show("\n".join([explained(request.made), *(["", *advice] if advice else []), "", command]))
