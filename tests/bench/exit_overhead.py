"""What exact mode costs beside the model and the draft head: processor time of one thread, as a share of a token's.

All that runs outside of the executor's passes, its head and the draft head's layer is counted, in exact and in full
mode; the difference, by token, is what drafting adds: features, predictor, gate, choosing drafts, bookkeeping.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from exit_demo import EXITS, HEAD, SAMPLINGS, Stories
from exit_rows import Timed

from hetero_ee.decoding.draft_opening import open_drafting
from hetero_ee.exits.draft_head import DraftHeadSource
from hetero_ee.planning.limits import Limits
from hetero_ee.runtime.opening import Opened, Placement, open_placed
from hetero_ee_profiles.hardware import HardwareProfile

PASSES = ("run", "prompt", "logits", "hidden", "head", "embed", "final_norm", "project", "project_on_cpu")
LAYER = ("guess", "embed", "logits")


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of processor time a token. full_s: at full depth, everything; loop_s: beside the passes, in full mode;
    exact_loop_s: the same in exact mode."""

    asked: str
    sampling: str
    full_s: float
    loop_s: float
    exact_loop_s: float

    @property
    def share(self) -> float:
        """Of a token at full depth."""
        return (self.exact_loop_s - self.loop_s) / self.full_s


class Stopwatch:
    """Adds up the time inside of calls, of nested ones once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return call(*arguments, **named)
            self._depth, start_s = 1, time.process_time()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.process_time() - start_s
                self._depth = 0

        return run


class Clocked:
    """Something whose named methods are timed."""

    def __init__(self, inner: Any, names: tuple[str, ...], watch: Stopwatch) -> None:
        self._inner = inner
        for name in names:
            setattr(self, name, watch.timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def overheads(stories: Stories, profile: HardwareProfile) -> Iterator[Overhead]:
    """Each kind of drafts and each sampling. profile: by which drafts are planned."""
    for kind in (EXITS, HEAD):
        opened = _opened(stories, profile, kind)
        drafting = open_drafting(stories.knowledge(kind), opened, profile, _fail)
        assert drafting is not None, "exact mode was asked for"
        for sampling in SAMPLINGS:
            watch = Stopwatch()
            executor: Any = Clocked(opened.executor, PASSES, watch)
            how, source = drafting.drafting, drafting.drafting.source
            if isinstance(source, DraftHeadSource):
                how = replace(how, source=DraftHeadSource(Clocked(source._layer, LAYER, watch), executor))
            told = partial(stories.told_by, executor, opened, sampling)
            told(how)  # compiles the kernels
            full, full_loop_s = _beside(partial(told, None), watch)
            _, exact_loop_s = _beside(partial(told, how), watch)
            yield Overhead(kind, sampling, full, full_loop_s, exact_loop_s)
        drafting.close()
        opened.executor.close()


def _beside(run: Callable[[], Timed], watch: Stopwatch) -> tuple[float, float]:
    """Processor seconds a token: of everything, and outside of what the watch sees."""
    watch.seconds, start_s = 0.0, time.process_time()
    found = run()
    whole_s = time.process_time() - start_s
    return whole_s / found.n_tokens, (whole_s - watch.seconds) / found.n_tokens


def _opened(stories: Stories, profile: HardwareProfile, kind: str) -> Opened:
    engine = stories.engine
    known = stories.knowledge(kind).statistics(engine.spec, profile, 1, on_gpu=False)
    limits = Limits(context_tokens=engine.context_tokens, mode="exact", threads=1, gpu_layers=0)
    plain = replace(profile, gpu=None, link=None)
    placement = Placement(plain, replace(limits, gpu_layers=None), statistics=known)
    return open_placed(engine.spec, engine.executor.weights, placement, 1, time.perf_counter, _fail)


def _fail(notice: str) -> None:
    raise AssertionError(notice)
