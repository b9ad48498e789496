"""The demo model's stories on this machine's CPU by the wall clock: exact and full mode alternately."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from exit_demo import KINDS, PLANNER, SAMPLINGS, Stories
from exit_rows import MEASURED, Row, StepCosts, Timed, described_row, full_row, row
from hetero_ee.speculation.draft_opening import open_drafting
from torch import Tensor

from hetero_ee.config import cache_folder, data_folder
from hetero_ee.planning.limits import Limits
from hetero_ee.profiling.machine_profile import Wanted, machine_profile
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.opening import Opened, Placement, open_placed
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.candidates import ChainJudge, Choose, DraftSource
from hetero_ee.speculation.statistics import DraftCounts
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
                    yield self._row(kind, sampling, opened, drafting.drafting)
            if drafting is not None:
                drafting.close()
            opened.executor.close()

    def _opened(self, kind: str) -> Opened:
        engine = self.stories.engine
        known = self.stories.knowledge(kind).statistics(engine.spec, self.profile, self.threads, on_gpu=False)
        limits = Limits(
            context_tokens=engine.context_tokens,
            mode=None if kind == PLANNER else "exact",
            threads=self.threads,
            gpu_layers=None,
        )
        placement = Placement(self.profile, limits, statistics=known)
        return open_placed(engine.spec, engine.executor.weights, placement, self.threads, time.perf_counter, _fail)

    def _declined(self, kind: str, sampling: str, opened: Opened) -> Row:
        full = self.stories.told(opened, sampling)
        described = described_row(
            MEASURED, "demo", f"this CPU, {self.threads} threads", 1.0, kind, sampling, opened.plan
        )
        return full_row(described, StepCosts(full.token_s, 0.0, 0.0, lambda m: full.token_s, None), full)

    def _row(self, kind: str, sampling: str, opened: Opened, drafting: Drafting) -> Row:
        full, exact, counts = [], [], DraftCounts()
        self.stories.told(opened, sampling, drafting)  # the gate learns, the kernels are compiled
        clocked = drafting if drafting.source is None else replace(drafting, source=ClockedSource(drafting.source))
        for _ in range(self.n_rounds):
            full.append(self.stories.told(opened, sampling))
            exact.append(self.stories.told(opened, sampling, clocked, counts))
        machine = f"this CPU, {self.threads} threads"
        described = described_row(MEASURED, "demo", machine, 1.0, kind, sampling, opened.plan)
        found = counts.statistics(self.stories.engine.spec.n_layers, drafting.exit_layer)
        assert opened.plan.drafts is not None
        costs = self._costs(opened, clocked)
        return row(described, found, costs, opened.plan.drafts, _median(full), _median(exact))

    def _costs(self, opened: Opened, drafting: Drafting) -> StepCosts:
        """Medians of single steps behind a text of medium length."""
        steps = Steps(opened.executor, self.stories.mean_context_tokens)
        first, every = drafting.exit_layer, opened.executor.spec.n_layers
        head_s, full_s = steps.head_s(), steps.pass_s(1, range(every))
        later = {m: steps.pass_s(m, range(first, every)) for m in range(1, opened.plan.draft_length + 1)}
        if isinstance(drafting.source, ClockedSource):
            return StepCosts(full_s, head_s, drafting.source.draft_s, lambda m: later[m], None)
        earlier_s = steps.pass_s(1, range(first))
        return StepCosts(full_s, head_s, earlier_s + head_s, lambda m: later[m], later[1] / earlier_s)


class ClockedSource:
    """A DraftSource, and how long its chains take."""

    def __init__(self, source: DraftSource) -> None:
        self._source, self._seconds, self._n_drafts = source, 0.0, 0
        self.candidates, self.observe = source.candidates, source.observe
        self.truncate, self.close = source.truncate, source.close

    @property
    def draft_s(self) -> float:
        return self._seconds / self._n_drafts

    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        """See DraftSource.propose."""
        start_s = time.perf_counter()
        chain = self._source.propose(sequence, token_ids, n_tokens, choose, judge)
        self._seconds += time.perf_counter() - start_s
        self._n_drafts += len(chain)
        return chain


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
