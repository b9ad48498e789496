"""DraftSource: proposes tokens without the model's layers. A new one is one file here and a line in opening.py."""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hetero_ee.runtime.drafted import Drafted, DraftEnd

# What a sequence's sampling takes after a state (1, hidden), by this end and every token before; see Drafted.
Choose = Callable[[Tensor, DraftEnd, Sequence[int]], Drafted]


class Draft(NamedTuple):
    """A token that may come next if those before it are right."""

    token_id: int
    confidence: float  # of a free source the chance that it is right; else what tells sure drafts from unsure ones


class DraftSource(Protocol):
    """Proposes drafts for sequences of the KV cache. `observe` receives every position once it is verified."""

    @property
    def name(self) -> str:
        """The origin of its drafts, in statistics and reports."""

    @property
    def is_free(self) -> bool:
        """Whether drafts cost only their tokens in the verification, like those of a lookup."""

    @property
    def draft_s(self) -> float:
        """Seconds to compute one draft."""

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """Yield the tokens that may follow token_ids, each computed on demand.

        token_ids: the sequence from position 0 on, including unverified drafts. Closing the iterator drops their state.
        """

    def observe(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """Receive verified tokens from first_position on, with their final normed hidden states (m, hidden) and the
        captured states."""

    def read_prompt(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """Receive the next chunk of a prompt like `observe`, and do all work for its tokens now, so that it counts as
        prompt time."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forget every position from `length` on."""

    def close(self, sequence: int) -> None:
        """Forget a sequence. Closing an unknown one does nothing."""
