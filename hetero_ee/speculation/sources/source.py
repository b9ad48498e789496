"""DraftSource: what proposes tokens without the model's layers. A new one is one file here and a line in opening.py."""

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
    """Sequences are those of the KV cache; every position is told to `observe` once it is verified."""

    @property
    def name(self) -> str:
        """The origin of its drafts, in statistics and reports."""

    @property
    def is_free(self) -> bool:
        """Whether drafts cost nothing but their tokens in the verification, as those of a look-up."""

    @property
    def draft_s(self) -> float:
        """Seconds that one draft takes to compute."""

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """What may follow token_ids, one after another, each computed when it is asked for.

        token_ids: the sequence from position 0 on, unverified drafts included. Closing it forgets what they left
        behind.
        """

    def observe(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """Verified tokens from first_position on, their final normed hidden states (m, hidden), and those before each
        layer that the executor captures."""

    def read_prompt(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        """The same of the next chunk of a prompt, and all work that its tokens bring: it is the prompt's time, of which
        the first draft then takes nothing."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets every position from `length` on."""

    def close(self, sequence: int) -> None:
        """The sequence has ended; closing an unknown one does nothing."""
