"""SpecEE's policy: a predictor reads the logits of a few candidates. If it is sure, and the whole head's choice is one
of them, the token exits.

Candidates come from the draft head, or are the likeliest tokens of the whole head at the first layer that judges. Later
layers compute only their logits. The layers of the offline schedule judge, and those near where the request's last
tokens exited (two-level scheduling). Source: SpecEE (arXiv 2504.08850), sections 4 and 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.runtime.drafted import NO_TOKEN
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exits.candidates import N_CANDIDATES, HeadCandidates
from hetero_ee.speculation.exits.features import Floats
from hetero_ee.speculation.exits.recent_exits import RecentExits
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.exit_head import ExitHeads


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """Candidates of one token on its way through the layers."""

    token_ids: Tensor  # int64 (k,)
    softmax: Floats  # (k,), where the token was judged last; each judgement changes it


class SpecEE:
    """SpecEE's policy. heads: of the exit layers that may judge; schedule: those that always do; draft: the source of
    candidates, None for the first layer that judges."""

    def __init__(
        self, heads: ExitHeads, schedule: Sequence[int], n_layers: int, draft: DraftCandidates | None = None
    ) -> None:
        self.heads, self.schedule, self.n_layers, self.draft = heads, schedule, n_layers, draft

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_Judge":
        return _Judge(executor, sampler, self)


class _Judge:
    def __init__(self, executor: Executor, sampler: DraftSampler, policy: SpecEE) -> None:
        self._executor, self._sampler, self._draft = executor, sampler, policy.draft
        self._heads, self._schedule, self._n_layers = policy.heads, policy.schedule, policy.n_layers
        self._recent: dict[int, RecentExits] = {}  # by Request.index, as below
        self._candidates: dict[int, _Candidates] = {}

    def begin(self, request: Request) -> None:
        """See ExitJudge."""

    def exit_layers(self, request: Request) -> Sequence[int]:
        ids = None if self._draft is None else self._draft.of(self._executor, request)
        if ids is not None:
            self._candidates[request.index] = _Candidates(ids, np.zeros(N_CANDIDATES, np.float32))
        recent = self._recent.setdefault(request.index, RecentExits(self._schedule, self._n_layers))
        return [layer for layer in recent.active() if layer in self._heads]

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        chosen: list[int | None] = [None] * len(requests)
        groups: tuple[list[int], list[int]] = ([], [])
        for row, request in enumerate(requests):
            groups[request.index in self._candidates].append(row)
        for judge, rows in zip((self._judge_first, self._judge_later), groups, strict=True):
            if rows:
                found = judge(exit_layer, hidden[rows], [requests[row] for row in rows])
                for row, token_id in zip(rows, found, strict=True):
                    chosen[row] = token_id
        return chosen

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        return self._executor.draft_logits(hidden, self._heads[exit_layer].end)

    def given_out(self, request: Request, depth: int, hidden: Tensor) -> None:
        self._recent.setdefault(request.index, RecentExits(self._schedule, self._n_layers)).append(depth)
        self._candidates.pop(request.index, None)
        self._sampler.noise.close(request.index)
        if self._draft is not None:
            last, normed = len(request.token_ids) - 1, self._executor.final_norm(hidden[None])
            self._draft.observe(request.kv_sequence, last, request.token_ids[last], normed)

    def _judge_first(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """Choose the candidates from the whole head's logits."""
        head, logits = self._heads[exit_layer], self.logits(exit_layer, hidden)
        found = HeadCandidates().of(logits)
        chosen: list[int | None] = []
        for row, request in enumerate(requests):
            candidates = _Candidates(torch.from_numpy(found.token_ids[row]), np.zeros(N_CANDIDATES, np.float32))
            is_sure = False
            if found.is_finite[row]:
                self._candidates[request.index] = candidates
                is_sure = head.judge.of_candidates(found.logits[row], candidates.softmax) >= head.threshold
            token_id = self._sampler.choose(request, request.token_ids, logits[row]) if is_sure else NO_TOKEN
            chosen.append(token_id if token_id in candidates.token_ids else None)
        return chosen

    def _judge_later(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """Judge by the candidates' logits. If the predictor is sure, the whole head's choice must be a candidate."""
        head, known = self._heads[exit_layer], [self._candidates[request.index] for request in requests]
        chosen: list[int | None] = [None] * len(requests)
        if head.later is None:
            return chosen
        ids = torch.stack([candidates.token_ids for candidates in known])
        partial = self._executor.partial_logits(hidden, ids, head.end).numpy()
        sure = [
            row
            for row, candidates in enumerate(known)
            if head.later.of_candidates(partial[row], candidates.softmax) >= head.later_threshold
        ]
        if sure:
            rows = [(requests[row], requests[row].token_ids) for row in sure]
            found = self._sampler.drafted(self._executor, hidden[sure], head.end, rows, is_verified=False)
            for row, each in zip(sure, found, strict=True):
                chosen[row] = each.token_id if each.token_id in known[row].token_ids else None
        return chosen
