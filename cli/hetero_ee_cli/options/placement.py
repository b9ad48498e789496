"""Options that say where a model runs and with which drafts, and the engine they open.

A plan is made if one of these options is given, or if a profile of this machine for the model was kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hetero_ee.config import Progress
from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
from hetero_ee_cli.options.engine import EngineOptions
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.engine import Engine
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.runtime.devices.timeline import Span
    from hetero_ee.runtime.placement_request import FindProfile
    from hetero_ee_profiles.hardware import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """A plan to run, a draft head, and what is recorded of the run."""

    PANEL: ClassVar[str] = "Plan and report"

    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Run this plan, as printed by plan --json, instead of making one.")
    ] = None
    draft_head: Annotated[
        Path | None, typer.Option(help="Folder of an EAGLE-1 draft head. [default: the model's own, if it has one]")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of what ran where and when, for chrome://tracing or Perfetto.")
    ] = None
    stats: Annotated[bool, typer.Option("--stats", help="Show where the time went and how drafting did.")] = False
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show times, counts and rates below the text.")] = (
        False
    )

    def checked(self, limits: LimitOptions, engine: EngineOptions) -> "Placed":
        """Loads the plan. Raises UsageError for what is not possible, before any model is loaded."""
        given = limits.given()
        if self.plan_file is not None and given:
            raise UsageError(f"a plan already decides what {given[0]} would; drop {given[0]} or --plan.")
        requested = limits.limits(engine)
        if self.draft_head is not None and not (self.draft_head / "config.json").is_file():
            raise UsageError(f"--draft-head {self.draft_head} has no config.json; name the folder of a draft head.")
        if self.trace is not None and (self.trace.is_dir() or not self.trace.absolute().parent.is_dir()):
            raise UsageError(f"--trace {self.trace} is a folder, or its folder does not exist; name another file.")
        with ending_at_once():
            from hetero_ee.planning.plan import Plan
        plan = None if self.plan_file is None else Plan.load(self.plan_file)
        is_requested = bool(given or self.plan_file or self.draft_head or self.trace)
        return Placed(is_requested, requested, plan, self)

    def write_trace(self, spans: "Sequence[Span]", title: str) -> None:
        """Writes the file of --trace, if given. Raises UsageError and DiskFullError."""
        if self.trace is not None:
            from hetero_ee.runtime.trace import write_trace

            write_trace(self.trace, spans, title)

    def write_trace_of(self, engine: "Engine") -> None:
        """The same, of everything that the engine ran by its plan."""
        if engine.plan is not None:
            self.write_trace(engine.spans, f"{engine.plan.model} on {engine.plan.hardware}")


@dataclass(frozen=True, slots=True)
class Placed:
    """What the options ask for."""

    is_requested: bool  # an option that needs a plan was given
    limits: "Limits"
    plan: "Plan | None"
    options: PlacementOptions

    @property
    def traces(self) -> bool:
        """Whether to record what runs where and when."""
        return self.options.stats or self.options.trace is not None

    def limits_for(self, quantizer: str | None) -> "Limits":
        """fp32 weights have kernels on the CPU only, so they use no GPU unless one was asked for."""
        from hetero_ee.weights.model_weights import UNQUANTIZED

        limits = self.limits
        wants_gpu = limits.gpu_layers is not None or limits.vram_budget_bytes is not None or limits.overrides
        return replace(limits, gpu_layers=0) if quantizer == UNQUANTIZED and not wants_gpu else limits


def open_engine(options: dict[str, Any], placed: Placed, progress: Progress) -> "Engine":
    """The engine for these arguments of Engine.from_pretrained. A plan that nobody asked for never makes it fail."""
    with ending_at_once():
        from hetero_ee.engine import Engine
    from hetero_ee.weights.model_weights import UNQUANTIZED

    options = options | {"progress": progress}
    if options.pop("profile", None) == "off":
        return Engine.from_pretrained(**options)
    threads, plan = options["threads"], placed.plan
    if placed.is_requested:
        return Engine.from_pretrained(
            plan=plan,
            limits=placed.limits_for(options["quantizer"]) if plan is None else None,
            profile=_profile_finder(threads, progress, measures=plan is None),
            draft_head=placed.options.draft_head,
            traces=placed.traces,
            **options,
        )
    if options["quantizer"] == UNQUANTIZED:  # profiles are of int4 weights
        return Engine.from_pretrained(**options)
    kept = _profile_finder(threads, progress, measures=False)
    try:
        return Engine.from_pretrained(profile=kept, traces=placed.traces, **options)
    except (UsageError, DeviceMemoryError, DeviceLostError) as error:
        engine = Engine.from_pretrained(**options)
        progress(f"No plan could be made or opened, so the CPU runs everything: {error}".removesuffix("."), 0, 0)
        return engine


def _profile_finder(threads: int, progress: Progress, *, measures: bool) -> "FindProfile":
    """Finds the kept profile of this machine. measures: if there is none, it is measured."""

    def find(spec: "ModelSpec", folder: Path) -> "HardwareProfile | None":
        from hetero_ee_cli.commands.profile import kept_profile_for, profile_for
        from hetero_ee_profiles.host.process import physical_core_count

        known = kept_profile_for(spec, threads)
        if known is None and measures:
            return profile_for(spec, folder, progress, threads=(threads or physical_core_count(),))
        return known

    return find
