"""Options for the placement of a model, its limits and its drafts, and for opening the engine with them.

The plan is made from this machine's profile, which is measured at first use, unless the setting `profile` is off.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import MTP_WORDS, NO_HEAD, OFF, PLAN, PLAN_OPTIONS, RUN_OPTIONS, UNQUANTIZED
from hetero_ee_cli.options.engine import ModelOptions
from hetero_ee_cli.options.flags import OptionGroup, hardware_names, one_of, typer_option
from hetero_ee_cli.terminal.output import say_loading
from hetero_ee_cli.terminal.progress import PhaseClock, stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.engine import Engine
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.runtime.compiling import Compilation
    from hetero_ee.runtime.devices.timeline import Span

ALL_LAYERS = 2**20  # more than any model has
LAYER_WORDS = {"auto": None, "-1": None, "all": ALL_LAYERS, "-2": ALL_LAYERS}  # the numbers as llama.cpp has them
DEVICE_WORDS = {"cpu": "cpu", "cuda0": "gpu", "cuda:0": "gpu"}  # device names in other tools' overrides

Hardware = Annotated[
    str | None,
    typer.Option(
        help="Shipped profile of the machine, or a profile's JSON file. [default: this machine, measured]",
        autocompletion=hardware_names,
    ),
]


class LimitOptions(OptionGroup):
    """Limits and pins of a plan. The planner chooses those that are not given."""

    PANEL: ClassVar = "Placement"
    OPTIONS: ClassVar = PLAN_OPTIONS
    COMPLETIONS: ClassVar = {"gpu_layers": one_of(("auto", "all"))}

    def flags(self) -> list[str]:
        return [self.OPTIONS[name].flag for name in self.given]

    def check_alone(self, plan_file: Path | None) -> None:
        """Check that no limit is given together with a plan, which already decides everything."""
        if plan_file is not None and self.given:
            given = self.flags()[0]
            raise UsageError(f"a plan already decides what {given} would; drop {given} or --plan.")

    def limits(self, model: ModelOptions) -> "Limits":
        with ending_at_once():
            from hetero_ee.costs.kv_types import default_kv_type
            from hetero_ee.planning.limits import Limits, override_list

        opening, given = model.arguments(), dict(self.given)
        if "gpu_layers" in given:
            given["gpu_layers"] = _layers(given["gpu_layers"])
        if "override" in given:
            given["override"] = [_with_our_device(one) for text in given["override"] for one in override_list(text)]
        same = {name: opening[name] for name in ("context_tokens", "threads")}
        return Limits.of({"kv_type": default_kv_type(opening["quantizer"])} | given | same)


def _layers(text: str) -> int | None:
    """Return the number of layers that -ngl requests, or None to let the planner choose."""
    if text in LAYER_WORDS:
        return LAYER_WORDS[text]
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UsageError(PLAN_OPTIONS["gpu_layers"], f" is {shown(text)}; expected a number of layers, all or auto.")
    return int(text)


def _with_our_device(override: str) -> str:
    """Return the override with this project's device names instead of other tools' CPU and CUDA0."""
    pattern, equals, device = override.rpartition("=")
    return f"{pattern}{equals}{DEVICE_WORDS.get(device.lower(), device)}"


DRAFT_HEAD, DRAFT_MODEL = RUN_OPTIONS["draft_head"], RUN_OPTIONS["draft_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """Options for a given plan, a draft head or model, and reports of the run."""

    PANEL: ClassVar[str] = "Plan and report"

    plan_file: Annotated[Path | None, typer_option(PLAN)] = None
    draft_head: Annotated[str | None, typer_option(DRAFT_HEAD)] = None
    draft_model: Annotated[str | None, typer_option(DRAFT_MODEL)] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of what ran where and when, for chrome://tracing or Perfetto.")
    ] = None
    stats: Annotated[bool, typer.Option("--stats", help="Show where the time went and how drafting did.")] = False
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show times, counts and rates below the text.")] = (
        False
    )

    def checked(self, limits: LimitOptions, engine: ModelOptions) -> "Placed":
        """Check the options and load the plan, before any model is loaded."""
        given = limits.flags()
        limits.check_alone(self.plan_file)
        requested = limits.limits(engine)
        if (head := self.draft_head) is not None:
            from hetero_ee.hub.draft_head import is_head_id

            is_named = head in (NO_HEAD, *MTP_WORDS) or is_head_id(head)
            if not is_named and not (Path(head) / "config.json").is_file():
                raise UsageError(DRAFT_HEAD, f" {head} has no config.json; name the folder of a draft head, or an id.")
        if self.trace is not None and (self.trace.is_dir() or not self.trace.absolute().parent.is_dir()):
            raise UsageError(f"--trace {self.trace} is a folder, or its folder does not exist; name another file.")
        with ending_at_once():
            from hetero_ee.planning.plan import Plan
        plan = None if self.plan_file is None else Plan.load(self.plan_file)
        others = {
            "--plan": self.plan_file,
            DRAFT_HEAD.flag: None if self.draft_head == NO_HEAD else self.draft_head,
            DRAFT_MODEL.flag: self.draft_model,
            "--trace": self.trace,
        }
        asking = [*given, *(flag for flag, value in others.items() if value is not None)]
        return Placed(asking[0] if asking else "", requested, plan, self)

    def write_trace(self, spans: "Sequence[Span]", title: str) -> None:
        if self.trace is not None:
            from hetero_ee.runtime.trace import write_trace

            write_trace(self.trace, spans, title)


@dataclass(frozen=True, slots=True)
class Placed:
    """Checked options of a plan."""

    asking: str  # the first given option that needs a plan, empty if there isn't one
    limits: "Limits"
    plan: "Plan | None"
    options: PlacementOptions

    @property
    def traces(self) -> bool:
        return self.options.stats or self.options.trace is not None


def open_engine(
    options: dict[str, Any], placed: Placed, progress: Progress, compilation: "Compilation | None" = None
) -> "Engine":
    """Open the engine. If the plan can't be made and no option needs one, a notice is enough.

    `options` has the model and other arguments of Engine.from_pretrained, `compilation` is that of `compiling`.
    """
    profile = options.get("profile") or read_settings().value("profile")
    if placed.asking and placed.plan is None and profile == OFF:
        raise UsageError(
            f"{placed.asking} needs a plan, and profile is off; drop {placed.asking}, or set profile to auto."
        )
    with ending_at_once():
        from hetero_ee.engine import Engine
        from hetero_ee.opening import open_named

    chosen: Any = {name: value for name, value in options.items() if name != "model"}
    chosen |= {"plan": placed.plan, "draft_head": placed.options.draft_head, "draft_model": placed.options.draft_model}
    chosen |= {"limits": placed.limits if placed.asking and placed.plan is None else None}
    chosen |= {"traces": placed.traces, "progress": progress}
    return Engine(*open_named(options["model"], chosen, compilation))


@contextmanager
def compiling(options: dict[str, Any], progress: Progress) -> Iterator["Compilation | None"]:
    """Compile the kernels, if they aren't yet, while this process imports torch for a second or two."""
    if options["quantizer"] == UNQUANTIZED:
        yield None
        return
    with ending_at_once():
        from hetero_ee.runtime.compiling import Compilation
        from hetero_ee_profiles.host.process import usable_threads

    with Compilation.started(usable_threads(options["threads"]), progress) as compilation:
        yield compilation


