"""What a caller asks of where a model runs: checked before anything is loaded, then made a Placement."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from hetero_ee.config.settings import AUTO, OFF, read_settings
from hetero_ee.costs.kv_types import default_kv_type
from hetero_ee.errors import UsageError, shown
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.hardware import hardware_from
from hetero_ee.planning.limits import Limits, parse_override
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.statistics import Statistics
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.opening import Placement
from hetero_ee.weights.model_weights import UNQUANTIZED
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.host.process import usable_threads
from hetero_ee_profiles.units import GIB

FindProfile = Callable[[ModelSpec, Path], HardwareProfile | None]
AskedProfile = HardwareProfile | FindProfile | str  # one, what finds one once the model is known, AUTO or OFF
MAX_GIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """See Engine.from_pretrained. Raises UsageError for what contradicts itself."""

    plan: Plan | None
    limits: Limits | None
    limits_name: str  # of the argument that they come from, or the first of several
    profile: AskedProfile
    draft_head: Path | None
    emulates: bool
    traces: bool
    context_tokens: int

    @classmethod
    def asked(
        cls,
        plan: Plan | str | Path | None,
        limits: Limits | None,
        pins: Mapping[str, Any],
        profile: AskedProfile | Path | None,
        draft_head: str | Path | None,
        *,
        emulates: bool,
        traces: bool,
        context_tokens: int,
    ) -> Self:
        """Of arguments of Engine.from_pretrained; pins: those that `limits` may hold in their place."""
        asked_limits, name = _limits(limits, pins, emulates=emulates)
        return cls(
            plan=_plan(plan),
            limits=asked_limits,
            limits_name=name,
            profile=_profile(profile),
            draft_head=_folder(draft_head),
            emulates=emulates,
            traces=traces,
            context_tokens=context_tokens,
        )

    def __post_init__(self) -> None:
        if not isinstance(self.emulates, bool):
            raise UsageError(f"emulate is {shown(self.emulates)}; expected True or False.")
        if self.plan is not None:
            self._check_beside_plan(self.plan)
        if self.emulates and isinstance(self.profile, str):
            raise UsageError("which machine is to be emulated? Give its profile with profile=...")
        unplanned = self.limits_name or ("draft_head" if self.draft_head is not None else "")
        if self.profile == OFF and self.plan is None and unplanned:
            raise UsageError(
                f"{unplanned} is for a plan, and profile is off, so there is none; leave out {unplanned}, or give "
                "another profile."
            )

    @property
    def asked_context_tokens(self) -> int:
        """0 where none was asked for, by number, by limits or by a plan."""
        by_plan = 0 if self.plan is None else self.plan.context_tokens
        return self.context_tokens or by_plan or (0 if self.limits is None else self.limits.context_tokens)

    @property
    def mode(self) -> str | None:
        """That was asked for, by limits or by a plan."""
        by_plan = None if self.plan is None else self.plan.mode
        return by_plan if self.limits is None else self.limits.mode

    @property
    def risk(self) -> float | None:
        """Likewise."""
        by_plan = None if self.plan is None else self.plan.risk
        return by_plan if self.limits is None else self.limits.risk

    @property
    def is_asked(self) -> bool:
        """Whether anything was asked for that takes a plan, so that it is an error where there can't be one."""
        wishes = self.plan, self.limits, self.draft_head
        return not isinstance(self.profile, str) or any(wish is not None for wish in wishes)

    def found_profile(self, spec: ModelSpec, folder: Path, automatic: FindProfile) -> HardwareProfile | None:
        """None where nothing is planned. automatic: finds one for AUTO. Raises UsageError for one that is missing."""
        if self.profile == OFF:
            return None
        find = automatic if isinstance(self.profile, str) else self.profile
        profile = find if isinstance(find, HardwareProfile) else find(spec, folder)
        if profile is not None and not isinstance(profile, HardwareProfile):
            raise UsageError(f"the function given as profile found {shown(profile)}; expected a HardwareProfile.")
        if profile is None and (self.emulates or (self.plan is None and self.limits is not None)):
            raise UsageError("no profile was found to plan by or to emulate; give one with profile=...")
        if profile is not None and self.plan is not None and self.emulates:
            check_emulates(self.plan, profile)
        return profile

    def placement(self, profile: HardwareProfile | None, quantizer: str, statistics: Statistics) -> Placement:
        """Of a profile, a plan or both."""
        limits = Limits()
        if profile is not None:
            limits = self.limits or limits
            if self.context_tokens:
                limits = replace(limits, context_tokens=self.context_tokens)
        wants_gpu = limits.gpu_layers is not None or limits.vram_budget_bytes is not None or limits.overrides
        if quantizer == UNQUANTIZED:  # as without a plan, on the CPU unless a GPU is asked for, without such kernels
            kv_type = limits.kv_type or default_kv_type(quantizer)
            gpu_layers = limits.gpu_layers if self.emulates or wants_gpu else 0
            limits = replace(limits, kv_type=kv_type, gpu_layers=gpu_layers)
        return Placement(profile, limits, self.plan, statistics, emulates=self.emulates, traces=self.traces)

    def _check_beside_plan(self, made: Plan) -> None:
        """A plan has decided all of that already; what it contradicts is not dropped in silence."""
        if name := self.limits_name:
            raise UsageError(f"a plan says already what {name} would say; leave out {name}, or plan again with it.")
        if self.context_tokens not in (0, made.context_tokens):
            raise UsageError(
                f"context_tokens is {self.context_tokens} and the plan is for {made.context_tokens}; leave "
                "context_tokens out, or make a plan for it."
            )


