"""SkipDecode: the exit layer falls linearly with the position and is the same for all requests of a step.

Tokens are not judged. The depth falls from the share `first` of the layers at a request's first token to `last` at its
maximum length, rounded up to an exit layer. The deepest request of a step decides. As the depth never grows, a token's
keys and values exist wherever later tokens read them. Source: SkipDecode (arXiv 2307.02628, section 3). Its models are
fine-tuned and keep their last layers. In this project, a token passes the first layers and leaves through the exit's
head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import UsageError
from hetero_ee.runtime.drafted import NO_TOKEN, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.policies.policy import ExitJudge, progress, require_number


@dataclass(frozen=True, slots=True, eq=False)
class SkipDecodePolicy:
    """The SkipDecode policy, with the ends of all exit layers. Raises: UsageError: if a bound is out of range."""

    ends: Mapping[int, DraftEnd]
    first: float = 1.0  # share of the layers that a request's first tokens pass
    last: float = 0.5  # share of the layers that its last tokens pass

    def __post_init__(self) -> None:
        require_number("first", self.first, 0, 1)
        require_number("last", self.last, 0, 1)
        if self.last > self.first:
            raise UsageError(f"last is {self.last:g}, more than first, {self.first:g}; depths have to fall.")

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_SkipDecodeJudge":
        return _SkipDecodeJudge(executor, sampler, self)


class _SkipDecodeJudge(ExitJudge[SkipDecodePolicy]):
    def __init__(self, executor: Executor, sampler: DraftSampler, policy: SkipDecodePolicy) -> None:
        super().__init__(executor, sampler, policy)
        self._requests: dict[int, Request] = {}  # by Request.index: all that were ever asked for

    def exit_layers(self, request: Request) -> Sequence[int]:
        """Return the step's exit layer, or all possible ones for a new request, as others of the step may be deeper."""
        is_known = request.index in self._requests
        self._requests[request.index] = request
        depth = self._depth()
        return [each for each in sorted(self._policy.ends) if each >= depth][: 1 if is_known else None]

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        if exit_layer < self._depth():
            return [None] * len(requests)
        found = self.drafted(exit_layer, hidden, requests)
        return [None if each.token_id == NO_TOKEN else each.token_id for each in found]

    def _depth(self) -> float:
        """Return the number of layers that the tokens of the step pass, before rounding up to an exit layer."""
        n_layers, first, last = self._executor.spec.n_layers, self._policy.first, self._policy.last
        share = min(progress(request) for request in self._requests.values() if not request.finished)
        return n_layers * (first + (last - first) * share)
