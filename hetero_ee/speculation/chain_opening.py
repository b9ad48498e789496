"""What drafts a plan's chains: a draft head with repeated n-grams around it, or n-grams alone; and where the head
computes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_ee.errors import HeteroError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.schedule import BEST_OF_DRAFTS
from hetero_ee.planning.times.round_costs import pass_costs
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.opening import Opened
from hetero_ee.runtime.work import work_s
from hetero_ee.speculation.chain_rule import ChainRule
from hetero_ee.speculation.draft_gate import AdaptiveGate
from hetero_ee.speculation.sources.candidates import DraftSource
from hetero_ee.speculation.sources.combined import CombinedSource
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts, draft_head_facts
from hetero_ee.speculation.sources.draft_head_layer import draft_head_works, vocabulary_work
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.weights.model_weights import UNQUANTIZED
from hetero_ee_profiles.hardware import HardwareProfile

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.thread_pool import ThreadPool

TYPICAL_CONTEXT_TOKENS = 512  # behind which the planner reckons a draft


@dataclass(frozen=True, slots=True)
class OpenChain:
    """source, and the threads that were made for it. rule: None where no costs are known. draft_length: rows of one
    pass at most."""

    source: DraftSource
    draft_length: int
    rule: ChainRule | None = None
    pool: "ThreadPool | None" = None


def open_chain(
    folder: Path | None,
    opened: Opened,
    profile: HardwareProfile | None,
    warn: Callable[[str], None],
    *,
    is_asked: bool,
) -> OpenChain:
    """folder: of a draft head. One that can't be read is an error where it is_asked for, and else left out."""
    draft_length = opened.plan.draft_length
    if folder is None:
        return OpenChain(NgramSource(), draft_length)
    own = None
    pool = getattr(opened.executor, "pool", None)
    if pool is None and opened.executor.weights.quantizer != UNQUANTIZED:
        from hetero_ee_cpu_ops.thread_pool import ThreadPool  # the kernels look where to be cached when imported

        pool = own = ThreadPool(1)
    try:
        on_gpu, draft_s = opened.machine is not None and opened.plan.n_bytes(GPU) > 0, 0.0
        if profile is not None:
            facts = draft_head_facts(folder, opened.executor.spec)
            on_gpu, draft_s = draft_place(facts, opened.executor.spec, profile, opened.plan.threads, on_gpu=on_gpu)
        head = open_draft_head(folder, opened.executor, pool, machine=opened.machine, on_gpu=on_gpu, warn=warn)
    except HeteroError as error:
        if is_asked:
            if own is not None:
                own.close()
            raise
        warn(f"{error} Drafting from repeated n-grams instead.")
        return OpenChain(NgramSource(), draft_length, None, own)
    if profile is None:
        return OpenChain(head, draft_length, None, own)
    gate = AdaptiveGate(0.0, pass_costs(opened.executor.spec, profile, opened.plan))
    return OpenChain(CombinedSource(NgramSource(), head), _most_rows(opened), ChainRule(gate, draft_s), own)


def _most_rows(opened: Opened) -> int:
    """As many as a plan or a wish says that was given; else the rule finds the length, within what a plan that was made
    here keeps memory for."""
    placement, planned = opened.placement, opened.plan.draft_length
    is_chosen = placement is None or placement.plan is not None or placement.limits.draft_length is not None
    return planned if is_chosen else max(planned, BEST_OF_DRAFTS)


def draft_place(
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
    works = draft_head_works(facts.spec, Batch.of_sequence(0, TYPICAL_CONTEXT_TOKENS, [0]))
    works.append(vocabulary_work(1, facts.n_draft_tokens, spec.hidden_size))
    disk = profile.disk_read_bytes_per_s.value
    seconds = sum(work_s(work, times, disk, facts.spec) for work in works)
    return seconds + (2 * profile.link.transfer.value if on_gpu and profile.link is not None else 0.0)
