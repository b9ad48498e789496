"""What a model's drafts can be made from, told to the planner; and the drafting of a plan, ready to run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import RISK
from hetero_ee.planning.plan import SEQUENCE
from hetero_ee.planning.schedule import BEST_OF_DRAFTS
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.prediction import step_times
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.opening import Opened
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.calibration import Calibration, FittedExitLayer
from hetero_ee.speculation.exits.certificate import Certificate
from hetero_ee.speculation.exits.predictor import ExitConfidence
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_file import draft_head_facts
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule
from hetero_ee.weights.model_weights import UNQUANTIZED
from hetero_ee_profiles.hardware import HardwareProfile

DRAFT_HEAD_FOLDER = "draft_head"  # in a model's folder
UNPRICED_CHANCE = 0.3  # that a draft of a sequence needs where no costs are known
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DraftKnowledge:
    """What there is to draft with."""

    calibration: Calibration | None = None
    draft_head: Path | None = None
    is_asked: bool = False  # the head was named by the caller, so that one which can't be read is an error
    certificate: Certificate | None = None  # of the calibration, where mode certified was asked for
    acceptance: tuple[float, ...] = ()  # of the head's drafts by position, where its config.json has none

    @classmethod
    def found(
        cls, calibration: Calibration | None, draft_head: Path | None, folder: Path, spec: ModelSpec, warn: Warn
    ) -> "DraftKnowledge":
        """draft_head: as the caller named it, else the one in the model's folder, left out with a warning where it
        can't be read. Raises ModelError for a named head that can't be read."""
        if draft_head is not None:
            draft_head_facts(draft_head, spec)
            return cls(calibration, draft_head, is_asked=True)
        own = folder / DRAFT_HEAD_FOLDER
        try:
            if find_file(own, CONFIG_FILE) is None:
                return cls(calibration)
            draft_head_facts(own, spec)
        except HeteroError as error:
            warn(f"{error} Drafting without this model's own draft head.")
            return cls(calibration)
        return cls(calibration, own)

    def statistics(
        self, spec: ModelSpec, profile: HardwareProfile | None, threads: int, risk: float | None = None
    ) -> Statistics:
        """As the planner takes it. risk: of mode certified. Raises ModelError, UsageError for a risk that can't be
        promised."""
        exits = None if self.calibration is None else self.calibration.statistics()
        is_drafted = self.draft_head is not None
        depths = () if self.calibration is None else self.calibration.depth_statistics(is_drafted=is_drafted)
        if self.certificate is not None:
            depths += self.certificate.depth_statistics(risk or RISK)
        facts = None if self.draft_head is None else draft_head_facts(self.draft_head, spec)
        if facts is not None and not facts.acceptance:
            facts = replace(facts, acceptance=self.acceptance)
        if profile is None or self.draft_head is None or facts is None or not facts.acceptance:
            return Statistics(exits, depths=depths)
        costs = HeadCosts(facts, spec, profile, threads)
        return Statistics(exits, costs.rates(f"the draft head in {self.draft_head.name}"), depths=depths)


@dataclass(frozen=True, slots=True)
class OpenDrafting:
    """Drafting, ready to be used."""

    drafting: Drafting

    @property
    def origin(self) -> str:
        """Where drafts come from, in a few words."""
        if self.drafting.exit_end is not None:
            return f"exit after layer {self.drafting.exit_layer}"
        return self.drafting.sources[-1].name


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """What a draft source is opened from."""

    knowledge: DraftKnowledge
    opened: Opened
    profile: HardwareProfile | None
    warn: Warn


def open_drafting(
    knowledge: DraftKnowledge, opened: Opened, profile: HardwareProfile | None, warn: Warn
) -> OpenDrafting | None:
    """The plan's way to draft, None for full mode. The model folder's own draft head is left out where it can't be
    read.

    Raises UsageError for a plan whose exits were not calibrated, ModelError for a named head that can't be read.
    """
    plan = opened.plan
    if plan.exit_layer is None:
        return None
    wants_exact = opened.request is not None and opened.request.limits.mode == "exact"
    switch = None if opened.is_emulated or wants_exact else SpeculationSwitch()  # emulated clocks know no Python
    if plan.drafts == SEQUENCE:
        return _sequences(knowledge, opened, profile, warn, switch)
    drafting = _exits(knowledge.calibration, opened, profile, warn, switch)
    assert drafting.exit_end is not None, "exits have an end"
    _warm_up(opened, drafting.exit_end)
    return OpenDrafting(drafting)


def _warm_up(opened: Opened, end: DraftEnd) -> None:
    """What a GPU needs for the end, before a text does: kernels compiled, weights there, a graph of one row recorded.

    Not on an emulated machine, whose time would go on.
    """
    if opened.running is not None and not opened.is_emulated and opened.plan.n_bytes(GPU):
        nothing = torch.zeros(1, opened.executor.spec.hidden_size)
        opened.executor.draft(nothing, [DraftNoise(0.0, 0, 0, 0)], end)


def _exits(
    calibration: Calibration | None,
    opened: Opened,
    profile: HardwareProfile | None,
    warn: Warn,
    switch: SpeculationSwitch | None,
) -> Drafting:
    """By costs where they are known, else by the threshold that was calibrated."""
    plan = opened.plan
    if calibration is None or plan.exit_layer is None:
        raise UsageError("the plan drafts by early exit and this model has no calibration; run hetero-ee calibrate.")
    fitted = calibration.at(plan.exit_layer)
    rule: MarginalRule | FixedThreshold = FixedThreshold(fitted.threshold)
    async_layers = 0
    if profile is not None:
        ranks = {} if fitted.exit_map is None else {plan.exit_layer: fitted.exit_map.rank}
        times = step_times(opened.executor.spec, profile, plan, map_ranks=ranks)
        rule = MarginalRule(times.draft_s(plan.exit_layer), partial(times.verify_s, plan.exit_layer))
        async_layers = times.layers_ahead(plan.exit_layer)
    end = _exit_end(fitted, compiled=opened.executor.weights.quantizer != UNQUANTIZED)
    return Drafting(plan.exit_layer, plan.draft_length, rule, end, (), warn, switch, async_layers)


def _exit_end(fitted: FittedExitLayer, *, compiled: bool) -> DraftEnd:
    """compiled: the model runs on kernels, which multiply with tiles."""
    exit_map = fitted.exit_map
    state_map = None if exit_map is None else exit_map.packed(compiled=compiled)
    return DraftEnd(state_map=state_map, judge=ExitConfidence(fitted.predictor, compiled=compiled))


def _sequences(
    knowledge: DraftKnowledge,
    opened: Opened,
    profile: HardwareProfile | None,
    warn: Warn,
    switch: SpeculationSwitch | None,
) -> OpenDrafting:
    request = SourceRequest(knowledge, opened, profile, warn)
    found = [open_source(request) for open_source in SOURCES]
    sources = tuple(source for source in found if source is not None)
    rule: MarginalRule | FixedThreshold = FixedThreshold(UNPRICED_CHANCE)
    if profile is not None:
        times = step_times(opened.executor.spec, profile, opened.plan)
        rule = MarginalRule(0.0, partial(times.verify_s, 0))
    drafting = Drafting(0, _draft_length(opened, profile), rule, None, sources, warn, switch)
    return OpenDrafting(drafting)


def _open_ngrams(request: SourceRequest) -> DraftSource | None:
    return NgramSource()


def _open_draft_head(request: SourceRequest) -> DraftSource | None:
    """On the device that the plan has room for it on; None where there is none, or one that nobody asked for can't be
    read."""
    knowledge, opened, profile = request.knowledge, request.opened, request.profile
    folder, executor = knowledge.draft_head, opened.executor
    if folder is None:
        return None
    try:
        head = open_draft_head(folder, executor, opened.running, request.warn)
        _warm_up(opened, head.end)
        if profile is not None:
            costs = HeadCosts(draft_head_facts(folder, executor.spec), executor.spec, profile, opened.plan.threads)
            places = opened.plan.decode_placements
            on_gpu = opened.plan.draft_device == GPU
            head.draft_s = costs.draft_s(places[-1].on_gpu, places[0].on_gpu, on_gpu=on_gpu)
    except HeteroError as error:
        if knowledge.is_asked:
            raise
        request.warn(f"{error} Drafting without it.")
        return None
    return head


# Every draft source there is; a new one takes a line here.
SOURCES: tuple[Callable[[SourceRequest], DraftSource | None], ...] = (_open_ngrams, _open_draft_head)


def _draft_length(opened: Opened, profile: HardwareProfile | None) -> int:
    """As long as a plan or a request says that was given; else the rule finds the length, within what a plan that was
    made here keeps memory for."""
    placement, planned = opened.request, opened.plan.draft_length
    is_chosen = placement is None or placement.plan is not None or placement.limits.draft_length is not None
    return planned if is_chosen or profile is None else max(planned, BEST_OF_DRAFTS)
