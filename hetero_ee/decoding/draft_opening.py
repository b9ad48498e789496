"""What a model's drafts can be made from, told to the planner; and the plan's drafts, ready to be made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hetero_ee.decoding.draft_gate import AdaptiveGate, FixedGate, Gate
from hetero_ee.decoding.draft_pace import Pace
from hetero_ee.decoding.drafting import Confidence, Drafting, ExitHead
from hetero_ee.errors import HeteroError, StoreError, UsageError
from hetero_ee.exits.calibration import BoundaryCalibration, Calibration
from hetero_ee.exits.calibration_place import CalibrationPlace
from hetero_ee.exits.candidates import N_CANDIDATES, DraftSource
from hetero_ee.exits.draft_head_facts import DraftHeadFacts, draft_head_facts
from hetero_ee.exits.draft_head_opening import open_draft_head
from hetero_ee.exits.draft_head_placement import draft_head_works
from hetero_ee.exits.exit_map import ExitMap
from hetero_ee.exits.features import exit_features
from hetero_ee.exits.ngram import NgramSource
from hetero_ee.models.model_files import CONFIG_FILE
from hetero_ee.models.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import CHAIN, Plan
from hetero_ee.planning.round_costs import round_costs
from hetero_ee.planning.statistics import DraftRates, Statistics
from hetero_ee.runtime.device import GPU
from hetero_ee.runtime.opening import Opened
from hetero_ee.runtime.rows import Rows
from hetero_ee.runtime.work import Overhead, Work, work_s
from hetero_ee.weights.model_weights import UNQUANTIZED
from hetero_ee_profiles.hardware import HardwareProfile

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.team import Team

DRAFT_HEAD_FOLDER = "draft_head"  # in a model's folder
TYPICAL_CONTEXT_TOKENS = 512  # behind which the planner reckons a draft
Notice = Callable[[str], None]


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
        _, draft_s = _draft_place(facts, spec, profile, threads, on_gpu=on_gpu)
        return Statistics(exits, DraftRates(f"the draft head in {self.draft_head.name}", facts.acceptance, draft_s))


def found_knowledge(
    calibrations: CalibrationPlace | None, draft_head: Path | None, folder: Path, spec: ModelSpec, notice: Notice
) -> DraftKnowledge:
    """What there is to draft with. draft_head: as the caller named it, else the one in the model's folder is taken.

    A calibration of other weights or a damaged one, and the model folder's own head where it can't be read, are left
    out with a notice. Raises ModelError for a named head that can't be read.
    """
    try:
        calibration = None if calibrations is None else calibrations.find()
    except StoreError as error:
        notice(str(error))
        calibration = None
    if draft_head is not None:
        draft_head_facts(draft_head, spec)
        return DraftKnowledge(calibration, draft_head, is_asked=True)
    return DraftKnowledge(calibration, _own_head(folder, spec, notice))


def _own_head(folder: Path, spec: ModelSpec, notice: Notice) -> Path | None:
    own = folder / DRAFT_HEAD_FOLDER
    try:
        if find_file(own, CONFIG_FILE) is None:
            return None
        draft_head_facts(own, spec)
    except HeteroError as error:
        notice(f"{error} Drafting without this model's own draft head.")
        return None
    return own


@dataclass(frozen=True, slots=True)
class OpenDrafting:
    """Drafting that holds threads of its own, to be closed."""

    drafting: Drafting
    team: "Team | None" = None

    @property
    def origin(self) -> str:
        """Where drafts come from, in a few words."""
        source = self.drafting.source
        if source is None:
            return f"exit after layer {self.drafting.boundary}"
        return "repeated n-grams" if isinstance(source, NgramSource) else "draft head"

    def close(self) -> None:
        if self.team is not None:
            self.team.close()


def open_drafting(
    knowledge: DraftKnowledge, opened: Opened, profile: HardwareProfile | None, notice: Notice
) -> OpenDrafting | None:
    """The plan's way to draft, None for full mode. The model folder's own draft head is replaced by repeated n-grams
    where it can't be read.

    Raises UsageError for a plan whose exits were not calibrated, ModelError for a named head that can't be read.
    """
    plan, spec = opened.plan, opened.executor.spec
    if plan.mode == "full" or plan.boundary is None:
        return None
    wants_exact = opened.placement is not None and opened.placement.limits.mode == "exact"
    pace = None if opened.machine is not None or wants_exact else Pace()  # an emulated clock knows no Python
    if plan.drafts == CHAIN:
        source, team = _source(knowledge, opened, profile, notice)
        return OpenDrafting(Drafting(0, plan.draft_tokens, FixedGate(0.0), None, source, notice, pace), team)
    if knowledge.calibration is None:
        raise UsageError("the plan drafts by early exit and this model has no calibration; run hetero-ee calibrate.")
    fitted = knowledge.calibration.at(plan.boundary)
    exit_map = None if fitted.exit_map is None else _mapped_by(fitted.exit_map)
    gate = _gate(fitted, spec, profile, plan)
    exit_head = ExitHead(exit_map, _confidence(fitted))
    return OpenDrafting(Drafting(plan.boundary, plan.draft_tokens, gate, exit_head, None, notice, pace))


def _mapped_by(exit_map: ExitMap) -> Callable[[Tensor], Tensor]:
    """The map computes on the CPU, wherever the states lie."""
    return lambda normed: exit_map.apply(normed.cpu())


def _gate(fitted: BoundaryCalibration, spec: ModelSpec, profile: HardwareProfile | None, plan: Plan) -> Gate:
    """By costs where they are known; else the threshold that was calibrated."""
    if profile is None:
        return FixedGate(fitted.threshold)
    costs = round_costs(spec, profile, plan, fitted.boundary)
    return AdaptiveGate(costs.draft_s, costs.verify_s)


def _confidence(fitted: BoundaryCalibration) -> Confidence:
    """The predictor's probability of the likeliest candidate, from the four best logits at the boundary."""

    def confidence(normed: Tensor, logits: Tensor, token_id: int) -> float:
        best = torch.topk(logits, N_CANDIDATES).values.numpy()[None]
        features = exit_features(best, np.zeros((1, N_CANDIDATES), np.float32))
        return float(fitted.predictor.probability(features)[0])

    return confidence


