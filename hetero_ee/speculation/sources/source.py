"""Draft sources, which propose tokens without running the model's layers; opening.py lists them."""

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.drafted import Drafted, DraftEnd, DraftNoise

ABSENT = -1e30  # logit of a token that no draft can be: finite, for what tempers, penalizes and adds it up


class DraftsFromStates(Protocol):
    """The end of a model, which turns states (m, hidden) into drafts. See Executor for its methods."""

    spec: ModelSpec

    @property
    def head_on_gpu(self) -> bool: ...

    def draft(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> list[Drafted]: ...

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor: ...


class Choose(Protocol):
    """A function that samples a draft by the settings of a sequence."""

    def __call__(
        self, state: Tensor, end: DraftEnd, history: Sequence[int], by: DraftsFromStates | None = None
    ) -> Drafted:
        """Return the token that follows `history`, all tokens so far, and its confidence.

        Args:
            state: the state (1, hidden) after the last token.
            by: computes the logits; None for the model that verifies the draft.
        """


class ChooseSeveral(Protocol):
    """A function that samples several drafts after each of some states, as Choose samples one."""

    def __call__(
        self, states: Tensor, end: DraftEnd, histories: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[Drafted]]:
        """Return for each state (m, hidden) and history the tokens that may follow, best first."""


class Draft(NamedTuple):
    """A drafted token and its confidence."""

    token_id: int
    confidence: float  # chance of being right if the source is free; else a score


class DraftSource(Protocol):
    """Source of drafts for sequences of the KV cache. `observe` receives every position once it is verified."""

    @property
    def name(self) -> str:
        """Name of the source, shown as the origin of its drafts in statistics and reports."""

    @property
    def is_free(self) -> bool:
        """Whether a draft costs nothing except its verification, as with an n-gram lookup."""

    @property
    def draft_s(self) -> float:
        """Seconds that computing one draft needs."""

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """Yield the tokens that may follow token_ids, each computed on demand.

        Closing the iterator drops the drafts' state.

        Args:
            token_ids: The sequence from position 0 on, including unverified drafts.
        """

    def observe(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """Receive verified tokens from first_position on, their final normed states (m, hidden) and captured states."""

    def read_prompt(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """Receive the next chunk of a prompt, like `observe`. All work for its tokens happens during the call, so that
        it counts as prompt time."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every position from `length` on."""

    def close(self, sequence: int) -> None:
        """Forget a sequence. Closing an unknown one does nothing."""


Levels = Generator[Sequence[Sequence[Draft]], Sequence[tuple[int, int]]]


@runtime_checkable
class TreeSource(DraftSource, Protocol):
    """A DraftSource that can also draft several tokens after the same one."""

    def levels(self, sequence: int, token_ids: Sequence[int], choose: ChooseSeveral) -> Levels:
        """Yield the drafts after each node of a level of the tree, beginning with the newest token of token_ids.

        The caller sends the drafts that become the nodes of the next level: pairs of a node's number in its level and a
        draft's number. Closing the iterator drops the tree's state.
        """
