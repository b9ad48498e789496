"""Options that say where a model runs and with which drafts, and the engine they open.

A plan is made by this machine's profile, which is measured at first use, unless the setting `profile` is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import OFF, PLAN, RUN_OPTIONS
from hetero_ee_cli.options.engine import ModelOptions
from hetero_ee_cli.options.flags import typer_option
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.engine import Engine
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.runtime.devices.timeline import Span


DRAFT_HEAD = RUN_OPTIONS["draft_head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """A plan to run, a draft head, and records of the run."""

    PANEL: ClassVar[str] = "Plan and report"

    plan_file: Annotated[Path | None, typer_option(PLAN)] = None
    draft_head: Annotated[str | None, typer_option(DRAFT_HEAD)] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of what ran where and when, for chrome://tracing or Perfetto.")
    ] = None
    stats: Annotated[bool, typer.Option("--stats", help="Show where the time went and how drafting did.")] = False
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show times, counts and rates below the text.")] = (
        False
    )

    def checked(self, limits: LimitOptions, engine: ModelOptions) -> "Placed":
        """Check the options before any model is loaded, and load the plan.

        Raises:
            UsageError: if something is not possible.
        """
        given = limits.flags()
        if self.plan_file is not None and given:
            raise UsageError(f"a plan already decides what {given[0]} would; drop {given[0]} or --plan.")
        requested = limits.limits(engine)
        if self.draft_head is not None:
            _check_head(self.draft_head)
        if self.trace is not None and (self.trace.is_dir() or not self.trace.absolute().parent.is_dir()):
            raise UsageError(f"--trace {self.trace} is a folder, or its folder does not exist; name another file.")
        with ending_at_once():
            from hetero_ee.planning.plan import Plan
        plan = None if self.plan_file is None else Plan.load(self.plan_file)
        others = {"--plan": self.plan_file, "--draft-head": self.draft_head, "--trace": self.trace}
        asking = [*given, *(flag for flag, value in others.items() if value is not None)]
        return Placed(asking[0] if asking else "", requested, plan, self)

    def write_trace(self, spans: "Sequence[Span]", title: str) -> None:
        """Write the file of --trace, if it was given.

        Raises:
            UsageError: if the file can't be written.
            DiskFullError: if the disk is full.
        """
        if self.trace is not None:
            from hetero_ee.runtime.trace import write_trace

            write_trace(self.trace, spans, title)

    def write_trace_of(self, engine: "Engine") -> None:
        """Write everything that the engine ran by its plan to the file of --trace."""
        if engine.plan is not None:
            self.write_trace(engine.spans, f"{engine.plan.model} on {engine.plan.hardware}")


@dataclass(frozen=True, slots=True)
class Placed:
    """The options of a plan, checked."""

    asking: str  # the first given option that needs a plan, empty if there isn't one
    limits: "Limits"
    plan: "Plan | None"
    options: PlacementOptions

    @property
    def traces(self) -> bool:
        """Whether to record what runs where and when."""
        return self.options.stats or self.options.trace is not None


def _check_head(head: str) -> None:
    """Check that the text is the folder of a draft head, or an id."""
    from hetero_ee.hub.draft_head import is_head_id

    if not is_head_id(head) and not (Path(head) / "config.json").is_file():
        raise UsageError(DRAFT_HEAD, f" {head} has no config.json; name the folder of a draft head, or an id.")


def open_engine(options: dict[str, Any], placed: Placed, progress: Progress) -> "Engine":
    """Open the engine. If no option asks for a plan, a plan that can't be made is only a remark.

    Args:
        options: `model` and options of Engine.from_pretrained.
    """
    profile = options.get("profile") or read_settings().value("profile")
    if placed.asking and placed.plan is None and profile == OFF:
        raise UsageError(
            f"{placed.asking} needs a plan, and profile is off; drop {placed.asking}, or set profile to auto."
        )
    with ending_at_once():
        from hetero_ee.engine import Engine

    return Engine.from_pretrained(
        plan=placed.plan,
        limits=placed.limits if placed.asking and placed.plan is None else None,
        draft_head=placed.options.draft_head,
        traces=placed.traces,
        progress=progress,
        **options,
    )
