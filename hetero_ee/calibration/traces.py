"""The full model's states on chunks of text, and the drafts of every exit layer, from which a calibration is fitted.

Memory holds one chunk's states at a time. A chunk is its own sequence and starts at position 0.

A token's first exit layer chooses candidates with the whole lm_head. Later exit layers compute only the logits of these
candidates, the partial logits (SpecEE's sliced LM head).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.features import N_FEATURES, Floats, exit_features, likeliest

Flags = NDArray[np.bool_]
Ids = NDArray[np.int64]

FIRST_COUNTED = 1  # position 0 has nothing to attend to: its states are special, and nothing is drafted there


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """States of one chunk at every depth: m tokens, without position 0. All states have passed the final norm."""

    normed: tuple[Tensor, ...]  # after 1, 2, ..., n_layers - 1 layers, fp32 (m, hidden)
    final: Tensor  # after the last layer
    tokens: Tensor  # (m,), the full model's next tokens
    states: tuple[Tensor, ...]  # (1 + m, hidden) with position 0: final, and captured by a draft head

    def at(self, exit_layer: int) -> Tensor:
        return self.normed[exit_layer - 1]


def trace(executor: Executor, token_ids: Sequence[int]) -> Trace:
    """Return the trace of a chunk of at least two tokens. Other sequences in the KV cache stay unchanged."""
    sequence = executor.cache.open_new()
    try:
        batch = Batch.of_sequence(sequence, 0, list(token_ids))
        hidden = executor.run(batch, None, range(0))
        normed, captured = [], list[Tensor]()
        for layer in range(executor.spec.n_layers):
            hidden = executor.run(batch, hidden, range(layer, layer + 1))
            captured += (state.clone() for state in executor.captured)  # the executor may reuse its memory
            normed.append(executor.final_norm(hidden).clone())
    finally:
        executor.cache.close(sequence)
    counted = [state[FIRST_COUNTED:] for state in normed]
    tokens = chosen_tokens(executor.lm_head(counted[-1]))
    return Trace(tuple(counted[:-1]), counted[-1], tokens, (normed[-1], *captured))


def chosen_tokens(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row, (m, vocab) -> (m,). The lowest id wins a tie."""
    return torch.from_numpy(logits.numpy().argmax(axis=1))


def n_pairs(n_exit_layers: int) -> int:
    """Return the number of pairs of an exit layer that chose candidates and a same or later exit layer."""
    return n_exit_layers * (n_exit_layers + 1) // 2


