"""Batch: the tokens of one pass, each with its sequence and position, so that any mixture of sequences is one batch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

FIRST_SPARSE = 4  # position; attention sinks lie before (arXiv 2309.17453)


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, sequences, positions: one entry a token. Within a sequence, tokens come in order of position.

    turned_by: positions that keys and queries turn by, None for `positions`: in layers that lack some of a text's
    tokens, a token's position is its line there, fewer than the tokens before it. is_prompt: all are read, none was
    generated. is_tree: a position may go back to one of the batch, where another path branches off: depth first, each
    token sees its own path alone, and of every position the last token's keys and values stay. Raises ValueError when
    they differ in length or there are none.
    """

    token_ids: tuple[int, ...]
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    turned_by: tuple[int, ...] | None = None
    is_prompt: bool = False
    is_tree: bool = False

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.sequences) == len(self.positions) > 0:
            raise ValueError(
                f"a batch needs as many sequences ({len(self.sequences)}) and positions ({len(self.positions)}) "
                f"as tokens ({len(self.token_ids)}), at least one."
            )
        if len(self.turns) != len(self):
            raise ValueError(f"a batch of {len(self)} tokens can't turn by {len(self.turns)} positions.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def turns(self) -> tuple[int, ...]:
        """The position that each token's keys and queries turn by."""
        return self.positions if self.turned_by is None else self.turned_by

    def may_skip(self) -> Any:
        """Whether neurons may be left out for a token, bool (m,): not while a prompt is read, nor for a text's first
        tokens, which others attend to most."""
        return np.array([not self.is_prompt and position >= FIRST_SPARSE for position in self.positions])

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """(index in the batch, sequence, position) of each token."""
        return zip(range(len(self)), self.sequences, self.positions, strict=True)

    def runs(self) -> list[slice]:
        """The tokens in order, cut wherever a sequence's position goes back: what a run writes, no token of it sees
        too early."""
        if not self.is_tree:
            return [slice(0, len(self))]
        starts, ends = [0], dict[int, int]()
        for row, sequence, position in self.entries():
            if position < ends.get(sequence, position):
                starts.append(row)
                ends.clear()
            ends[sequence] = position + 1
        return [slice(start, stop) for start, stop in pairwise([*starts, len(self)])]

    def part(self, rows: slice) -> "Batch":
        """Some of its tokens that follow each other."""
        turned_by = None if self.turned_by is None else self.turned_by[rows]
        parts = self.token_ids[rows], self.sequences[rows], self.positions[rows]
        return Batch(*parts, turned_by, self.is_prompt, self.is_tree)

    @classmethod
    def of_sequence(
        cls, sequence: int, first_position: int, token_ids: list[int], *, is_prompt: bool = False
    ) -> "Batch":
        """Consecutive tokens of one sequence."""
        positions = range(first_position, first_position + len(token_ids))
        return cls(tuple(token_ids), (sequence,) * len(token_ids), tuple(positions), is_prompt=is_prompt)

    @classmethod
    def joined(cls, parts: list["Batch"]) -> "Batch":
        """All tokens of `parts`, one after the other."""
        return cls(
            tuple(token for part in parts for token in part.token_ids),
            tuple(sequence for part in parts for sequence in part.sequences),
            tuple(position for part in parts for position in part.positions),
            tuple(turn for part in parts for turn in part.turns) if any(part.turned_by for part in parts) else None,
            all(part.is_prompt for part in parts),
            any(part.is_tree for part in parts),
        )

    def lengths_after(self, lengths: Mapping[int, int], max_tokens: int) -> dict[int, int]:
        """How many tokens each sequence of this batch holds with it. lengths: of every open sequence before.

        Raises ValueError unless each token follows the last token of an open sequence, in a tree that of its path.
        """
        after: dict[int, int] = {}
        paths: dict[int, int] = {}  # tokens with the path that the last one is on
        for _, sequence, position in self.entries():
            if sequence not in lengths:
                raise ValueError(f"sequence {sequence} is not open.")
            length = paths.get(sequence, lengths[sequence])
            follows = lengths[sequence] <= position <= length if self.is_tree else position == length
            if not follows or position >= max_tokens:
                raise ValueError(f"sequence {sequence} holds {length} of {max_tokens} tokens, {position} can't follow.")
            paths[sequence] = position + 1
            after[sequence] = max(after.get(sequence, 0), position + 1)
        return after
