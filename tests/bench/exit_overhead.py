"""What exact mode costs beside the model and the draft source: processor time of one thread, as a share of a token's.

All that runs outside of the executor's passes, its head and the draft head's layer is counted, in exact and in full
mode; the difference, by token, is what drafting adds: features, predictor, stop rule, choosing drafts, bookkeeping. The
modes take turns, and the medians count. Of a big model's shape the same is derived: the loop's time is the same, and
what looks at a whole vocabulary's logits is measured at both sizes.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from exit_demo import EXITS, HEAD, SAMPLINGS, Stories
from exit_rows import planned_costs

from hetero_ee.decoding import requests, sampling
from hetero_ee.decoding.sampling import choose_token
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.choice import all_finite, gumbel_noise
from hetero_ee.runtime.opening import Opened, open_planned
from hetero_ee.speculation import drafts, exact
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.opening import open_drafting
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.source import Choose, Draft, DraftSource
from hetero_ee_profiles.hardware import HardwareProfile

PASSES = ("run", "prompt", "logits", "hidden", "head", "embed", "final_norm", "lm_head", "draft", "draft_logits")
LAYER = ("guess", "embed", "keep")
RULE = ("is_worth", "best_length", "audit", "settle", "spend", "chance")
BIG_SHAPE, BIG_CONTEXT_TOKENS = "llama-2-7b", 512
N_ROUNDS = 7  # of both modes, for each median
SOURCE_CALLS = ("observe", "truncate", "close")
CHOOSE, NOISE, FINITE, CONFIDENCE, RULE_CALL, SOURCE = "choose", "noise", "finite", "confidence", "rule", "source"
PLACES = {
    CHOOSE: [(requests, "choose_token")],
    NOISE: [(sampling, "gumbel_noise")],
    FINITE: [(module, "all_finite") for module in (drafts, exact)],
}


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of processor time a token. full_s: at full depth, everything; loop_s: beside the passes, in full mode;
    exact_loop_s: the same in exact mode. Of what that adds: choosing_s, tokens from logits; judging_s, predictor and
    rule; source_s, what draft sources do beside their layer; the rest is the loop's. big_added_s: what it adds with
    the big shape's vocabulary, whose token takes big_token_s.
    """

    asked: str
    sampling: str
    full_s: float
    loop_s: float
    exact_loop_s: float
    choosing_s: float
    judging_s: float
    source_s: float
    big_added_s: float
    big_token_s: float

    @property
    def added_s(self) -> float:
        """By exact mode, beside its draft source."""
        return self.exact_loop_s - self.loop_s - self.source_s

    @property
    def share(self) -> float:
        """Of a token at full depth."""
        return self.added_s / self.full_s

    @property
    def big_share(self) -> float:
        """The same of the big shape, derived."""
        return self.big_added_s / self.big_token_s

    def __str__(self) -> str:
        rest_s = self.added_s - self.choosing_s - self.judging_s
        parts = f"choosing tokens {_us(self.choosing_s)}, predictor and rule {_us(self.judging_s)}, loop {_us(rest_s)}"
        return (
            f"overhead, {self.asked}, {self.sampling}: {_us(self.added_s)} us a token, {self.share:.1%} of the demo "
            f"model's {_us(self.full_s)} us at full depth (processor time of one thread; {parts}; not counted, the "
            f"draft source's own {_us(self.source_s)}). Derived for {BIG_SHAPE}: {_us(self.big_added_s)} us, "
            f"{self.big_share:.2%} of its emulated {self.big_token_s * 1e3:.0f} ms"
        )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


class Stopwatch:
    """Adds up the time inside of calls, of nested ones once, without what `others` add up meanwhile."""

    def __init__(self, others: Sequence["Stopwatch"] = ()) -> None:
        self.seconds, self.n_calls, self._depth, self._others = 0.0, 0, 0, others

    def _now_s(self) -> float:
        return time.thread_time() - sum(other.seconds for other in self._others)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return call(*arguments, **named)
            self._depth, start_s = 1, self._now_s()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += self._now_s() - start_s
                self.n_calls, self._depth = self.n_calls + 1, 0

        return run


