"""A round of drafting: rows that have passed the earlier layers and wait, the last token's and one for each draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero_ee.decoding.texts import Text
from hetero_ee.runtime.batch import Batch
from hetero_ee.speculation.exit_levels import Walk


@dataclass(slots=True, eq=False)
class DraftRound:
    """One text's round. token_ids: of its rows, the first the text's last token, the others drafts; of those the first
    n_kept rows will be verified, the rest is a chain that is not judged yet.

    max_rows: the most that may wait, of which the first n_judged are judged at the exit layer. origins: of the drafts;
    depths: the layers after which each was known. hidden: (hidden,) of each row that has begun; passed: the layers it
    has passed, never more than the row before. walk: the last row's way where it is still to be judged. asked: row ->
    what the gate was asked there, drafts with their confidences. guess: what its last row would draft, although no row
    follows; None where that is not known or would end the text.
    """

    text: Text
    max_rows: int
    n_judged: int
    token_ids: list[int]
    origins: list[str] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    n_kept: int = 1
    hidden: list[Tensor] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    walk: Walk | None = None
    asked: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    guess: int | None = None

    @property
    def first_position(self) -> int:
        return len(self.text.token_ids) - 1

    @property
    def has_begun(self) -> bool:
        """Whether its last row has."""
        return len(self.hidden) == len(self.token_ids)

    @property
    def front(self) -> int:
        """Layers that its last row has passed."""
        return self.passed[-1] if self.has_begun else 0

    @property
    def is_ready(self) -> bool:
        """Whether its last row is where it is judged next."""
        return self.has_begun and self.walk is not None and self.walk.stops[0] == self.front

    @property
    def first_moving(self) -> int:
        """The first row that is where the last one is: they go on together."""
        return self.passed.index(self.front) if self.has_begun else len(self.hidden)

    def is_drafted(self, exit_layer: int) -> bool:
        """Whether all rows wait at the exit layer, and none is to be judged."""
        return self.has_begun and self.walk is None and self.front == exit_layer

    def arrive(self, first: int, states: Sequence[Tensor], n_passed: int) -> None:
        """The rows from the first-th on have passed so many layers."""
        self.hidden[first:] = states
        self.passed[first:] = [n_passed] * len(states)

    def rows(self, first: int) -> Batch:
        """Its rows from the first-th on."""
        return Batch.of_sequence(self.text.cached_as, self.first_position + first, self.token_ids[first:])

    def add(self, token_id: int, origin: str, depth: int) -> None:
        """A draft becomes the last row."""
        self.token_ids.append(token_id)
        self.origins.append(origin)
        self.depths.append(depth)
        self.n_kept += 1

    def drop_chain(self) -> None:
        """Forgets the rows behind those kept."""
        n_kept = self.n_kept
        del self.token_ids[n_kept:], self.hidden[n_kept:], self.passed[n_kept:]
        del self.origins[n_kept - 1 :], self.depths[n_kept - 1 :]

    @property
    def history(self) -> list[int]:
        """Every token up to the last row that is kept."""
        return [*self.text.token_ids, *self.token_ids[1 : self.n_kept]]


def parted(rows: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """(m, n) -> each round's, so many of them. Of one round alone, as most often, without torch.split's 3 us."""
    return [rows] if len(sizes) == 1 else torch.split(rows, list(sizes))


def stacked(states: Sequence[Tensor]) -> Tensor:
    """(hidden,) each -> (m, hidden). Where memory ran out in the middle of a round, they lie on two devices."""
    if len(states) == 1:
        return states[0][None]
    if len({state.device for state in states}) > 1:
        states = [state.cpu() for state in states]
    return torch.stack(list(states))
