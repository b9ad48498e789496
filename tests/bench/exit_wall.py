"""The demo model's stories on this machine's CPU by the wall clock: exact and full mode alternately."""

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from exit_demo import KINDS, PLANNER, SAMPLINGS, Stories
from exit_rows import MEASURED, Row, StepCosts, StepCounts, Timed, described_row, full_row, row
from torch import Tensor

from hetero_ee.config import cache_folder, data_folder
from hetero_ee.kv.batch import Batch
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.request import PlanRequest
from hetero_ee.profiling.machine_profile import Wanted, machine_profile
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.opening import Opened, open_planned
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.opening import open_drafting
from hetero_ee.speculation.sources.source import Choose, Draft, DraftSource
from hetero_ee_profiles.hardware import HardwareProfile

N_STEPS = 40  # whose median is a step's time


@dataclass(frozen=True, slots=True)
class WallClock:
    """profile: of this machine, by which drafts are planned. n_rounds: full and exact mode alternately."""

    stories: Stories
    profile: HardwareProfile
    threads: int
    n_rounds: int

    def rows(self) -> Iterator[Row]:
        """Each kind of drafts and each sampling."""
        for kind in KINDS:
            knowledge = self.stories.knowledge(kind)
            opened = self._opened(kind)
            drafting = open_drafting(knowledge, opened, self.profile, _fail)
            for sampling in SAMPLINGS:
                if drafting is None:
                    yield self._declined(kind, sampling, opened)
                else:
                    yield self._row(kind, sampling, opened, drafting)
            opened.executor.close()

    def _opened(self, kind: str) -> Opened:
        engine = self.stories.engine
        known = self.stories.knowledge(kind).statistics(engine.spec, self.profile, self.threads)
        limits = Limits(
            context_tokens=engine.context_tokens,
            mode=None if kind == PLANNER else "exact",
            threads=self.threads,
            gpu_layers=None,
        )
        placement = PlanRequest(self.profile, limits, statistics=known)
        return open_planned(engine.spec, engine.executor.weights, placement, self.threads, time.perf_counter, _fail)

    def _declined(self, kind: str, sampling: str, opened: Opened) -> Row:
        full = self.stories.told(opened, sampling)
        described = described_row(
            MEASURED, "demo", f"this CPU, {self.threads} threads", 1.0, kind, sampling, opened.plan
        )
        return full_row(described, StepCosts(full.token_s, 0.0, 0.0, lambda m: full.token_s, None), full)

    def _row(self, kind: str, sampling: str, opened: Opened, drafting: Drafting) -> Row:
        full, exact, counts = [], [], StepCounts()
        self.stories.told(opened, sampling, drafting)  # the rule learns, the kernels are compiled
        sources = tuple(ClockedSource(source) for source in drafting.sources)
        clocked = replace(drafting, sources=sources)
        for _ in range(self.n_rounds):
            full.append(self.stories.told(opened, sampling))
            exact.append(self.stories.told(opened, sampling, clocked, counts))
        machine = f"this CPU, {self.threads} threads"
        described = described_row(MEASURED, "demo", machine, 1.0, kind, sampling, opened.plan)
        costs = self._costs(opened, drafting.exit_layer, sources)
        return row(described, counts, costs, _median(full), _median(exact))

    def _costs(self, opened: Opened, first: int, sources: Sequence["ClockedSource"]) -> StepCosts:
        """Medians of single steps behind a text of medium length."""
        steps = Steps(opened.executor, self.stories.mean_context_tokens)
        every = opened.executor.spec.n_layers
        head_s, full_s = steps.head_s(), steps.pass_s(1, range(every))
        later = {m: steps.pass_s(m, range(first, every)) for m in range(1, opened.plan.draft_length + 1)}
        if sources:
            sources = [source for source in sources if not source.is_free] or sources
            draft_s = sum(source.seconds for source in sources) / sum(source.n_drafts for source in sources)
            return StepCosts(full_s, head_s, draft_s, lambda m: later[m], None)
        earlier_s = steps.pass_s(1, range(first))
        return StepCosts(full_s, head_s, earlier_s + head_s, lambda m: later[m], later[1] / earlier_s)


class ClockedSource:
    """A DraftSource, and how long its drafts take."""

    def __init__(self, source: DraftSource) -> None:
        self._source, self.seconds, self.n_drafts = source, 0.0, 0
        self.name, self.is_free, self.draft_s = source.name, source.is_free, source.draft_s
        self.observe, self.read_prompt = source.observe, source.read_prompt
        self.truncate, self.close = source.truncate, source.close

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """See DraftSource.drafts."""
        with closing(self._source.drafts(sequence, token_ids, choose)) as drafts:
            while True:
                start_s = time.perf_counter()
                draft = next(drafts, None)
                self.seconds += time.perf_counter() - start_s
                if draft is None:
                    return
                self.n_drafts += 1
                yield draft


class Steps:
    """Single steps of an executor behind a text of so many tokens, in seconds."""

    def __init__(self, executor: Executor, n_known: int) -> None:
        self._executor, self._n_known = executor, n_known

    def head_s(self) -> float:
        """The head on one row."""
        hidden = self._executor.run(Batch.of_sequence(0, 0, [5]), None, range(0))
        return statistics.median(_seconds(lambda: self._executor.to_logits(hidden)) for _ in range(N_STEPS))

    def pass_s(self, m: int, layers: range) -> float:
        """m rows through these layers, and the head behind the last."""
        executor, n_layers = self._executor, self._executor.spec.n_layers
        sequence = executor.cache.open_new()
        executor.prompt([Batch.of_sequence(sequence, 0, [5] * self._n_known)])
        rows, found = Batch.of_sequence(sequence, self._n_known, [5] * m), []
        for _ in range(N_STEPS):
            executor.cache.cut(sequence, self._n_known)
            waiting = executor.run(rows, None, range(layers.start)) if layers.start else None

            def run(waiting: Tensor | None = waiting) -> None:
                hidden = executor.run(rows, waiting, layers)
                if layers.stop == n_layers:
                    executor.to_logits(hidden)

            found.append(_seconds(run))
        executor.cache.close(sequence)
        return statistics.median(found)


def this_profile(stories: Stories, threads: Sequence[int]) -> HardwareProfile:
    """Of this machine's CPU, roughly: by which drafts are planned."""
    wanted = Wanted(quick=True, refresh=False, threads=tuple(threads), command="bench_exits")
    return machine_profile(
        stories.engine.spec,
        wanted,
        data_folder=data_folder(),
        cache_folder=cache_folder(),
        disk_file=None,
        clock=time.perf_counter,
        open_gpu=lambda model: None,
    )


def _seconds(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _median(runs: list[Timed]) -> Timed:
    return replace(runs[0], seconds=statistics.median(run.seconds for run in runs))


def _fail(warn: str) -> None:
    raise AssertionError(warn)
