"""PlanRequest: the caller's options for planning, checked before the model is loaded and completed afterwards."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hetero_ee.config import Progress
from hetero_ee.config.settings import read_settings
from hetero_ee.costs.kv_types import default_kv_type
from hetero_ee.errors import UsageError, meant, shown
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import (
    AUTO,
    LIMITS,
    MODEL_OPTIONS,
    MTP_HEAD,
    MTP_WORDS,
    NO_HEAD,
    OFF,
    PLAN,
    PLAN_OPTIONS,
    PROFILE,
    RUN_OPTIONS,
    UNQUANTIZED,
    ModelKeywords,
    PlanKeywords,
    RunKeywords,
)
from hetero_ee.options.option import Option
from hetero_ee.planning.hardware import hardware_from
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.statistics import Statistics
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.host.process import usable_threads

FindProfile = Callable[[ModelSpec, Path], HardwareProfile | None]
AskedProfile = HardwareProfile | FindProfile | str  # one, a function that finds one for the model, AUTO or OFF
CONTEXT, DRAFT_HEAD, EMULATE = MODEL_OPTIONS["context_tokens"], RUN_OPTIONS["draft_head"], RUN_OPTIONS["emulate"]
DRAFT_MODEL = RUN_OPTIONS["draft_model"]
CHECKED = [MODEL_OPTIONS[name] for name in ("quantizer", "activations", "context_tokens", "threads")]


class EngineOptions(ModelKeywords, PlanKeywords, RunKeywords, total=False):
    """Keywords of `Engine.from_pretrained`; options/engine.py explains each."""

    profile: HardwareProfile | FindProfile | str | Path | None
    limits: Limits | None
    plan: Plan | str | Path | None
    progress: Progress | bool | None


def check_options(options: Mapping[str, Any]) -> None:
    """Check the names of the options, and the values that can be checked without loading the model.

    Raises:
        TypeError: if a name is unknown.
        UsageError: if a value is impossible.
    """
    for name in options:
        if name not in EngineOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}; {meant(name, EngineOptions.__annotations__)}")
    if options.get("draft_head") is not None and options.get("draft_model") is not None:
        raise UsageError(DRAFT_HEAD, " and ", DRAFT_MODEL, " both compute drafts; leave out one of them.")
    for option in CHECKED:
        value = options.get(option.name, option.default)
        if not (value is None and option.default is None):
            option.check(value)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request to make a plan, or to run a given one.

    `of` makes it from options; `completed` adds facts that are known only after the model's files are read.
    """

    profile: HardwareProfile | None = None  # of the machine; None until it is known, or if a given plan needs none
    limits: Limits = field(default_factory=Limits)
    plan: Plan | None = None  # to run, instead of making one
    statistics: Statistics = field(default_factory=Statistics)
    emulates: bool = False  # the profile's machine, on this CPU; else this machine is used
    traces: bool = False  # records what runs where and when, which an emulated machine always does
    asked_profile: AskedProfile = AUTO
    limited_by: Option | None = None  # the first option that set a limit; None if none did
    draft_head: Path | str | None = None  # a folder, MTP_HEAD or NO_HEAD
    draft_model: str | Path | None = None  # as the caller named it
    context_tokens: int = 0  # 0: any
    chooses_threads: bool = False  # the caller gave no thread count
    n_sequences: int | None = None  # None: those of the limits

    @classmethod
    def of(cls, options: EngineOptions) -> Self:
        """Return the request that these options make. The draft head must be a local folder, not an id on the Hub.

        Raises:
            UsageError: if a value is impossible, or two options contradict each other.
        """
        emulates = options.get("emulate", False)
        EMULATE.check(emulates)
        if (n_sequences := options.get("n_sequences")) is not None:
            RUN_OPTIONS["n_sequences"].check(n_sequences)
        limits, limited_by = _limits(options, emulates=emulates)
        request = cls(
            limits=limits,
            plan=_plan(options.get("plan")),
            emulates=emulates,
            traces=options.get("traces", False),
            asked_profile=_profile(options.get("profile")),
            limited_by=limited_by,
            draft_head=head_name(options.get("draft_head")),
            draft_model=options.get("draft_model"),
            context_tokens=options.get("context_tokens", 0),
            chooses_threads=not options.get("threads"),
            n_sequences=n_sequences,
        )
        request._check()
        return request

    @property
    def planned_context_tokens(self) -> int:
        """The requested context length, from an option, a plan or limits; 0 if none was requested."""
        return (
            self.context_tokens or (0 if self.plan is None else self.plan.context_tokens) or self.limits.context_tokens
        )

    @property
    def mode(self) -> str | None:
        """The requested mode, from limits or a given plan; None if the planner chooses."""
        return self.plan.mode if self.plan is not None and self.limited_by is None else self.limits.mode

    @property
    def risk(self) -> float | None:
        """The requested risk of mode certified, from limits or a given plan; None if not given."""
        return self.plan.risk if self.plan is not None and self.limited_by is None else self.limits.risk

    @property
    def needs_plan(self) -> bool:
        """Whether an option needs a plan, so that running without a plan would be an error."""
        wishes = self.plan, self.limited_by, self._wanted_head, self.draft_model
        return not isinstance(self.asked_profile, str) or any(wish is not None for wish in wishes)

    @property
    def _wanted_head(self) -> Path | str | None:
        """The draft head that the caller wants, or None."""
        return None if self.draft_head == NO_HEAD else self.draft_head

    def found_profile(self, spec: ModelSpec, folder: Path, automatic: FindProfile) -> HardwareProfile | None:
        """Return the profile to plan with, None if nothing is planned.

        Args:
            automatic: finds this machine's profile; called unless the caller gave a profile or switched planning off.

        Raises:
            UsageError: if a profile is needed and none is found.
        """
        if self.asked_profile == OFF:
            return None
        find = automatic if isinstance(self.asked_profile, str) else self.asked_profile
        profile = find if isinstance(find, HardwareProfile) else find(spec, folder)
        if profile is not None and not isinstance(profile, HardwareProfile):
            raise UsageError("the function given as ", PROFILE, f" found {shown(profile)}; expected a HardwareProfile.")
        if profile is None and (self.emulates or (self.plan is None and self.limited_by is not None)):
            raise UsageError("no profile was found to plan by or to emulate; give one with ", PROFILE, ".")
        if profile is not None and self.plan is not None and self.emulates:
            check_emulates(self.plan, profile)
        return profile

    def completed(self, profile: HardwareProfile | None, quantizer: str, statistics: Statistics) -> Self:
        """Return the request with the machine's profile and the model's statistics.

        Unquantized weights run on the CPU unless the request mentions the GPU.
        """
        limits = Limits() if profile is None else self.limits
        if profile is not None and self.context_tokens:
            limits = replace(limits, context_tokens=self.context_tokens)
        if self.n_sequences is not None:
            limits = replace(limits, n_sequences=self.n_sequences)
        if quantizer == UNQUANTIZED:
            wants_gpu = limits.gpu_layers is not None or limits.vram_budget_bytes is not None or limits.overrides
            kv_type = limits.kv_type or default_kv_type(quantizer)
            gpu_layers = limits.gpu_layers if self.emulates or wants_gpu else 0
            limits = replace(limits, kv_type=kv_type, gpu_layers=gpu_layers)
        return replace(self, profile=profile, limits=limits, statistics=statistics)

    def _check(self) -> None:
        """Check that the options don't contradict each other."""
        if self.plan is not None:
            self._check_next_to_plan(self.plan)
        if self.emulates and isinstance(self.asked_profile, str):
            raise UsageError("which machine is to be emulated? Give its profile with ", PROFILE, ".")
        drafts = ((DRAFT_HEAD, self._wanted_head), (DRAFT_MODEL, self.draft_model))
        unplanned = self.limited_by or next((option for option, value in drafts if value is not None), None)
        if self.asked_profile == OFF and self.plan is None and unplanned is not None:
            off = f" is {OFF}; leave out "
            raise UsageError(unplanned, " needs a plan, and ", PROFILE, off, unplanned, ", or give another profile.")

    def _check_next_to_plan(self, made: Plan) -> None:
        """Check that no option contradicts the given plan. Raises: UsageError: if one does."""
        if name := self.limited_by:
            raise UsageError(
                "a plan already decides what ", name, " would; leave out ", name, ", or plan again with it."
            )
        if self.context_tokens not in (0, made.context_tokens):
            numbers = f" is {self.context_tokens} and the plan is for {made.context_tokens}; leave out "
            raise UsageError(CONTEXT, numbers, CONTEXT, ", or make a plan for it.")


