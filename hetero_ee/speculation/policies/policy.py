"""ExitPolicy: decides at which layers a token is judged and whether it exits there."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler


class ExitJudge(Protocol):
    """Judges the sequences of one call. It keeps a policy's memory of each by Request.index."""

    def begin(self, request: Request) -> None:
        """Prepare for a sequence whose prompt is about to be read.

        Raises:
            UsageError: if the policy can't judge its sampling.
        """
        ...

    def exit_layers(self, request: Request) -> Sequence[int]:
        """Return where the sequence's last token is judged, ascending. Called once per token."""
        ...

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        """Judge the last tokens of these sequences, (m, hidden) after exit_layer layers. Return each one's next token,
        or None if it goes on."""
        ...

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        """Return the logits (m, vocab) for tokens that exit there, from states (m, hidden)."""
        ...

    def given_out(self, request: Request, depth: int, hidden: Tensor) -> None:
        """Note an emitted token. The sequence's last token had passed `depth` layers, with state (hidden,)."""
        ...


class ExitPolicy(Protocol):
    """A model's policy for all its sequences."""

    def judging(self, executor: Executor, sampler: DraftSampler) -> ExitJudge:
        """Return a judge for the sequences of one call."""
        ...