@dataclass(frozen=True, slots=True)
class Session:
    engine: "Engine"
    model: str | None  # as the user named it
    placement: PlacementOptions
    load_s: float  # seconds needed to open the model
    phases: Mapping[str, float]  # seconds of each stage of opening, by the stage's name


@contextmanager
def session(
    model: ModelOptions,
    argument: str | None,
    limits: LimitOptions,
    placement: PlacementOptions,
    *,
    announces: bool = False,
) -> Iterator[Session]:
    """Open the model. At the end, write the trace if it is requested.

    Args:
        announces: name the model on a terminal before it is loaded.
    """
    options, start_s = model.arguments(argument), time.perf_counter()
    if announces:
        say_loading(options["model"])
    with stage_progress() as progress:
        phases = PhaseClock(progress)
        with compiling(options, phases) as compilation:
            placed = placement.checked(limits, model)
            with ending_at_once():
                import hetero_ee.engine  # noqa: F401 - only to time it
            phases.seconds["Importing libraries"] = time.perf_counter() - start_s
            engine = open_engine(options, placed, phases, compilation)
        with engine:
            load_s = time.perf_counter() - start_s
            try:
                yield Session(engine, options["model"], placement, load_s, phases.seconds)
            finally:
                if engine.plan is not None:
                    placement.write_trace(engine.spans, f"{engine.plan.model} on {engine.plan.hardware}")