class Clocked:
    """Something whose named methods are timed."""

    def __init__(self, inner: Any, names: tuple[str, ...], watch: Stopwatch) -> None:
        self._inner = inner
        for name in names:
            if hasattr(inner, name):
                setattr(self, name, watch.timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ClockedSource(Clocked):
    """A draft source whose time is told to the watch."""

    def __init__(self, inner: DraftSource, watch: Stopwatch) -> None:
        super().__init__(inner, SOURCE_CALLS, watch)
        self._next = watch.timed(next)

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """See DraftSource.drafts."""
        with closing(self._inner.drafts(sequence, token_ids, choose)) as found:
            while (draft := self._next(found, None)) is not None:
                yield draft


@dataclass(frozen=True, slots=True)
class Loop:
    """One mode's runs of one kind of drafts and sampling. how: None for full mode."""

    told: Callable[[Drafting | None], Any]
    watch: Stopwatch
    how: Drafting | None
    whole_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Once more: processor seconds a token, of everything and outside of what the watch sees."""
        self.watch.seconds, start_s = 0.0, time.thread_time()
        found = self.told(self.how)
        whole_s = time.thread_time() - start_s
        self.whole_s.append(whole_s / found.n_tokens)
        self.beside_s.append((whole_s - self.watch.seconds) / found.n_tokens)

    def parts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of one more run, seconds a token and calls a token of each part."""
        watches = {part: Stopwatch() for part in (CHOOSE, NOISE, FINITE, CONFIDENCE, RULE_CALL)}
        watches[SOURCE] = Stopwatch([self.watch, watches[CHOOSE], watches[FINITE]])
        how = self.how
        if how is not None:
            rule: Any = Clocked(how.rule, RULE, watches[RULE_CALL])
            how = replace(how, rule=rule, sources=tuple(ClockedSource(each, watches[SOURCE]) for each in how.sources))
            if how.exit_end is not None:
                judge: Any = Clocked(how.exit_end.judge, ("of_row",), watches[CONFIDENCE])
                how = replace(how, exit_end=replace(how.exit_end, judge=judge))
        with ExitStack() as patched:
            for part, places in PLACES.items():
                for module, name in places:
                    patched.enter_context(patch.object(module, name, watches[part].timed(getattr(module, name))))
            n_tokens = self.told(how).n_tokens
        seconds = {part: watch.seconds / n_tokens for part, watch in watches.items()}
        return seconds, {part: watch.n_calls / n_tokens for part, watch in watches.items()}


def overheads(stories: Stories, profile: HardwareProfile, n_rounds: int = N_ROUNDS) -> Iterator[Overhead]:
    """Each kind of drafts and each sampling. profile: by which drafts are planned."""
    big_token_s = _big_token_s(profile)
    for kind in (EXITS, HEAD):
        opened = _opened(stories, profile, kind)
        drafting = open_drafting(stories.knowledge(kind), opened, profile, _fail)
        assert drafting is not None, "exact mode was asked for"
        for name in SAMPLINGS:
            watch = Stopwatch()
            executor: Any = Clocked(opened.executor, PASSES, watch)
            how = replace(drafting, switch=None)  # drafts in every step
            told = partial(stories.told_by, executor, opened, name)
            with _clocked_head(how.sources, watch):
                yield _compared(kind, name, Loop(told, watch, None), Loop(told, watch, how), n_rounds, big_token_s)
        opened.executor.close()


@contextmanager
def _clocked_head(sources: Sequence[DraftSource], watch: Stopwatch) -> Iterator[None]:
    """The time inside of a draft head's layer is the watch's meanwhile."""
    with ExitStack() as patched:
        for head in (source for source in sources if isinstance(source, DraftHeadSource)):
            layer = Clocked(head._layer_now(), LAYER, watch)
            patched.enter_context(patch.object(head, "_layer_now", lambda layer=layer: layer))
            patched.enter_context(patch.object(head, "_target", Clocked(head._target, PASSES, watch)))
        yield


def _compared(asked: str, name: str, full: Loop, exact_: Loop, n_rounds: int, big_token_s: float) -> Overhead:
    exact_.run()  # compiles the kernels
    for runs in (exact_.whole_s, exact_.beside_s):
        runs.clear()
    for _ in range(n_rounds):
        full.run()
        exact_.run()
    loop_s, exact_loop_s = median(full.beside_s), median(exact_.beside_s)
    parts = [(full.parts(), exact_.parts()) for _ in range(n_rounds)]
    added = {part: median(mine[0][part] - theirs[0][part] for theirs, mine in parts) for part in parts[0][0][0]}
    calls, exact_calls = (found[1] for found in parts[-1])
    vocabulary = known_spec(BIG_SHAPE).vocab_size
    growth_s = _looks_s(exact_, name, vocabulary), _looks_s(exact_, name, 4096)
    grown_s = sum((exact_calls[part] - calls[part]) * (growth_s[0][part] - growth_s[1][part]) for part in growth_s[0])
    return Overhead(
        asked,
        name,
        median(full.whole_s),
        loop_s,
        exact_loop_s,
        added[CHOOSE] + added[FINITE],
        added[CONFIDENCE] + added[RULE_CALL],
        added[SOURCE],
        exact_loop_s - loop_s - added[SOURCE] + grown_s,
        big_token_s,
    )


def _looks_s(loop: Loop, name: str, n_tokens: int) -> dict[str, float]:
    """Seconds of one call of each part that looks at a vocabulary of n_tokens."""
    logits = torch.randn(n_tokens, generator=torch.Generator().manual_seed(1)) * 4
    noise, params = gumbel_noise(n_tokens, 1, 2, 3), SamplingParams(temperature=SAMPLINGS[name])
    calls: dict[str, Callable[[], Any]] = {
        CHOOSE: lambda: choose_token(logits, [1], params, 0, 1, noise=lambda *_: noise),
        NOISE: lambda: gumbel_noise(n_tokens, 1, 2, 3),
        FINITE: lambda: all_finite(logits),
    }
    judge = loop.how.exit_end.judge if loop.how is not None and loop.how.exit_end is not None else None
    if judge is not None:
        calls[CONFIDENCE] = lambda: judge.of_row(logits)
    return {part: _call_s(call) for part, call in calls.items()}


def _call_s(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(5):
        start_s = time.thread_time()
        for _ in range(100):
            call()
        found.append((time.thread_time() - start_s) / 100)
    return median(found)


def _big_token_s(profile: HardwareProfile) -> float:
    """Of the big shape at full depth, by the planner's best plan for it."""
    spec = known_spec(BIG_SHAPE)
    chosen = make_plan(spec, profile, Limits(context_tokens=BIG_CONTEXT_TOKENS, mode="full"))
    return planned_costs(spec, profile, chosen, BIG_CONTEXT_TOKENS // 2, 0.0).full_s


def _opened(stories: Stories, profile: HardwareProfile, kind: str) -> Opened:
    engine = stories.engine
    known = stories.knowledge(kind).statistics(engine.spec, profile, 1)
    limits = Limits(context_tokens=engine.context_tokens, mode="exact", threads=1, gpu_layers=0)
    plain = replace(profile, gpu=None, link=None)
    placement = PlanRequest(plain, replace(limits, gpu_layers=None), statistics=known)
    return open_planned(engine.spec, engine.executor.weights, placement, 1, time.perf_counter, _fail)


def _fail(warn: str) -> None:
    raise AssertionError(warn)
