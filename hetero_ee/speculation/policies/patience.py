"""Patience: a token exits when enough exit layers in a row agree on the likeliest token.

The first of the agreeing layers counts. If the request is sampled, the token that its position's noise makes likeliest
is compared. Source: PABEE (arXiv 2006.04152, section 3.2), whose patience counts agreements and is thus one smaller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import UsageError, shown
from hetero_ee.options.option import is_whole
from hetero_ee.runtime.drafted import NO_TOKEN, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.policies.policy import ExitJudge

MAX_PATIENCE = 1000


@dataclass(frozen=True, slots=True, eq=False)
class PatiencePolicy:
    """The patience policy, with the ends of all exit layers. Raises: UsageError: if the patience is out of range."""

    ends: Mapping[int, DraftEnd]
    patience: int = 3  # judged layers in a row

    def __post_init__(self) -> None:
        if not is_whole(self.patience, 1, MAX_PATIENCE):
            raise UsageError(f"patience is {shown(self.patience)}; expected a whole number from 1 to {MAX_PATIENCE}.")

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_PatienceJudge":
        return _PatienceJudge(executor, sampler, self)


class _PatienceJudge(ExitJudge[PatiencePolicy]):
    def __init__(self, executor: Executor, sampler: DraftSampler, policy: PatiencePolicy) -> None:
        super().__init__(executor, sampler, policy)
        self._said: dict[int, tuple[int, int]] = {}  # by Request.index: the token last said, and how often in a row

    def exit_layers(self, request: Request) -> Sequence[int]:
        self._said[request.index] = NO_TOKEN, 0
        return super().exit_layers(request)

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        found = self.drafted(exit_layer, hidden, requests)
        return [self._judged(request.index, drafted.token_id) for request, drafted in zip(requests, found, strict=True)]

    def _judged(self, sequence: int, token_id: int) -> int | None:
        last_id, n_said = self._said[sequence]
        n_said = 0 if token_id == NO_TOKEN else n_said + 1 if token_id == last_id else 1
        self._said[sequence] = token_id, n_said
        return token_id if n_said >= self._policy.patience else None
