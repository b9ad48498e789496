"""Flags that say where a model runs and how it decodes, for the commands that generate; and the engine opened by them.

A plan is made where one of the flags is given, or where this machine's profile for the model is kept from before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.options.planning import Progress, limits_from
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.engine import Engine
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee_profiles.hardware import HardwareProfile

PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Run this plan, as plan --json prints it, instead of making one.")
]
DraftHead = Annotated[
    Path | None, typer.Option(help="Folder of an EAGLE-1 head to draft with. [default: the model's own, where it has]")
]
Trace = Annotated[
    Path | None, typer.Option(help="Write what ran where and when there, for chrome://tracing or Perfetto.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Say where the time went and what drafting brought.")]


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """is_asked: one of the flags that need a plan was given. limits: as asked for, the planner's own where nothing was.

    draft_head, trace, stats: the flags of these names.
    """

    is_asked: bool
    limits: "Limits"
    plan: "Plan | None" = None
    draft_head: Path | None = None
    trace: Path | None = None
    stats: bool = False

    @property
    def traces(self) -> bool:
        """Whether it is to be recorded what runs where and when."""
        return self.stats or self.trace is not None


def placement_options(
    *, plan_file: Path | None, draft_head: Path | None, trace: Path | None, stats: bool, **limiting: Any
) -> PlacementOptions:
    """limiting: the flags of limits_from. Raises UsageError for what can't be, before anything is loaded."""
    given = limits_beside_plan(plan_file, **limiting)
    limits = limits_from(ram_budget=None, **limiting)
    check_draft_head(draft_head)
    check_trace(trace)
    with ending_at_once():
        from hetero_ee.planning.plan import Plan
    plan = None if plan_file is None else Plan.load(plan_file)
    is_asked = bool(given or plan_file or draft_head or trace)
    return PlacementOptions(is_asked, limits, plan, draft_head, trace, stats)


def limits_beside_plan(plan_file: Path | None, **limiting: Any) -> list[str]:
    """Which flags of limits_from were given, but settings. Raises UsageError for any beside --plan."""
    from hetero_ee.errors import UsageError

    settings = ("ctx_size", "threads")
    given = [name for name, value in limiting.items() if value not in (None, []) and name not in settings]
    if plan_file is not None and given:
        flag = "--" + {"draft_length": "draft_length"}.get(given[0], given[0]).replace("_", "-")
        raise UsageError(f"a plan says already what {flag} would say; drop {flag} or --plan.")
    return given


def open_engine(options: dict[str, Any], placement: PlacementOptions, progress: Progress) -> "Engine":
    """The engine of these options of Engine.from_pretrained. What nobody asked for never makes it fail."""
    with ending_at_once():
        from hetero_ee.engine import Engine
    from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
    from hetero_ee.weights.model_weights import UNQUANTIZED

    options = options | {"progress": progress}
    is_dense = options["quantizer"] == UNQUANTIZED
    if placement.is_asked:
        limits = for_dense(placement.limits) if is_dense else placement.limits
        return Engine.from_pretrained(
            plan=placement.plan,
            limits=limits if placement.plan is None else None,
            profile=(_known if placement.plan is not None else _measured)(options["threads"], progress),
            draft_head=placement.draft_head,
            traces=placement.traces,
            **options,
        )
    if is_dense:  # profiles are of int4 weights
        return Engine.from_pretrained(**options)
    try:
        return Engine.from_pretrained(profile=_known(options["threads"], progress), traces=placement.traces, **options)
    except (UsageError, DeviceMemoryError, DeviceLostError) as error:
        engine = Engine.from_pretrained(**options)
        progress(f"No plan could be made or opened, so the CPU runs everything: {error}".removesuffix("."), 0, 0)
        return engine


def write_spans(engine: "Engine", placement: PlacementOptions) -> None:
    """What --trace asks for. Raises UsageError and DiskFullError."""
    if placement.trace is None or engine.plan is None:
        return
    from hetero_ee.runtime.trace import write_trace

    write_trace(placement.trace, engine.spans, f"{engine.plan.model} on {engine.plan.hardware}")


FindProfile = Callable[["ModelSpec", Path], "HardwareProfile | None"]


def _known(threads: int, _progress: Progress) -> FindProfile:
    """Finds a profile that is kept."""

    def find(spec: "ModelSpec", folder: Path) -> "HardwareProfile | None":
        from hetero_ee_cli.commands.profile import kept_profile_for

        return kept_profile_for(spec, threads)

    return find


def _measured(threads: int, progress: Progress) -> FindProfile:
    """Finds it, or measures it now."""

    def find(spec: "ModelSpec", folder: Path) -> "HardwareProfile":
        from hetero_ee_cli.commands.profile import kept_profile_for, profile_for
        from hetero_ee_profiles.host.process import physical_core_count

        known = kept_profile_for(spec, threads)
        return known or profile_for(spec, folder, progress, threads=(threads or physical_core_count(),))

    return find


def for_dense(limits: "Limits") -> "Limits":
    """Weights of fp32 have kernels on the CPU alone, where nobody asked for a GPU."""
    wants_gpu = limits.gpu_layers is not None or limits.vram_budget_bytes is not None or limits.overrides
    return limits if wants_gpu else replace(limits, gpu_layers=0)


def check_draft_head(draft_head: Path | None) -> None:
    """Raises UsageError for a folder that is none of a draft head."""
    from hetero_ee.errors import UsageError

    if draft_head is not None and not (draft_head / "config.json").is_file():
        raise UsageError(f"--draft-head {draft_head} has no config.json; name the folder of a draft head.")


def check_trace(trace: Path | None) -> None:
    """Raises UsageError for a file that can't be one."""
    from hetero_ee.errors import UsageError

    if trace is not None and (trace.is_dir() or not trace.absolute().parent.is_dir()):
        raise UsageError(f"--trace {trace} is a folder, or in one that is not there; name another file.")
