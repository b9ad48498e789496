"""Exit levels: the exit layers a row is judged at on its way to the one it waits at, and what it remembers between
them.

At its first level the whole head takes a row's candidates; the levels behind look at those alone, and at how their
softmax has changed since the level before. Which levels a row is judged at: those of a schedule, and those near the
last exits of its text, of those that there are. Source: SpecEE (arXiv 2504.08850, sections 4 and 5), made exact by
verification.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.speculation.drafting import ExitLevels
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.recent_exits import RecentExits
from hetero_ee.speculation.sources.candidates import HeadCandidates


@dataclass(slots=True)
class Walk:
    """One row's way. stops: the exit layers it is still to be judged at, ascending, the last of them the plan's.

    candidates: int64 (k,), taken at its first level; softmax: fp32 (k,), theirs where it was judged last.
    """

    stops: list[int]
    candidates: Tensor | None = None
    softmax: NDArray[np.float32] | None = None

    def take_candidates(self, logits: Tensor) -> None:
        """The likeliest tokens by the whole head's logits (vocab,)."""
        found = HeadCandidates().of(logits[None])
        softmax = np.zeros_like(found.logits)
        exit_features(found.logits, softmax)
        self.candidates, self.softmax = torch.from_numpy(found.token_ids[0]), softmax[0]


class ActiveLevels:
    """Which levels are active for each text: grows with its exits, and forgets those that verification takes back."""

    def __init__(self, levels: ExitLevels, n_layers: int) -> None:
        self._levels, self._n_layers = levels, n_layers
        self._recent: dict[int, RecentExits] = {}  # by Text.sequence

    def of(self, sequence: int) -> list[int]:
        """Ascending. Behind the first only those that can judge candidates taken before."""
        by_exit_layer = self._levels.by_exit_layer
        active = [level for level in self._exits(sequence).active() if level in by_exit_layer]
        return active[:1] + [level for level in active[1:] if by_exit_layer[level].sliced is not None]

    def exited(self, sequence: int, depth: int) -> None:
        """The next row of the text has exited after `depth` layers."""
        self._exits(sequence).append(depth)

    def settle(self, sequence: int, n_drafts: int, n_accepted: int, n_tokens: int) -> None:
        """Of the last n_drafts exits the first n_accepted were right; other tokens have passed every layer."""
        recent = self._exits(sequence)
        recent.truncate(len(recent) - n_drafts + n_accepted)
        for _ in range(n_tokens - n_accepted):
            recent.append(self._n_layers)

    def close(self, sequence: int) -> None:
        """The text has ended."""
        self._recent.pop(sequence, None)

    def _exits(self, sequence: int) -> RecentExits:
        if sequence not in self._recent:
            self._recent[sequence] = RecentExits(self._levels.scheduled, self._n_layers)
        return self._recent[sequence]