def _source(
    knowledge: DraftKnowledge, opened: Opened, profile: HardwareProfile | None, notice: Notice
) -> tuple[DraftSource, "Team | None"]:
    """And the threads that were made for it."""
    folder = knowledge.draft_head
    if folder is None:
        return NgramSource(), None
    own = None
    team = getattr(opened.executor, "team", None)
    if team is None and opened.executor.weights.quantizer != UNQUANTIZED:
        from hetero_ee_cpu_ops.team import Team  # the kernels look where to be cached when imported

        team = own = Team(1)
    try:
        on_gpu = opened.machine is not None and opened.plan.n_bytes(GPU) > 0
        if on_gpu and profile is not None:
            facts = draft_head_facts(folder, opened.executor.spec)
            on_gpu, _ = _draft_place(facts, opened.executor.spec, profile, opened.plan.threads, on_gpu=True)
        head = open_draft_head(folder, opened.executor, team, machine=opened.machine, on_gpu=on_gpu, notice=notice)
    except HeteroError as error:
        if knowledge.is_asked:
            if own is not None:
                own.close()
            raise
        notice(f"{error} Drafting from repeated n-grams instead.")
        return NgramSource(), own
    return head, own


def _draft_place(
    facts: DraftHeadFacts, spec: ModelSpec, profile: HardwareProfile, threads: int, *, on_gpu: bool
) -> tuple[bool, float]:
    """Whether the GPU is the faster place for the head, where it may be there, and the seconds of one draft."""
    cpu_s = _draft_s(facts, spec, profile, threads, on_gpu=False)
    if not on_gpu or profile.gpu is None:
        return False, cpu_s
    gpu_s = _draft_s(facts, spec, profile, threads, on_gpu=True)
    return gpu_s < cpu_s, min(gpu_s, cpu_s)


def _draft_s(facts: DraftHeadFacts, spec: ModelSpec, profile: HardwareProfile, threads: int, *, on_gpu: bool) -> float:
    """Seconds of one draft: the head's layer and the logits, and on a GPU the way there and back."""
    times = profile.gpu if on_gpu and profile.gpu is not None else profile.cpu_with(threads)
    works = draft_head_works(facts.spec, Rows.of_sequence(0, TYPICAL_CONTEXT_TOKENS, [0]))
    works.append(Work("logits", 1, (("int8", spec.vocab_size, spec.hidden_size),), None, Overhead.PASS))
    disk = profile.disk_read_bytes_per_s.value
    seconds = sum(work_s(work, times, disk, facts.spec) for work in works)
    return seconds + (2 * profile.link.crossing.value if on_gpu and profile.link is not None else 0.0)
