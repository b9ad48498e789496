"""SpecEE's schedules on texts that are followed token by token, so that every schedule judges the same tokens."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specee_subjects import Subject, Way
from torch import Tensor

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.requests import Request
from hetero_ee.options.engine import SCHEDULES
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.early_exit import score_early
from hetero_ee.speculation.policies.policy import ExitJudge
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.speculation.statistics import ExitCounts

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One source of candidates and one schedule."""

    candidates: str
    schedule: str
    depth: float  # mean layers of a token
    exits: float  # share of tokens that exit
    right: float  # share of exits that emit full mode's token
    judged: float  # judging layers per token
    judging: float  # share of the processor time


class Timed:
    """A policy whose judge's processor time is counted. The judge of every call is itself."""

    def __init__(self, policy: SpecEE) -> None:
        self._policy, self.seconds = policy, 0.0
        self._judge: ExitJudge[SpecEE] | None = None

    def judging(self, executor: Executor, sampler: DraftSampler) -> "Timed":
        self._judge = self._policy.judging(executor, sampler)
        return self

    def begin(self, request: Request) -> None:
        self._known.begin(request)

    def exit_layers(self, request: Request) -> Sequence[int]:
        start_s = time.process_time()
        found = self._known.exit_layers(request)
        self.seconds += time.process_time() - start_s
        return found

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        start_s = time.process_time()
        found = self._known.judge(exit_layer, hidden, requests)
        self.seconds += time.process_time() - start_s
        return found

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        return self._known.logits(exit_layer, hidden)

    def may_exit(self, request: Request) -> bool:
        return self._known.may_exit(request)

    def given_out(self, request: Request, depth: int, hidden: Tensor) -> None:
        start_s = time.process_time()
        self._known.given_out(request, depth, hidden)
        self.seconds += time.process_time() - start_s

    @property
    def _known(self) -> ExitJudge[SpecEE]:
        assert self._judge is not None, "judging() comes first"
        return self._judge


def schedule_rows(subject: Subject, n_new_tokens: int) -> Iterator[ScheduleRow]:
    """Yield a row for each source of candidates and each schedule. Raises: HeteroError: if mode specee is refused."""
    with subject.mode(subject.cpu, Way("full")) as full:
        params = SamplingParams(max_new_tokens=n_new_tokens, ignore_eos=True)
        texts = [(prompt, full.generate(prompt, params).token_ids) for prompt in subject.prompts]
    for head in dict.fromkeys((None, subject.draft_head)):
        options = replace(subject, draft_head=head).options(subject.cpu, Way("specee"))
        for schedule in SCHEDULES:
            with Engine.from_pretrained(subject.file, **{**options, "exit_schedule": schedule}) as engine:
                yield _row(engine, texts, "first layer" if head is None else "draft head", schedule)


def _row(engine: Engine, texts: Sequence[tuple[Ids, Ids]], candidates: str, schedule: str) -> ScheduleRow:
    n_layers, exits = engine.spec.n_layers, engine.exits
    assert exits is not None and isinstance(exits.policy, SpecEE), "the engine is in mode specee"
    policy, counts = Timed(exits.policy), ExitCounts()
    n_right = n_exits = 0
    start_s = time.process_time()
    for prompt, text in texts:
        scored = score_early(engine.executor, [*prompt, *text], len(prompt), replace(exits, policy=policy), counts)
        for (logits, depth), token_id in zip(scored, text, strict=True):
            n_exits += depth < n_layers
            n_right += depth < n_layers and int(logits.argmax()) == token_id
    seconds, found = time.process_time() - start_s, counts.statistics(n_layers)
    right, share = n_right / max(1, n_exits), policy.seconds / seconds
    return ScheduleRow(
        candidates, schedule, found.mean_depth, n_exits / found.n_tokens, right, found.judged_per_token, share
    )
