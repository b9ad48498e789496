"""CALM: a token exits if the likeliest token is far enough ahead of the second; the margin shrinks along the request.

Confidence: top-1 minus top-2 softmax of the exit's logits over the whole vocabulary (section 3, "softmax response").
Threshold of token t of N: clip(0.9 lambda + 0.1 exp(-tau t / N)) (section 3, the decaying threshold, with tau = 4),
since early mistakes change more tokens. Source: CALM (arXiv 2207.07061). CALM chooses lambda so that the risk is
bounded; in this project, mode certified does that. The logits are copied to the CPU, which computes the confidence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.runtime.choice import all_finite
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.policies.policy import ExitJudge, progress, require_number

MAX_DECAY = 1000.0


@dataclass(frozen=True, slots=True, eq=False)
class CalmPolicy:
    """CALM's exit policy, with the ends of all exit layers. Raises: UsageError: if a parameter is out of range."""

    ends: Mapping[int, DraftEnd]
    threshold: float = 0.9  # lambda
    decay: float = 4.0  # tau

    def __post_init__(self) -> None:
        require_number("threshold", self.threshold, 0, 1)
        require_number("decay", self.decay, 0, MAX_DECAY)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_CalmJudge":
        return _CalmJudge(executor, sampler, self)


class _CalmJudge(ExitJudge[CalmPolicy]):
    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        rows = zip(requests, self.logits(exit_layer, hidden), strict=True)
        return [self._judged(request, logits) for request, logits in rows]

    def _judged(self, request: Request, logits: Tensor) -> int | None:
        decayed = 0.9 * self._policy.threshold + 0.1 * math.exp(-self._policy.decay * progress(request))
        if not all_finite(logits):
            return None
        first, second = torch.softmax(logits, 0).topk(2).values.tolist()
        is_sure = first - second >= min(1.0, max(0.0, decayed))
        return self._sampler.choose(request, request.token_ids, logits) if is_sure else None
