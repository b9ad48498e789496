"""Define Batch: the tokens of one pass, each with its sequence and position, so that any sequences can be mixed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

FIRST_SPARSE = 4  # first position that may skip; earlier ones are attention sinks (arXiv 2309.17453)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one pass. Tokens of the same sequence are in order of their slots in the KV cache.

    In a chain, a token's slot is its position. In a tree of drafts, several tokens share a position, and a token sees
    its own path only: the slots equal to the first positions, then the slots in `paths`.

    Args:
        token_ids, sequences, positions: one entry per token.
        is_prompt: whether all tokens belong to prompts.
        paths: by token, the slots of its last positions, its own included, if they differ from the positions; () for
            a batch of chains.

    Raises:
        ValueError: if the fields differ in length or are empty.
    """

    token_ids: tuple[int, ...]
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    is_prompt: bool = False
    paths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.sequences) == len(self.positions) > 0:
            raise ValueError(
                f"a batch needs as many sequences ({len(self.sequences)}) and positions ({len(self.positions)}) "
                f"as tokens ({len(self.token_ids)}), at least one."
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    def may_skip(self) -> Any:
        """Return which tokens may skip neurons, bool (m,).

        Prompt tokens may not skip any, nor may a sequence's first tokens, to which later tokens attend most.
        """
        return np.array([not self.is_prompt and position >= FIRST_SPARSE for position in self.positions])

    @property
    def slots(self) -> tuple[int, ...]:
        """Each token's slot in its sequence's KV cache."""
        if not self.paths:
            return self.positions
        return tuple(path[-1] if path else at for path, at in zip(self.paths, self.positions, strict=True))

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Yield (index in the batch, sequence, slot) for each token."""
        return zip(range(len(self)), self.sequences, self.slots, strict=True)

    def seen(self, row: int, first: int) -> list[int]:
        """Return the slots of the positions that a token sees, from position `first` up to its own."""
        position, path = self.positions[row], self.paths[row] if self.paths else ()
        slots = [*range(first, position + 1 - len(path)), *path]
        return slots[len(slots) - (position + 1 - first) :]

    def by_sequence(self) -> dict[int, list[int]]:
        """Return the indices of each sequence's tokens in the batch, in order of their slots."""
        found: dict[int, list[int]] = {}
        for row, sequence in enumerate(self.sequences):
            found.setdefault(sequence, []).append(row)
        return found

    @classmethod
    def of_sequence(
        cls, sequence: int, first_position: int, token_ids: list[int], *, is_prompt: bool = False
    ) -> "Batch":
        """Return a batch of consecutive tokens of one sequence."""
        positions = range(first_position, first_position + len(token_ids))
        return cls(tuple(token_ids), (sequence,) * len(token_ids), tuple(positions), is_prompt=is_prompt)

    @classmethod
    def joined(cls, parts: list["Batch"]) -> "Batch":
        return cls(
            tuple(token for part in parts for token in part.token_ids),
            tuple(sequence for part in parts for sequence in part.sequences),
            tuple(position for part in parts for position in part.positions),
            all(part.is_prompt for part in parts),
            tuple(path for part in parts for path in part.paths or ((),) * len(part))
            if any(part.paths for part in parts)
            else (),
        )

    def lengths_after(self, lengths: Mapping[int, int], max_tokens: int) -> dict[int, int]:
        """Return each sequence's length, in tokens, after this batch.

        Args:
            lengths: the length of every open sequence before the batch.

        Raises:
            ValueError: if a token does not follow the last one of an open sequence.
        """
        after: dict[int, int] = {}
        for _, sequence, slot in self.entries():
            if sequence not in lengths:
                raise ValueError(f"sequence {sequence} is not open.")
            length = after.get(sequence, lengths[sequence])
            if slot != length or slot >= max_tokens:
                raise ValueError(f"sequence {sequence} holds {length} of {max_tokens} tokens, {slot} can't follow.")
            after[sequence] = length + 1
        return after


def path_of(before: tuple[int, ...], slot: int, position: int) -> tuple[int, ...]:
    """Return the entry of Batch.paths of a token in this slot, whose parent in the tree has the entry `before`."""
    return (*before, slot) if before or slot != position else ()
