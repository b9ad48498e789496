"""ExitPolicy: decides at which layers a token is judged and whether it exits there."""

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
    """A model's policy for all its sequences. ends: what makes tokens at each exit layer."""

    @property
    def ends(self) -> Mapping[int, DraftEnd]: ...

    def judging(self, executor: Executor, sampler: DraftSampler) -> "ExitJudge[Any]":
        """Return a judge for the sequences of one call."""


P = TypeVar("P", bound=ExitPolicy)


class ExitJudge(ABC, Generic[P]):
    """Judges the sequences of one call, by default at all exit layers of the policy.

    It keeps a policy's memory of each sequence by Request.index.
    """

    def __init__(self, executor: Executor, sampler: DraftSampler, policy: P) -> None:
        self._executor, self._sampler, self._policy = executor, sampler, policy

    def begin(self, request: Request) -> None:
        """Prepare for a sequence whose prompt is about to be read.

        Raises: UsageError: if the policy can't judge its sampling.
        """

    def exit_layers(self, request: Request) -> Sequence[int]:
        """Return where the sequence's last token is judged, ascending. Called once per token."""
        return sorted(self._policy.ends)

    @abstractmethod
    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """Judge the last tokens of these sequences, (m, hidden) after exit_layer layers. Return each one's next token,
        or None if it goes on."""

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        """Return the logits (m, vocab) for tokens that exit there, from states (m, hidden)."""
        return self._executor.draft_logits(hidden, self._policy.ends[exit_layer])

    def given_out(self, request: Request, depth: int, hidden: Tensor) -> None:
        """Note an emitted token. The sequence's last token had passed `depth` layers, with state (hidden,)."""
        self._sampler.noise.close(request.index)  # the noise of its position is no longer needed

    def drafted(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[Drafted]:
        """Return the token that each sequence's sampling chooses at this exit layer, with the end's confidence."""
        rows = [(request, request.token_ids) for request in requests]
        return self._sampler.drafted(self._executor, hidden, self._policy.ends[exit_layer], rows, is_verified=False)


def progress(request: Request) -> float:
    """Return t / N: generated tokens as a share of the most that there may be, 0 to 1."""
    n_tokens = len(request.token_ids) - request.n_prompt_tokens
    return n_tokens / max(1, n_tokens + request.tokens_left)


def require_number(name: str, value: object, low: float, high: float) -> None:
    """Check a policy's parameter. Raises: UsageError: if it is not a number from low to high."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]  # NaN fails every comparison
        raise UsageError(f"{name} is {shown(value)}; expected a number from {low:g} to {high:g}.")