def _limits(limits: Limits | None, pins: Mapping[str, Any], *, emulates: bool) -> tuple[Limits | None, str]:
    """Limits as they were given, or made of those arguments of Engine.from_pretrained that are not None; and the name
    of the argument, the first of several. On this machine, threads are those that can run. Raises UsageError."""
    if limits is not None and not isinstance(limits, Limits):
        raise UsageError(f"limits is {shown(limits)}; expected Limits(...).")
    given = [name for name, value in pins.items() if value is not None]
    if not given:
        if limits is not None and limits.threads and not emulates:
            limits = replace(limits, threads=usable_threads(limits.threads))
        return limits, "" if limits is None else "limits"
    if limits is not None:
        raise UsageError(f"limits says already what {given[0]} would say; leave out one of them.")
    return Limits(**dict(_limit(name, pins[name]) for name in given)), given[0]


def _limit(name: str, value: Any) -> tuple[str, Any]:
    """The field of Limits and its value."""
    if name == "override":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"override is {shown(value)}; expected REGEX=gpu, REGEX=cpu or REGEX=stream, or a list.")
        return "overrides", tuple(map(parse_override, texts))
    if name not in ("vram_budget", "vram_margin", "ram_budget"):
        return name, value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_GIB:  # NaN fails every comparison
        raise UsageError(f"{name} is {shown(value)}; expected GiB, a number from 0 to {MAX_GIB}.")
    return f"{name}_bytes", int(value * GIB)


def _profile(profile: AskedProfile | Path | None) -> AskedProfile:
    """The profile, read where it is named; None: as the settings say. Raises UsageError."""
    if profile is None:
        setting: str = read_settings().value("profile")
        return setting
    if isinstance(profile, str | Path):
        return profile if profile in (AUTO, OFF) and isinstance(profile, str) else hardware_from(profile)
    if not isinstance(profile, HardwareProfile) and not callable(profile):
        raise UsageError(
            f"profile is {shown(profile)}; expected {AUTO!r}, {OFF!r}, a HardwareProfile, the name of a shipped one, "
            "the path of a file with one, or a function that finds one."
        )
    return profile


def _plan(plan: Plan | str | Path | None) -> Plan | None:
    """The plan, read where it is a file. Raises UsageError."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        raise UsageError(f"plan is {shown(plan)}; expected a Plan, or a file that hetero-ee plan --json has written.")
    return Plan.load(Path(plan))


def _folder(draft_head: str | Path | None) -> Path | None:
    """Where a draft head that was named lies. Raises UsageError where no folder is there."""
    if draft_head is None:
        return None
    if not isinstance(draft_head, str | Path) or not str(draft_head):
        raise UsageError(f"draft_head is {shown(draft_head)}; expected the folder of a draft head, or an id.")
    try:
        is_folder = Path(draft_head).is_dir()
    except (OSError, ValueError):  # a name no file can have
        is_folder = False
    if not is_folder:
        raise UsageError(
            f"draft_head {shown(str(draft_head))} is no folder; name the folder of a draft head, or an id on the Hub "
            "such as org/name."
        )
    return Path(draft_head)


def check_emulates(made: Plan, profile: HardwareProfile) -> None:
    """Raises UsageError where the plan takes more memory than the profile's machine has."""
    n_gpu_bytes, n_ram_bytes = made.n_bytes(GPU), made.n_bytes("cpu")
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