def check_emulates(made: Plan, profile: HardwareProfile) -> None:
    """Check that the profile's machine has the memory that the plan needs.

    Raises:
        UsageError: if it doesn't.
    """
    n_gpu_bytes, n_ram_bytes = made.n_bytes("gpu"), made.n_bytes("cpu")
    if n_gpu_bytes and profile.gpu is None:
        raise UsageError(
            f"the plan takes {n_gpu_bytes} bytes of a GPU's memory and {profile.name} has none; plan again."
        )
    if profile.gpu is not None and n_gpu_bytes > profile.gpu.free_bytes:
        raise UsageError(
            f"the plan takes {n_gpu_bytes} bytes of the GPU's memory and {profile.name} has {profile.gpu.free_bytes} "
            "free; plan again for that machine."
        )
    if n_ram_bytes > profile.machine.ram_bytes:
        raise UsageError(
            f"the plan takes {n_ram_bytes} bytes of RAM and {profile.name} has {profile.machine.ram_bytes}; plan again "
            "for that machine."
        )


def _limits(options: EngineOptions, *, emulates: bool) -> tuple[Limits, Option | None]:
    """Return the limits from the option `limits` or from single options, and the first option that sets one.

    Thread counts are lowered to those that this machine can run, except for an emulated machine.
    """
    limits = options.get("limits")
    if limits is not None and not isinstance(limits, Limits):
        raise UsageError(LIMITS, f" is {shown(limits)}; expected Limits(...).")
    given = {name: value for name, value in options.items() if name in PLAN_OPTIONS and value is not None}
    first = next((option for name, option in PLAN_OPTIONS.items() if name in given), None)
    if first is None:
        if limits is None:
            return Limits(), None
        if limits.threads and not emulates:
            limits = replace(limits, threads=usable_threads(limits.threads))
        return limits, LIMITS
    if limits is not None:
        raise UsageError(LIMITS, " already decides what ", first, " would; leave out one of them.")
    return Limits.of(given), first


