"""What a caller asks of where a model runs: checked before anything is loaded, then made a Placement."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.errors import UsageError, shown
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits, is_whole
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.opening import Placement
from hetero_ee_profiles.hardware import HardwareProfile

FindProfile = Callable[[ModelSpec, Path], HardwareProfile | None]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """See Engine.from_pretrained. profile: one, or what finds it once the model is known. Raises UsageError."""

    plan: Plan | None
    vram_budget: int | None
    profile: HardwareProfile | FindProfile | None
    limits: Limits | None
    emulates: bool
    context_tokens: int

    def __post_init__(self) -> None:
        self._check_types()
        if self.plan is not None:
            self._check_beside_plan(self.plan)
        if self.profile is None and self.emulates:
            raise UsageError("which machine is to be emulated? Give its profile with profile=...")
        if self.profile is None and self.plan is None and (self.vram_budget is not None or self.limits is not None):
            raise UsageError("a VRAM budget or limits need a profile to plan by; give profile=...")

    def placement(self, spec: ModelSpec, folder: Path) -> Placement | None:
        """None where nothing was asked for: then the CPU runs everything.

        Raises UsageError for a plan that the emulated machine has no room for.
        """
        profile = self.profile
        if profile is not None and not isinstance(profile, HardwareProfile):
            profile = profile(spec, folder)
            if profile is not None and not isinstance(profile, HardwareProfile):
                raise UsageError(f"the function given as profile found {shown(profile)}; expected a HardwareProfile.")
        if profile is None:
            if self.emulates or (self.plan is None and (self.vram_budget is not None or self.limits is not None)):
                raise UsageError("no profile was found to plan by or to emulate; give one with profile=...")
            return None if self.plan is None else Placement(None, Limits(), self.plan)
        if self.plan is not None and self.emulates:
            check_emulates(self.plan, profile)
        wanted = self.limits or Limits()
        if self.context_tokens:
            wanted = replace(wanted, context_tokens=self.context_tokens)
        if self.vram_budget is not None:
            wanted = replace(wanted, vram_budget_bytes=self.vram_budget)
        return Placement(profile, wanted, self.plan, emulates=self.emulates)

    def _check_types(self) -> None:
        if self.profile is not None and not isinstance(self.profile, HardwareProfile) and not callable(self.profile):
            raise UsageError(
                f"profile is {shown(self.profile)}; expected a HardwareProfile, as reference_profile(name) of "
                "hetero_ee_profiles.reference gives it, or a function that finds one."
            )
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise UsageError(f"limits is {shown(self.limits)}; expected Limits(...), of hetero_ee.planning.limits.")
        if self.vram_budget is not None and not is_whole(self.vram_budget, 0):
            raise UsageError(f"vram_budget is {shown(self.vram_budget)}; expected bytes, a whole number from 0.")
        if not isinstance(self.emulates, bool):
            raise UsageError(f"emulate is {shown(self.emulates)}; expected True or False.")

    def _check_beside_plan(self, made: Plan) -> None:
        """A plan has decided all of that already; what it contradicts is not dropped in silence."""
        for name, value in (("limits", self.limits), ("vram_budget", self.vram_budget)):
            if value is not None:
                raise UsageError(f"a plan says already what {name} would say; leave out {name}, or plan again with it.")
        if self.context_tokens not in (0, made.context_tokens):
            raise UsageError(
                f"context_tokens is {self.context_tokens} and the plan is for {made.context_tokens}; leave "
                "context_tokens out, or make a plan for it."
            )


def requested_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The plan, read where it is a file. Raises UsageError."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        raise UsageError(f"plan is {shown(plan)}; expected a Plan, or a file that hetero-ee plan --json has written.")
    return Plan.load(Path(plan))


def requested_folder(draft_head: str | Path | None) -> Path | None:
    """Where a draft head that was named lies. Raises UsageError where no folder is there."""
    if draft_head is None:
        return None
    if not isinstance(draft_head, str | Path) or not str(draft_head):
        raise UsageError(f"draft_head is {shown(draft_head)}; expected the folder of a draft head.")
    try:
        is_folder = Path(draft_head).is_dir()
    except (OSError, ValueError):  # a name no file can have
        is_folder = False
    if not is_folder:
        raise UsageError(f"draft_head {shown(str(draft_head))} is no folder; name the folder of a draft head.")
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


def warner(progress: Progress | None) -> Callable[[str], None]:
    """Remarks as progress takes them."""
    return (lambda text: None) if progress is None else (lambda text: progress(text, 0, 0))
