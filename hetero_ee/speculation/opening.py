"""What a model's drafts can be made from, told to the planner; and the drafting of a plan, ready to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import SEQUENCE
from hetero_ee.planning.schedule import BEST_OF_DRAFTS
from hetero_ee.planning.statistics import DraftRates, PromptReading, Statistics
from hetero_ee.planning.times.prediction import step_times
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.opening import Opened
from hetero_ee.runtime.work import Work, work_s
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.calibration import Calibration, FittedExitLayer
from hetero_ee.speculation.exits.predictor import ExitConfidence
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts, draft_head_facts
from hetero_ee.speculation.sources.draft_head_layer import draft_head_works, vocabulary_work
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.speed_switch import SpeculationSwitch
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule
from hetero_ee.weights.model_weights import UNQUANTIZED
from hetero_ee_profiles.hardware import HardwareProfile

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.thread_pool import ThreadPool

DRAFT_HEAD_FOLDER = "draft_head"  # in a model's folder
TYPICAL_CONTEXT_TOKENS = 512  # at which a draft's seconds are reckoned
UNPRICED_CHANCE = 0.3  # that a draft of a sequence needs where no costs are known
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DraftKnowledge:
    """What there is to draft with."""

    calibration: Calibration | None = None
    draft_head: Path | None = None
    is_asked: bool = False  # the head was named by the caller, so that one which can't be read is an error

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

    def statistics(self, spec: ModelSpec, profile: HardwareProfile | None, threads: int, *, on_gpu: bool) -> Statistics:
        """As the planner takes it. on_gpu: whether the draft head may run there. Raises ModelError."""
        exits = None if self.calibration is None else self.calibration.statistics()
        facts = None if self.draft_head is None else draft_head_facts(self.draft_head, spec)
        if profile is None or self.draft_head is None or facts is None or not facts.acceptance:
            return Statistics(exits)
        on_gpu, draft_s = draft_device(facts, spec, profile, threads, on_gpu=on_gpu)
        reading = PromptReading(cache(partial(_reading_s, facts, profile, threads, on_gpu=on_gpu)), on_gpu)
        source = f"the draft head in {self.draft_head.name}"
        return Statistics(exits, DraftRates(source, facts.acceptance, draft_s, reading))


@dataclass(frozen=True, slots=True)
class OpenDrafting:
    """Drafting and what has to be closed after it."""

    drafting: Drafting
    pool: "ThreadPool | None" = None

    @property
    def origin(self) -> str:
        """Where drafts come from, in a few words."""
        if self.drafting.exit_end is not None:
            return f"exit after layer {self.drafting.exit_layer}"
        return self.drafting.sources[-1].name

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """What a draft source is opened from."""

    knowledge: DraftKnowledge
    opened: Opened
    profile: HardwareProfile | None
    warn: Warn
    pool: "ThreadPool | None"  # for what the CPU kernels compute; None for fp32 weights


def open_drafting(
    knowledge: DraftKnowledge, opened: Opened, profile: HardwareProfile | None, warn: Warn
) -> OpenDrafting | None:
    """The plan's way to draft, None for full mode. The model folder's own draft head is left out where it can't be
    read.

    Raises UsageError for a plan whose exits were not calibrated, ModelError for a named head that can't be read.
    """
    plan = opened.plan
    if plan.mode == "full" or plan.exit_layer is None:
        return None
    wants_exact = opened.placement is not None and opened.placement.limits.mode == "exact"
    switch = (
        None if opened.machine is not None or wants_exact else SpeculationSwitch()
    )  # emulated clocks know no Python
    if plan.drafts == SEQUENCE:
        return _sequences(knowledge, opened, profile, warn, switch)
    return OpenDrafting(_exits(knowledge.calibration, opened, profile, warn, switch))


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
    pool, own_pool = _threads(opened)
    request = SourceRequest(knowledge, opened, profile, warn, pool)
    try:
        found = [open_source(request) for open_source in SOURCES]
    except BaseException:
        if own_pool is not None:
            own_pool.close()
        raise
    sources = tuple(source for source in found if source is not None)
    rule: MarginalRule | FixedThreshold = FixedThreshold(UNPRICED_CHANCE)
    if profile is not None:
        times = step_times(opened.executor.spec, profile, opened.plan)
        rule = MarginalRule(0.0, partial(times.verify_s, 0))
    drafting = Drafting(0, _draft_length(opened, profile), rule, None, sources, warn, switch)
    return OpenDrafting(drafting, own_pool)


def _open_ngrams(request: SourceRequest) -> DraftSource | None:
    return NgramSource()


def _open_draft_head(request: SourceRequest) -> DraftSource | None:
    """Where it is expected to be faster; None where there is none, or one that nobody asked for can't be read."""
    knowledge, opened, profile = request.knowledge, request.opened, request.profile
    folder, executor = knowledge.draft_head, opened.executor
    if folder is None:
        return None
    try:
        on_gpu, draft_s = opened.machine is not None and opened.plan.n_bytes(GPU) > 0, 0.0
        if profile is not None:
            facts = draft_head_facts(folder, executor.spec)
            on_gpu, draft_s = draft_device(facts, executor.spec, profile, opened.plan.threads, on_gpu=on_gpu)
        head = open_draft_head(folder, executor, request.pool, machine=opened.machine, on_gpu=on_gpu, warn=request.warn)
    except HeteroError as error:
        if knowledge.is_asked:
            raise
        request.warn(f"{error} Drafting without it.")
        return None
    head.draft_s = draft_s
    return head


