"""Copies of sequences' state in RAM, to which a cache can be rolled back beyond what it keeps itself."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Parts = Sequence[tuple[Tensor, ...]]  # copies of a sequence's state, by part of the cache


@dataclass(frozen=True, slots=True)
class _Snapshot:
    parts: Parts
    n_bytes: int


class Snapshots:
    """Snapshots of all sequences of a cache, within a number of bytes. The least recently used ones are dropped first.

    Args:
        budget_bytes: the most bytes to keep; 0 keeps nothing.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.n_restored = self.n_missed = 0  # rollbacks beyond the logs, with and without a snapshot
        self._kept: OrderedDict[tuple[int, int], _Snapshot] = OrderedDict()  # by sequence and number of tokens

    @property
    def n_bytes(self) -> int:
        return sum(each.n_bytes for each in self._kept.values())

    def keep(self, sequence: int, n_tokens: int, parts: Parts) -> None:
        """Keep the state after the sequence's first n_tokens tokens, unless it exceeds the budget by itself."""
        n_bytes = sum(tensor.nbytes for part in parts for tensor in part)
        self._kept.pop((sequence, n_tokens), None)
        if not n_bytes or n_bytes > self.budget_bytes:
            return
        while self.n_bytes + n_bytes > self.budget_bytes:
            self._kept.popitem(last=False)
        self._kept[sequence, n_tokens] = _Snapshot(parts, n_bytes)

    def lengths(self, sequence: int) -> list[int]:
        """Return the numbers of tokens after which the sequence's state is kept, ascending."""
        return sorted(at for number, at in self._kept if number == sequence)

    def latest(self, sequence: int, n_tokens: int) -> int:
        """Return the most tokens, up to n_tokens, after which the sequence's state is known; 0 if none is kept."""
        return max((at for number, at in self._kept if number == sequence and at <= n_tokens), default=0)

    def take(self, sequence: int, n_tokens: int) -> Parts:
        """Return the state after n_tokens tokens, which counts as used. Raises: KeyError: if it is not kept."""
        self._kept.move_to_end((sequence, n_tokens))
        self.n_restored += 1
        return self._kept[sequence, n_tokens].parts

    def forget(self, sequence: int, n_tokens: int = 0) -> None:
        """Drop the sequence's snapshots after more than n_tokens tokens."""
        for number, at in [*self._kept]:
            if number == sequence and at > n_tokens:
                del self._kept[number, at]
