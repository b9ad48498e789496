"""ExitPolicy: at which layers a token is judged, and whether it exits there."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hetero_ee.decoding.texts import Text
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler


class ExitJudge(Protocol):
    """Judges the texts of one call; what a policy remembers of each is kept here, by Text.sequence."""

    def begin(self, text: Text) -> None:
        """A text's prompt is about to be read. Raises UsageError where it is sampled as the policy can't judge it."""
        ...

    def exit_layers(self, text: Text) -> Sequence[int]:
        """Where the text's last token is to be judged, ascending; asked once for each token."""
        ...

    def judge(self, exit_layer: int, hidden: Tensor, texts: Sequence[Text]) -> list[int | None]:
        """Last tokens of these texts, (m, hidden) after so many layers -> the token that each gives out; None: it goes
        on."""
        ...

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        """What a token that exits there is chosen from: (m, hidden) -> (m, vocab)."""
        ...

    def given_out(self, text: Text, depth: int, hidden: Tensor) -> None:
        """A token was given out after so many layers of the text's last one, (hidden,) then."""
        ...


class ExitPolicy(Protocol):
    """One model's, for all its texts."""

    def judging(self, executor: Executor, sampler: DraftSampler) -> ExitJudge:
        """For the texts of one call."""
        ...
