"""What a model's drafts can be made from, told to the planner; and the plan's drafts, ready to be made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_ee.calibration.location import CalibrationPlace
from hetero_ee.errors import HeteroError, StoreError
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.explanation import any_of
from hetero_ee.planning.plan import CHAIN
from hetero_ee.planning.statistics import DraftRates, Statistics
from hetero_ee.runtime.opening import Opened
from hetero_ee.speculation.chain_opening import draft_place, open_chain
from hetero_ee.speculation.draft_gate import FixedGate
from hetero_ee.speculation.draft_pace import Pace
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exit_opening import exit_drafting
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.sources.draft_head_file import draft_head_facts
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.weights.model_weights import UNQUANTIZED
from hetero_ee_profiles.hardware import HardwareProfile

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.thread_pool import ThreadPool

DRAFT_HEAD_FOLDER = "draft_head"  # in a model's folder
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DraftKnowledge:
    """calibration: of the exits; draft_head: folder of a head; None where there is none.

    is_asked: the head was named by the caller, so that one which can't be read is an error.
    """

    calibration: Calibration | None = None
    draft_head: Path | None = None
    is_asked: bool = False

    def statistics(self, spec: ModelSpec, profile: HardwareProfile | None, threads: int, *, on_gpu: bool) -> Statistics:
        """As the planner takes it. on_gpu: whether the draft head may run there. Raises ModelError."""
        exits = None if self.calibration is None else self.calibration.statistics()
        if self.draft_head is None or profile is None:
            return Statistics(exits)
        facts = draft_head_facts(self.draft_head, spec)
        if not facts.acceptance:
            return Statistics(exits)
        _, draft_s = draft_place(facts, spec, profile, threads, on_gpu=on_gpu)
        return Statistics(exits, DraftRates(f"the draft head in {self.draft_head.name}", facts.acceptance, draft_s))


def found_knowledge(
    calibrations: CalibrationPlace | None, draft_head: Path | None, folder: Path, spec: ModelSpec, warn: Warn
) -> DraftKnowledge:
    """What there is to draft with. draft_head: as the caller named it, else the one in the model's folder is taken.

    A calibration of other weights or a damaged one, and the model folder's own head where it can't be read, are left
    out with a warning. Raises ModelError for a named head that can't be read.
    """
    try:
        calibration = None if calibrations is None else calibrations.find()
    except StoreError as error:
        warn(str(error))
        calibration = None
    if draft_head is not None:
        draft_head_facts(draft_head, spec)
        return DraftKnowledge(calibration, draft_head, is_asked=True)
    return DraftKnowledge(calibration, _own_head(folder, spec, warn))


def _own_head(folder: Path, spec: ModelSpec, warn: Warn) -> Path | None:
    own = folder / DRAFT_HEAD_FOLDER
    try:
        if find_file(own, CONFIG_FILE) is None:
            return None
        draft_head_facts(own, spec)
    except HeteroError as error:
        warn(f"{error} Drafting without this model's own draft head.")
        return None
    return own


@dataclass(frozen=True, slots=True)
class OpenDrafting:
    """Drafting that holds threads of its own, to be closed."""

    drafting: Drafting
    pool: "ThreadPool | None" = None

    @property
    def origin(self) -> str:
        """Where drafts come from, in a few words."""
        source = self.drafting.source
        if source is None:
            levels = () if self.drafting.levels is None else self.drafting.levels.scheduled
            return f"exit after layer {any_of((*levels, self.drafting.exit_layer))}"
        return "repeated n-grams" if isinstance(source, NgramSource) else "draft head"

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def open_drafting(
    knowledge: DraftKnowledge, opened: Opened, profile: HardwareProfile | None, warn: Warn
) -> OpenDrafting | None:
    """The plan's way to draft, None for full mode. The model folder's own draft head is replaced by repeated n-grams
    where it can't be read.

    Raises UsageError for a plan whose exits were not calibrated, ModelError for a named head that can't be read.
    """
    plan, spec = opened.plan, opened.executor.spec
    if plan.mode == "full" or plan.exit_layer is None:
        return None
    wants_exact = opened.placement is not None and opened.placement.limits.mode == "exact"
    pace = None if opened.machine is not None or wants_exact else Pace()  # an emulated clock knows no Python
    if plan.drafts == CHAIN:
        chain = open_chain(knowledge.draft_head, opened, profile, warn, is_asked=knowledge.is_asked)
        gate = FixedGate(0.0) if chain.rule is None else chain.rule.gate
        drafting = Drafting(0, chain.draft_length, gate, None, chain.source, warn, pace, chain_rule=chain.rule)
        return OpenDrafting(drafting, chain.pool)
    compiled = opened.executor.weights.quantizer != UNQUANTIZED  # else nothing has said where kernels are kept
    drafting = exit_drafting(knowledge.calibration, plan, spec, profile, warn, pace, compiled=compiled)
    return OpenDrafting(drafting)
