"""Finds the sources of a model's drafts for the planner, and opens the drafting of a plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import BOTH, MTP_HEAD, NO_HEAD, RISK, RUN_OPTIONS, UNQUANTIZED
from hetero_ee.planning.plan import SEQUENCE
from hetero_ee.planning.schedule import BEST_OF_DRAFTS
from hetero_ee.planning.statistics import DepthStatistics, Statistics
from hetero_ee.planning.times.prediction import step_times
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.opening import Opened
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import Certificate
from hetero_ee.speculation.policies.exit_head import exit_end
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.draft_model import DraftModelSource
from hetero_ee.speculation.sources.draft_model_opening import DraftModel, DraftModelOpener
from hetero_ee.speculation.sources.head_source import MTP_ACCEPTANCE, HeadName, head_facts, head_title
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule, StopRule
from hetero_ee_profiles.hardware import HardwareProfile

DRAFT_HEAD_FOLDER = "draft_head"  # in a model's folder
UNPRICED_CHANCE = 0.3  # least chance of a source's draft if costs are unknown
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DraftKnowledge:
    """Calibration, draft head, draft model and certificate that a model can draft with."""

    calibration: Calibration | None = None
    draft_head: HeadName | None = None
    is_asked: bool = False  # the caller named the head or draft model, so that it must be readable
    certificate: Certificate | None = None  # for mode certified, if that is requested
    acceptance: tuple[float, ...] = ()  # by draft position, if the head's config.json has none
    draft_model: DraftModel | None = None  # in place of a head

    @classmethod
    def found(
        cls,
        calibration: Calibration | None,
        draft_head: HeadName | None,
        folder: Path | None,
        spec: ModelSpec,
        warn: Warn,
    ) -> "DraftKnowledge":
        """Find the model's draft head and add it to the calibration.

        An unreadable head in the model's own folder is left out with a warning.

        Args:
            draft_head: The head that the caller named; None for the one in the model's folder, or its MTP layer.
            folder: None for a model of which only the shapes are known.

        Raises:
            ModelError: if a named head can't be read.
            UsageError: if the MTP layer was named and the model has none.
        """
        if draft_head == NO_HEAD:
            return cls(calibration)
        if draft_head == MTP_HEAD and spec.mtp is None:
            why = f" is {MTP_HEAD}, and this model's files hold no MTP layer; leave it out, or name a draft head."
            raise UsageError(RUN_OPTIONS["draft_head"], why)
        if draft_head is not None:
            head_facts(draft_head, spec)
            return cls(calibration, draft_head, is_asked=True)
        other = None if spec.mtp is None else MTP_HEAD
        if folder is None:
            return cls(calibration, other)
        own = folder / DRAFT_HEAD_FOLDER
        try:
            if find_file(own, CONFIG_FILE) is None:
                return cls(calibration, other)
            head_facts(own, spec)
        except HeteroError as error:
            warn(f"{error} Drafting without this model's own draft head.")
            return cls(calibration, other)
        return cls(calibration, own)

    @property
    def title(self) -> str:
        """Name of the draft model or draft head for people; empty without one."""
        if self.draft_model is not None:
            return f"the draft model {self.draft_model.name}"
        return "" if self.draft_head is None else head_title(self.draft_head)

    def statistics(
        self,
        spec: ModelSpec,
        profile: HardwareProfile | None,
        threads: int,
        risk: float | None = None,
        scheduling: str | None = None,
    ) -> Statistics:
        """Return the planner's statistics about drafts and exits.

        Args:
            risk: The risk of mode certified.
            scheduling: One of SCHEDULES, of mode specee.

        Raises: ModelError, UsageError: if the risk can't be certified.
        """
        exits = None if self.calibration is None else self.calibration.statistics()
        depths: tuple[DepthStatistics, ...] = ()
        if self.calibration is not None:
            scheduling = scheduling or BOTH
            depths = self.calibration.depth_statistics(is_drafted=bool(self.title), scheduling=scheduling)
        if self.certificate is not None:
            depths += self.certificate.depth_statistics(risk or RISK)
        if self.draft_model is not None and profile is not None and self.acceptance:
            return Statistics(exits, self.draft_model.rates(profile, threads, self.acceptance), depths=depths)
        facts = None if self.draft_head is None else head_facts(self.draft_head, spec)
        if facts is not None and not facts.acceptance:
            known = self.acceptance or (MTP_ACCEPTANCE if self.draft_head == MTP_HEAD else ())
            facts = replace(facts, acceptance=known)
        if profile is None or self.draft_head is None or facts is None or not facts.acceptance:
            return Statistics(exits, depths=depths)
        costs = HeadCosts(facts, spec, profile, threads)
        return Statistics(exits, costs.rates(head_title(self.draft_head)), depths=depths)


@dataclass(frozen=True, slots=True)
class DraftingRequest:
    """The model, plan and machine that drafting is opened for."""

    knowledge: DraftKnowledge
    opened: Opened
    profile: HardwareProfile | None
    warn: Warn

    @property
    def switch(self) -> SpeculationSwitch | None:
        """Switch that turns drafting off while it is slower. None if the user chose exact mode, or on an emulated
        machine, whose clock does not include Python's time."""
        wants_exact = self.opened.request is not None and self.opened.request.limits.mode == "exact"
        return None if self.opened.is_emulated or wants_exact else SpeculationSwitch()

    @property
    def draft_length(self) -> int:
        """Maximum number of drafted tokens per step.

        A length that the plan or the caller specifies is kept. Otherwise the stop rule chooses the length during
        decoding, up to the length that a plan made for this request reserves memory for.
        """
        placement, planned = self.opened.request, self.opened.plan.draft_length
        is_chosen = placement is None or placement.plan is not None or placement.limits.draft_length is not None
        return planned if is_chosen or self.profile is None else max(planned, BEST_OF_DRAFTS)