# Every draft source there is; a new one takes a line here.
SOURCES: tuple[Callable[[SourceRequest], DraftSource | None], ...] = (_open_ngrams, _open_draft_head)


def _threads(opened: Opened) -> "tuple[ThreadPool | None, ThreadPool | None]":
    """For sources that compute: the executor's, else one made here, which is also returned second, to be closed."""
    pool = getattr(opened.executor, "pool", None)
    if pool is not None or opened.executor.weights.quantizer == UNQUANTIZED:
        return pool, None
    from hetero_ee_cpu_ops.thread_pool import ThreadPool  # the kernels look where to be cached when imported

    pool = ThreadPool(1)
    return pool, pool


def _draft_length(opened: Opened, profile: HardwareProfile | None) -> int:
    """As long as a plan or a request says that was given; else the rule finds the length, within what a plan that was
    made here keeps memory for."""
    placement, planned = opened.placement, opened.plan.draft_length
    is_chosen = placement is None or placement.plan is not None or placement.limits.draft_length is not None
    return planned if is_chosen or profile is None else max(planned, BEST_OF_DRAFTS)


def draft_device(
    facts: DraftHeadFacts, spec: ModelSpec, profile: HardwareProfile, threads: int, *, on_gpu: bool
) -> tuple[bool, float]:
    """Whether the GPU is the faster device for the head, where it may be there, and the seconds of one draft."""
    cpu_s = _draft_s(facts, spec, profile, threads, on_gpu=False)
    if not on_gpu or profile.gpu is None:
        return False, cpu_s
    gpu_s = _draft_s(facts, spec, profile, threads, on_gpu=True)
    return gpu_s < cpu_s, min(gpu_s, cpu_s)


def _draft_s(facts: DraftHeadFacts, spec: ModelSpec, profile: HardwareProfile, threads: int, *, on_gpu: bool) -> float:
    """Seconds of one draft: the head's layer and the logits, and on a GPU the way there and back."""
    works = draft_head_works(facts.spec, Batch.of_sequence(0, TYPICAL_CONTEXT_TOKENS, [0]))
    works.append(vocabulary_work(1, facts.n_draft_tokens, spec.hidden_size))
    seconds = _works_s(works, facts, profile, threads, on_gpu=on_gpu)
    return seconds + (2 * profile.link.transfer.value if on_gpu and profile.link is not None else 0.0)


def _reading_s(
    facts: DraftHeadFacts, profile: HardwareProfile, threads: int, m: int, context_tokens: int, *, on_gpu: bool
) -> float:
    """Seconds of the head's layer over m tokens of a prompt, the last of context_tokens."""
    works = draft_head_works(facts.spec, Batch.of_sequence(0, context_tokens - m, [0] * m))
    return _works_s(works, facts, profile, threads, on_gpu=on_gpu)


def _works_s(
    works: Sequence[Work], facts: DraftHeadFacts, profile: HardwareProfile, threads: int, *, on_gpu: bool
) -> float:
    times = profile.gpu if on_gpu and profile.gpu is not None else profile.cpu_with(threads)
    return sum(work_s(work, times, profile.disk_read_bytes_per_s.value, facts.spec) for work in works)