@dataclass(frozen=True, slots=True, eq=False)
class PartialLogits:
    """Logits of m tokens at every exit layer, for the candidates chosen at the same and at every earlier exit layer."""

    values: (
        Floats  # fp32 (n_pairs, m, 4): at exit layer 1, 2, ..., each with the candidates taken at 1, 2, ... up to it
    )
    rank: NDArray[np.uint8]  # (n_exit_layers, m): index of the full model's token among the candidates, 4 for none

    @property
    def n_exit_layers(self) -> int:
        return len(self.rank)

    def at(self, first: int, exit_layer: int) -> Floats:
        """Return the logits (m, 4) at `exit_layer` for the candidates chosen at `first`."""
        found: Floats = self.values[n_pairs(exit_layer - 1) + first - 1]
        return found

    def features(self, first: int, exit_layer: int, previous: int | None) -> Floats:
        """Return the features (m, 12) at `exit_layer` for the candidates chosen at `first`.

        Args:
            previous: The last exit layer that judged the tokens, to compute the change; None if the candidates are new.
        """
        changed_from = np.zeros_like(self.at(first, exit_layer))
        if previous is not None:
            exit_features(self.at(first, previous), changed_from)
        return exit_features(self.at(first, exit_layer), changed_from)

    def is_right(self, first: int, exit_layer: int) -> Flags:
        """Return whether the likeliest candidate at `exit_layer` is the full model's token, (m,)."""
        return np.asarray(self.at(first, exit_layer).argmax(1) == self.rank[first - 1])

    def sampled(self, random: np.random.Generator) -> tuple[Floats, Flags, NDArray[np.int64]]:
        """Sample, for each token and exit layer, the earlier exit layers that chose its candidates and judged it last.

        The first is drawn uniformly from the earlier exit layers, the second uniformly from those in between, so that
        gaps vary as in decoding. Exit layer 1 has no earlier one, so its values are meaningless.

        Returns:
            Features (n_exit_layers, m, 12), whether the draft is right (n_exit_layers, m), and the exit layer that
                chose the candidates (n_exit_layers, m).
        """
        m = self.rank.shape[1]
        features = np.zeros((self.n_exit_layers, m, N_FEATURES), np.float32)
        is_right, took = np.zeros((self.n_exit_layers, m), np.bool_), np.ones((self.n_exit_layers, m), np.int64)
        tokens = np.arange(m)
        for exit_layer in range(2, self.n_exit_layers + 1):
            first = random.integers(1, exit_layer, m)
            previous = random.integers(first, exit_layer)
            logits = self.values[n_pairs(exit_layer - 1) + first - 1, tokens]
            earlier = self.values[(previous - 1) * previous // 2 + first - 1, tokens]  # n_pairs of arrays
            changed_from = np.zeros_like(earlier)
            exit_features(earlier, changed_from)
            features[exit_layer - 1] = exit_features(logits, changed_from)
            is_right[exit_layer - 1] = logits.argmax(1) == self.rank[first - 1, tokens]
            took[exit_layer - 1] = first
        return features, is_right, took


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts of a trace's m tokens at each exit layer, and whether they are the full model's tokens."""

    is_right: Flags  # (n_exit_layers, m)
    is_right_unmapped: Flags  # (n_exit_layers, m), without the exit maps
    partial: PartialLogits
    best: Ids  # (n_exit_layers, m)
    drafted_logits: Floats  # (n_exit_layers, m, 4), of a draft's candidates; (n_exit_layers, m, 0) without any

    @property
    def features(self) -> Floats:
        """Features (n_exit_layers, m, 12) of tokens at the exit layer that judges them first."""
        exit_layers = range(1, self.partial.n_exit_layers + 1)
        return np.stack([self.partial.features(exit_layer, exit_layer, None) for exit_layer in exit_layers])


def drafts_of(
    executor: Executor,
    found: Trace,
    maps: Mapping[int, ExitMap],
    candidates: Ids | None = None,
    *,
    with_unmapped: bool,
) -> Drafts:
    """Draft at every exit layer. Memory holds the logits of one exit layer at a time.

    Args:
        executor: Computes the lm_head.
        found: States of the tokens.
        maps: Exit maps by exit layer.
        candidates: (m, 4), a draft's, -1 for none.
        with_unmapped: Also compute is_right_unmapped at exit layers with a map, which needs another product of the
            lm_head. Without it, those values are False.
    """
    tokens = found.tokens.numpy()
    of_draft = np.zeros((len(tokens), 0), np.int64) if candidates is None else candidates
    taken: list[Ids] = []
    logits, drafted, rank, is_right, is_right_unmapped = [], [], [], [], []
    for exit_layer, normed in enumerate(found.normed, start=1):
        exit_map = maps.get(exit_layer)
        whole = executor.lm_head(normed if exit_map is None else exit_map.apply(normed))
        best = likeliest(whole)
        taken.append(best.token_ids)
        logits += [np.take_along_axis(whole.numpy(force=True), token_ids, axis=1) for token_ids in taken]
        drafted.append(np.take_along_axis(whole.numpy(force=True), of_draft, axis=1))
        hits = best.token_ids == tokens[:, None]
        rank.append(np.where(hits.any(1), hits.argmax(1), hits.shape[1]).astype(np.uint8))
        is_right.append((best.token_ids[:, 0] == tokens) & best.is_finite)
        if exit_map is None:
            is_right_unmapped.append(is_right[-1])
        elif with_unmapped:
            is_right_unmapped.append((chosen_tokens(executor.lm_head(normed)) == found.tokens).numpy())
        else:
            is_right_unmapped.append(np.zeros(len(tokens), np.bool_))
    partial = PartialLogits(np.stack(logits), np.stack(rank))
    best_ids = np.stack([token_ids[:, 0] for token_ids in taken])
    return Drafts(np.stack(is_right), np.stack(is_right_unmapped), partial, best_ids, np.stack(drafted))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkDrafts:
    """Features and labels of a chunk's m tokens at every exit layer: arrays (n_exit_layers, m, ...).

    The first three are for tokens that the exit layer judges first. The partial ones are for tokens whose candidates an
    earlier exit layer chose (see PartialLogits.sampled; those of exit layer 1 are meaningless).
    """

    features: NDArray[np.float32]  # (.., .., 12)
    is_right: NDArray[np.bool_]  # the draft is the full model's token
    is_right_unmapped: NDArray[np.bool_]  # the draft without the map is; False except in held-out chunks
    partial_features: NDArray[np.float32]  # (.., .., 12)
    partial_is_right: NDArray[np.bool_]
    partial_first: NDArray[np.int64]  # the exit layer that took the candidates


@dataclass(frozen=True, slots=True, eq=False)
class DraftedChunk:
    """Features and labels of a chunk's m tokens at every exit layer, for candidates of a draft head or draft model."""

    drafted_features: Floats  # (n_exit_layers, m, 12)
    drafted_is_chosen: Flags  # (n_exit_layers, m), the lm_head's likeliest token at the exit layer is a candidate
    drafted_is_right: Flags  # (n_exit_layers, m), and it is the full model's token
    drafted_is_known: Flags  # (1, m), the full model's token is a candidate

    @classmethod
    def of(cls, candidates: Ids, logits: Floats, best: Ids, tokens: Ids, seed: int) -> "DraftedChunk":
        """Return the features and labels of m tokens.

        The exit layer that judged a token before is drawn from the earlier ones and none, so that gaps vary as in
        decoding.

        Args:
            candidates: (m, 4), -1 for a token without candidates, which never exits.
            logits: (n_exit_layers, m, 4), of the candidates.
            best: (n_exit_layers, m), the lm_head's likeliest tokens.
            tokens: (m,), the full model's.
        """
        random, (n_exit_layers, m) = np.random.default_rng(seed), best.shape
        logits = np.where(candidates < 0, np.float32(np.nan), logits)
        softmax = np.zeros((n_exit_layers + 1, m, candidates.shape[1]), np.float32)  # [0]: not judged before
        features = []
        for place in range(n_exit_layers):
            softmax[place + 1] = softmax[random.integers(0, place + 1, m), np.arange(m)]
            features.append(exit_features(logits[place], softmax[place + 1]))
        is_chosen = (best[:, :, None] == candidates).any(2)
        is_known = (candidates == tokens[:, None]).any(1)
        return cls(np.stack(features), is_chosen, is_chosen & (best == tokens), is_known[None])

    def judged(self, place: int) -> tuple[Floats, Flags]:
        """Return features and labels at the exit layer with this index."""
        return self.drafted_features[place], self.drafted_is_right[place]


T = TypeVar("T", PartialLogits, ChunkDrafts, DraftedChunk)


def fields_of(arrays: PartialLogits | ChunkDrafts | DraftedChunk) -> dict[str, NDArray[Any]]:
    """Return the object's arrays by field name."""
    return {field.name: getattr(arrays, field.name) for field in fields(arrays)}


def joined(parts: Sequence[T]) -> T:
    """Concatenate the tokens of all parts."""
    columns = zip(*(fields_of(part).values() for part in parts), strict=True)
    return type(parts[0])(*(np.concatenate(column, axis=1) for column in columns))


def of_fields(kind: type[T], arrays: Mapping[str, NDArray[Any]]) -> T:
    """Return an object of this kind from arrays by field name. Other arrays are ignored."""
    return kind(*(arrays[field.name] for field in fields(kind)))
