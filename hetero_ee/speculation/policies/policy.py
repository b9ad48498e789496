"""The interface of exit policies, which decide at which layers a token is judged and whether it exits."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import UsageError, shown
from hetero_ee.runtime.drafted import Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler


class ExitPolicy(Protocol):
    """Exit policy of a model. `ends` has, by exit layer, the DraftEnd that chooses a token from a hidden state."""

    @property
    def ends(self) -> Mapping[int, DraftEnd]: ...

    def judging(self, executor: Executor, sampler: DraftSampler) -> "ExitJudge[Any]":
        """Return a judge for the sequences of one decoding loop."""


P = TypeVar("P", bound=ExitPolicy)


class ExitJudge(ABC, Generic[P]):
    """Judges the sequences of one decoding loop, by default at all exit layers of the policy.

    It stores a policy's memory of each sequence by Request.index.
    """

    def __init__(self, executor: Executor, sampler: DraftSampler, policy: P) -> None:
        self._executor, self._sampler, self._policy = executor, sampler, policy

    def begin(self, request: Request) -> None:
        """Prepare for a sequence whose prompt is about to be read.

        Raises: UsageError: if the policy does not support the request's sampling.
        """

    def exit_layers(self, request: Request) -> Sequence[int]:
        """Return the layers that judge the sequence's last token, in ascending order. Called once per token."""
        return self.active_layers(request)

    def active_layers(self, request: Request) -> Sequence[int]:
        """Return the layers that judge the sequence's next tokens, in ascending order, without preparing for one."""
        return sorted(self._policy.ends)

    def may_exit(self, request: Request) -> bool:
        """Return whether the layers that are left can still let the sequence's last token exit."""
        return True

    @abstractmethod
    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """Judge the last tokens of these sequences from their states (m, hidden) after exit_layer layers.

        Returns: For each sequence its next token if the last one exits, else None.
        """

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        """Return the logits (m, vocab) that choose the next tokens at this exit layer, from states (m, hidden)."""
        return self._executor.draft_logits(hidden, self._policy.ends[exit_layer])

    def given_out(self, request: Request, depth: int, hidden: Tensor) -> None:
        """Record that a token was emitted after the sequence's last one, which passed `depth` layers to state
        (hidden,)."""
        self._sampler.noise.close(request.index)  # the noise of its position is no longer needed

    def drafted(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[Drafted]:
        """Return the token that each sequence's sampling chooses at this exit layer, and its confidence."""
        rows = [(request, request.token_ids) for request in requests]
        return self._sampler.drafted(self._executor, hidden, self._policy.ends[exit_layer], rows, is_verified=False)


def progress(request: Request) -> float:
    """Return the generated tokens as a share, 0 to 1, of the request's maximum."""
    n_tokens = len(request.token_ids) - request.n_prompt_tokens
    return n_tokens / max(1, n_tokens + request.tokens_left)


def require_number(name: str, value: object, low: float, high: float) -> None:
    """Check a policy's parameter. Raises: UsageError: if it is not a number from low to high."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]  # NaN fails every comparison
        raise UsageError(f"{name} is {shown(value)}; expected a number from {low:g} to {high:g}.")