def open_drafting(
    knowledge: DraftKnowledge, opened: Opened, profile: HardwareProfile | None, warn: Warn
) -> Drafting | None:
    """Return the plan's drafting, or None in full mode.

    An unreadable draft head in the model's folder is left out.

    Raises:
        UsageError: if the plan drafts by exits that were not calibrated.
        ModelError: if a named head can't be read.
    """
    request = DraftingRequest(knowledge, opened, profile, warn)
    if opened.plan.exit_layer is None:
        return None
    if opened.plan.drafts == SEQUENCE:
        return _sequences(request)
    drafting = _exits(request, opened.plan.exit_layer)
    assert drafting.exit_end is not None, "exits have an end"
    _warm_up(opened, drafting.exit_end)
    return drafting


def _warm_up(opened: Opened, end: DraftEnd) -> None:
    """Prepare a GPU for drafting before the first request: compile kernels, load weights, capture a graph of one row.

    An emulated machine is left alone, since its clock would advance.
    """
    if opened.running is not None and not opened.is_emulated and opened.plan.n_bytes(GPU):
        nothing = torch.zeros(1, opened.executor.spec.hidden_size)
        opened.executor.draft(nothing, [DraftNoise(0.0, 0, 0, 0)], end)


def _exits(request: DraftingRequest, exit_layer: int) -> Drafting:
    """Return drafting by early exits. Drafts stop at the calibrated threshold if no costs are known."""
    opened, calibration, plan = request.opened, request.knowledge.calibration, request.opened.plan
    if calibration is None:
        raise UsageError("the plan drafts by early exit and this model has no calibration; run hetero-ee calibrate.")
    fitted = calibration.at(exit_layer)
    rule: StopRule = FixedThreshold(fitted.threshold)
    async_layers = 0
    if request.profile is not None:
        ranks = {} if fitted.exit_map is None else {exit_layer: fitted.exit_map.rank}
        times = step_times(opened.executor.spec, request.profile, plan, map_ranks=ranks)
        rule = MarginalRule(times.draft_s(exit_layer), partial(times.verify_s, exit_layer))
        async_layers = times.layers_ahead(exit_layer)
    end = exit_end(fitted, compiled=opened.executor.weights.quantizer != UNQUANTIZED)
    return Drafting(exit_layer, plan.draft_length, rule, end, (), request.warn, request.switch, async_layers)


def _sequences(request: DraftingRequest) -> Drafting:
    """Return drafting by all sources that can be opened."""
    sources = tuple(source for open_source in SOURCES if (source := open_source(request)) is not None)
    rule = sequence_rule(request.opened, request.profile)
    width = request.opened.plan.tree_width
    return Drafting(0, request.draft_length, rule, None, sources, request.warn, request.switch, tree_width=width)


def sequence_rule(opened: Opened, profile: HardwareProfile | None) -> StopRule:
    """Return the rule for drafts that pass all layers in the verification."""
    if profile is None:
        return FixedThreshold(UNPRICED_CHANCE)
    times = step_times(opened.executor.spec, profile, opened.plan)
    return MarginalRule(0.0, partial(times.verify_s, 0))


def _open_draft_head(request: DraftingRequest) -> DraftSource | None:
    """Open the draft head on the device where the plan reserves memory for it.

    Returns: None if there is no head, or if the model folder's own head can't be read.
    """
    knowledge, opened, profile = request.knowledge, request.opened, request.profile
    name, executor = knowledge.draft_head, opened.executor
    if name is None:
        return None
    try:
        head = open_draft_head(name, executor, opened.running, request.warn)
        _warm_up(opened, head.end)
        if profile is not None:
            costs = HeadCosts(head_facts(name, executor.spec), executor.spec, profile, opened.plan.threads)
            places = opened.plan.decode_placements
            on_gpu = opened.plan.draft_device == GPU
            head.draft_s = costs.draft_s(places[-1].on_gpu, places[0].on_gpu, on_gpu=on_gpu)
    except HeteroError as error:
        if knowledge.is_asked:
            raise
        request.warn(f"{error} Drafting without it.")
        return None
    return head


def open_draft_model(knowledge: DraftKnowledge, opened: Opened, warn: Warn) -> DraftSource | None:
    """Open the draft model on the device where the plan reserves memory for it, or return None if there is none."""
    if knowledge.draft_model is None:
        return None
    opener = DraftModelOpener(knowledge.draft_model, opened.executor, opened.running, warn)
    opener.open()
    rates = None if opened.request is None else opened.request.statistics.of_plan(opened.plan).drafts
    return DraftModelSource(opener, warn, 0.0 if rates is None else rates.draft_s)


# Every draft source there is; a new one takes a line here.
SOURCES: tuple[Callable[[DraftingRequest], DraftSource | None], ...] = (
    lambda _: NgramSource(),
    _open_draft_head,
    lambda request: open_draft_model(request.knowledge, request.opened, request.warn),
)