def _profile(profile: AskedProfile | Path | None) -> AskedProfile:
    """Return the profile, read from a file if it is a name. None selects the one from the user's settings."""
    if profile is None:
        setting: str = read_settings().value(PROFILE.setting)
        return setting
    if isinstance(profile, str | Path):
        return profile if profile in (AUTO, OFF) and isinstance(profile, str) else hardware_from(profile)
    if not isinstance(profile, HardwareProfile) and not callable(profile):
        kinds = (
            "a HardwareProfile, the name of a shipped one, the path of a file with one, or a function that finds one"
        )
        raise UsageError(PROFILE, f" is {shown(profile)}; expected {AUTO!r}, {OFF!r}, {kinds}.")
    return profile


def _plan(plan: object) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        raise UsageError(PLAN, f" is {shown(plan)}; expected a Plan, or a file that hetero-ee plan --json has written.")
    return Plan.load(Path(plan))


def head_name(draft_head: object) -> Path | str | None:
    """Check that the draft head is a local folder and return its path, or a word for a head. Raises: UsageError."""
    if draft_head is None or draft_head == NO_HEAD:
        return draft_head and NO_HEAD
    if draft_head in MTP_WORDS:
        return MTP_HEAD
    if not isinstance(draft_head, str | Path) or not str(draft_head):
        raise UsageError(DRAFT_HEAD, f" is {shown(draft_head)}; expected the folder of a draft head, or an id.")
    try:
        is_folder = Path(draft_head).is_dir()
    except (OSError, ValueError):  # a name no file can have
        is_folder = False
    if not is_folder:
        advice = f"name the folder of a draft head, an id on the Hub such as org/name, {MTP_HEAD} or {NO_HEAD}."
        raise UsageError(DRAFT_HEAD, f" {shown(str(draft_head))} is not a folder; {advice}")
    return Path(draft_head)
