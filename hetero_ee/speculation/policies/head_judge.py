"""HeadJudge: the common part of policies that ask a head at every exit layer."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import UsageError, shown
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler


class HeadJudge:
    """Judges every token at these exit layers. ends: by exit layer. Subclasses implement judge()."""

    def __init__(self, executor: Executor, sampler: DraftSampler, ends: Mapping[int, DraftEnd]) -> None:
        self._executor, self._sampler, self._ends = executor, sampler, ends
        self._exit_layers = tuple(sorted(ends))

    def begin(self, request: Request) -> None:
        """See ExitJudge."""

    def exit_layers(self, request: Request) -> Sequence[int]:
        """See ExitJudge."""
        return self._exit_layers

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        """See ExitJudge."""
        return self._executor.draft_logits(hidden, self._ends[exit_layer])

    def given_out(self, request: Request, depth: int, hidden: Tensor) -> None:
        """See ExitJudge. The noise of the token's position is no longer needed."""
        self._sampler.noise.close(request.index)

    def drafted(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[Drafted]:
        """Return the token that each sequence's sampling chooses at this exit layer, with the end's confidence."""
        rows = [(request, request.token_ids) for request in requests]
        return self._sampler.drafted(self._executor, hidden, self._ends[exit_layer], rows, is_verified=False)

    def progress(self, request: Request) -> float:
        """Return t / N: generated tokens as a share of the most that there may be, 0 to 1."""
        n_tokens = len(request.token_ids) - request.n_prompt_tokens
        return n_tokens / max(1, n_tokens + request.tokens_left)


class ThresholdJudge(HeadJudge):
    """Lets a token exit if its confidence reaches the threshold."""

    def __init__(
        self, executor: Executor, sampler: DraftSampler, ends: Mapping[int, DraftEnd], threshold: float
    ) -> None:
        super().__init__(executor, sampler, ends)
        self._threshold = threshold

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        found = self.drafted(exit_layer, hidden, requests)
        return [  # a confidence of NaN reaches no threshold
            each.token_id if each.token_id != NO_TOKEN and each.confidence >= self._threshold else None
            for each in found
        ]


def require_number(name: str, value: object, low: float, high: float) -> None:
    """Check a policy's parameter.

    Raises:
        UsageError: if it is not a number from low to high.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]  # NaN fails every comparison
        raise UsageError(f"{name} is {shown(value)}; expected a number from {low:g} to {high:g}.")
