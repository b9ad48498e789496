"""Q-exit: a token exits when the cumulative probability of exiting reaches a quantile q.

The probability of exiting at layer l is p_l = lambda_l (1 - lambda_1) ... (1 - lambda_{l-1}). lambda_l is the
calibrated predictor's probability that exit layer l's token is right. The exit is the first l at which p_1 + ... + p_l
reaches q; nothing is random. Source: PALBERT (arXiv 2204.03276, section 3.1), where lambda is trained with the model,
after PonderNet (arXiv 2107.05407).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.policies.policy import ExitJudge, require_number


@dataclass(frozen=True, slots=True, eq=False)
class QExitPolicy:
    """The q-exit policy, with the ends of all exit layers. Raises: UsageError: if the quantile is out of range."""

    ends: Mapping[int, DraftEnd]
    quantile: float = 0.99

    def __post_init__(self) -> None:
        require_number("quantile", self.quantile, 0, 1)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_QExitJudge":
        return _QExitJudge(executor, sampler, self)


class _QExitJudge(ExitJudge[QExitPolicy]):
    def __init__(self, executor: Executor, sampler: DraftSampler, policy: QExitPolicy) -> None:
        super().__init__(executor, sampler, policy)
        self._cumulated: dict[int, float] = {}  # by Request.index: p_1 + ... + p_l so far

    def exit_layers(self, request: Request) -> Sequence[int]:
        self._cumulated[request.index] = 0.0
        return super().exit_layers(request)

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        found = self.drafted(exit_layer, hidden, requests)
        return [self._judged(request.index, drafted) for request, drafted in zip(requests, found, strict=True)]

    def _judged(self, sequence: int, drafted: Drafted) -> int | None:
        if drafted.token_id == NO_TOKEN or not isfinite(drafted.confidence):
            return None  # this layer's lambda counts as 0
        self._cumulated[sequence] += drafted.confidence * (1 - self._cumulated[sequence])
        return drafted.token_id if self._cumulated[sequence] >= self._policy.quantile else None
