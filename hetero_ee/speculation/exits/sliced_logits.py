"""What later exit layers make of the candidates that an earlier one took: their logits there, and the features of them.

A row's first exit layer takes the candidates with the whole head; the exit layers behind it look at those alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.speculation.exits.features import exit_features

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


def n_pairs(n_exit_layers: int) -> int:
    """Pairs of an exit layer that took candidates, and one at or behind it."""
    return n_exit_layers * (n_exit_layers + 1) // 2


@dataclass(frozen=True, slots=True, eq=False)
class SlicedLogits:
    """Of m tokens. values: fp32 (n_pairs, m, 4), for exit layer 1, 2, ... the logits there of the candidates taken at
    1, 2, ... up to it. rank: uint8 (n_exit_layers, m), the place of the full model's token among the candidates that
    each exit layer took, N_CANDIDATES where it is none of them.
    """

    values: Floats
    rank: NDArray[np.uint8]

    @classmethod
    def joined(cls, parts: Sequence["SlicedLogits"]) -> "SlicedLogits":
        """Those of all parts' tokens, one part after the other."""
        values, rank = ([getattr(each, name) for each in parts] for name in ("values", "rank"))
        return cls(np.concatenate(values, axis=1), np.concatenate(rank, axis=1))

    @property
    def n_exit_layers(self) -> int:
        return len(self.rank)

    def at(self, first: int, exit_layer: int) -> Floats:
        """(m, 4): at `exit_layer`, of the candidates taken at `first`, at or before it."""
        found: Floats = self.values[n_pairs(exit_layer - 1) + first - 1]
        return found

    def features(self, first: int, exit_layer: int, previous: int | None) -> Floats:
        """(m, 12) of such candidates, the change counted since exit layer `previous`; None for candidates just
        taken."""
        changed_from = np.zeros_like(self.at(first, exit_layer))
        if previous is not None:
            exit_features(self.at(first, previous), changed_from)
        return exit_features(self.at(first, exit_layer), changed_from)

    def is_right(self, first: int, exit_layer: int) -> Flags:
        """(m,): whether the likeliest of such candidates is the full model's token."""
        return np.asarray(self.at(first, exit_layer).argmax(1) == self.rank[first - 1])

    def drawn(self, random: np.random.Generator) -> "SlicedRows":
        """Each token as every exit layer may come to see it: the one that took its candidates is drawn evenly from
        those before, and the one evaluated last from those between, so that gaps vary as they do when drafts are
        made."""
        parts = [self._drawn_at(exit_layer, random) for exit_layer in range(1, self.n_exit_layers + 1)]
        features, is_right, first = (np.stack(arrays) for arrays in zip(*parts, strict=True))
        return SlicedRows(features, is_right, first)

    def _drawn_at(self, exit_layer: int, random: np.random.Generator) -> tuple[Floats, Flags, NDArray[np.int64]]:
        m = self.rank.shape[1]
        if exit_layer == 1:  # nothing lies before it
            return self.features(1, 1, None), np.zeros(m, np.bool_), np.ones(m, np.int64)
        first = np.asarray(random.integers(1, exit_layer, m))
        previous = np.asarray(random.integers(first, exit_layer))
        tokens = np.arange(m)
        logits: Floats = self.values[n_pairs(exit_layer - 1) + first - 1, tokens]
        earlier: Floats = self.values[(previous - 1) * previous // 2 + first - 1, tokens]  # n_pairs of arrays
        changed_from = np.zeros_like(earlier)
        exit_features(earlier, changed_from)
        is_right = np.asarray(logits.argmax(1) == self.rank[first - 1, tokens])
        return exit_features(logits, changed_from), is_right, first


@dataclass(frozen=True, slots=True, eq=False)
class SlicedRows:
    """Tokens as exit layer 1, 2, ... sees candidates taken earlier: features fp32 (n_exit_layers, m, 12); is_right bool
    (n_exit_layers, m), whether the likeliest candidate is the full model's token; first (n_exit_layers, m), the exit
    layer that took them. Those of exit layer 1, which has none before it, mean nothing."""

    features: Floats
    is_right: Flags
    first: NDArray[np.int64]


def rank_of(tokens: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.uint8]:
    """tokens (m,), candidates (m, k) -> (m,): where the token is among its row's candidates, k where it is not."""
    hits = candidates == tokens[:, None]
    return np.asarray(np.where(hits.any(1), hits.argmax(1), candidates.shape[1]), np.uint8)
