"""SpecEE's policy: a predictor judges the logits of a few candidates.

If the predictor is sure, the whole head chooses a token, and the token exits if that choice is a candidate. Candidates
come from a draft, or are the likeliest tokens of the whole head at the first layer that judges. Later layers compute
only the candidates' logits. Two groups of layers judge: those of the offline schedule, and those near where the
request's last tokens exited (two-level scheduling). Source: SpecEE (arXiv 2504.08850), sections 4 and 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.options.engine import BOTH
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.features import N_CANDIDATES, Floats, likeliest
from hetero_ee.speculation.exits.recent_exits import RecentExits
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.exit_head import ExitHeads, exit_heads
from hetero_ee.speculation.policies.policy import ExitJudge


@dataclass(slots=True, eq=False)
class _Candidates:
    """Candidates for one token's successor, kept while the token passes the layers."""

    token_ids: Tensor  # int64 (k,)
    softmax: Floats  # (k,), where the token was judged last; each judgement changes it
    are_refused: bool = False  # the whole head has chosen another token

    @classmethod
    def new(cls, token_ids: Tensor) -> "_Candidates":
        return cls(token_ids, np.zeros(N_CANDIDATES, np.float32))


class SpecEE:
    """SpecEE's policy, with heads for the exit layers that may judge, and a schedule of those that judge every token.
    `draft` is the source of candidates. If it is None, the first layer that judges chooses them."""

    def __init__(
        self,
        heads: ExitHeads,
        schedule: Sequence[int],
        n_layers: int,
        draft: DraftCandidates | None = None,
        scheduling: str = BOTH,
    ) -> None:
        """Create the policy. `scheduling` is one of SCHEDULES."""
        self.heads, self.schedule, self.n_layers, self.draft = heads, schedule, n_layers, draft
        self.ends, self.scheduling = {exit_layer: head.end for exit_layer, head in heads.items()}, scheduling

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        draft: DraftCandidates | None,
        schedule: Sequence[int] = (),
        scheduling: str = BOTH,
        *,
        compiled: bool,
    ) -> Self:
        """Return the policy of a calibration, with its own schedule if none is given.

        Without a draft, layers before the schedule's first layer don't judge, because their candidates would be poor.
        """
        is_drafted = draft is not None and calibration.drafted is not None
        schedule = schedule or calibration.schedule_of(is_drafted=is_drafted)
        first = 1 if draft is not None else min(schedule, default=calibration.n_layers)
        layers = range(first, calibration.n_layers)
        heads = exit_heads(calibration, layers, compiled=compiled, is_drafted=is_drafted)
        return cls(heads, schedule, calibration.n_layers, draft, scheduling)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_SpecEEJudge":
        return _SpecEEJudge(executor, sampler, self)


class _SpecEEJudge(ExitJudge[SpecEE]):
    def __init__(self, executor: Executor, sampler: DraftSampler, policy: SpecEE) -> None:
        super().__init__(executor, sampler, policy)
        self._recent: dict[int, RecentExits] = {}  # by Request.index, as below
        self._candidates: dict[int, _Candidates] = {}  # for the last token of each request, once known

    def exit_layers(self, request: Request) -> Sequence[int]:
        draft = self._policy.draft
        ids = None if draft is None else draft.of(self._executor, request.kv_sequence, request.token_ids)
        if ids is not None:
            self._candidates[request.index] = _Candidates.new(ids)
        return self.active_layers(request)

    def active_layers(self, request: Request) -> Sequence[int]:
        """See ExitJudge."""
        return [layer for layer in self._recent_of(request).active() if layer in self._policy.heads]

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """See ExitJudge. Tokens without candidates get them at this layer."""
        has_candidates = [request.index in self._candidates for request in requests]
        new = [row for row, known in enumerate(has_candidates) if not known]
        known = [row for row, is_known in enumerate(has_candidates) if is_known]
        found: dict[int, int] = {}  # by row
        if new:
            found |= self._judge_new(exit_layer, hidden[new], {row: requests[row] for row in new})
        if known:
            found |= self._judge_known(exit_layer, hidden[known], {row: requests[row] for row in known})
        return [found.get(row) for row in range(len(requests))]

    def may_exit(self, request: Request) -> bool:
        """See ExitJudge. Once the whole head has refused a token's candidates, no deeper layer judges them."""
        known = self._candidates.get(request.index)
        return known is None or not known.are_refused

    def given_out(self, request: Request, depth: int, hidden: Tensor) -> None:
        super().given_out(request, depth, hidden)
        self._recent_of(request).append(depth)
        self._candidates.pop(request.index, None)

    def _recent_of(self, request: Request) -> RecentExits:
        policy = self._policy
        new = RecentExits(policy.schedule, policy.n_layers, policy.scheduling)
        return self._recent.setdefault(request.index, new)

    def _judge_new(self, exit_layer: int, hidden: Tensor, requests: dict[int, Request]) -> dict[int, int]:
        """Choose candidates from the whole head's logits. Return the next tokens of requests that exit, by row."""
        head, logits = self._policy.heads[exit_layer], self.logits(exit_layer, hidden)
        best, found = likeliest(logits), {}
        for place, (row, request) in enumerate(requests.items()):
            if not best.is_finite[place]:
                continue
            candidates = self._candidates[request.index] = _Candidates.new(torch.from_numpy(best.token_ids[place]))
            if head.judge.of_candidates(best.logits[place], candidates.softmax) >= head.threshold:
                token_id = self._sampler.choose(request, request.token_ids, logits[place])
                if token_id in candidates.token_ids:
                    found[row] = token_id
        return found

    def _judge_known(self, exit_layer: int, hidden: Tensor, requests: dict[int, Request]) -> dict[int, int]:
        """Judge by the logits of the known candidates. Return the next tokens of requests that exit, by row.

        If the predictor is sure, the whole head chooses, and its choice must be a candidate.
        """
        head, rows = self._policy.heads[exit_layer], list(requests)
        if head.later is None:
            return {}
        known = [self._candidates[request.index] for request in requests.values()]
        ids = torch.stack([candidates.token_ids for candidates in known])
        partial = self._executor.partial_logits(hidden, ids, head.end).numpy()
        confidences = [
            head.later.of_candidates(*each) for each in zip(partial, (c.softmax for c in known), strict=True)
        ]
        sure = [place for place, confidence in enumerate(confidences) if confidence >= head.later_threshold]
        if not sure:
            return {}
        chosen = self.drafted(exit_layer, hidden[sure], [requests[rows[place]] for place in sure])
        found = {}
        for place, each in zip(sure, chosen, strict=True):
            if each.token_id in known[place].token_ids:
                found[rows[place]] = each.token_id
            else:
                known[place].are_refused = True
        return found
