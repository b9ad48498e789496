"""Traces: what the full-depth model computes on the way to its tokens, chunk by chunk, for calibrating on.

Memory holds one chunk's states at a time. A chunk is a sequence of its own and begins at position 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor

FIRST_COUNTED = 1  # position 0 has nothing to attend to; its states are like no other's, and nothing is drafted there


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One chunk at full depth, without its position 0.

    token_ids: all of the chunk's. normed: for each exit layer 1..n_layers - 1 the states after so many layers, through
    the final norm, fp32 (m, hidden); final: those after the last. tokens: (m,), what the full model would say next.
    """

    token_ids: tuple[int, ...]
    normed: tuple[Tensor, ...]
    final: Tensor
    tokens: Tensor

    def at(self, exit_layer: int) -> Tensor:
        """Normed states in front of layer `exit_layer`."""
        return self.normed[exit_layer - 1]


def traces(executor: Executor, chunks: Iterable[Sequence[int]]) -> Iterator[Trace]:
    """A trace of each chunk, in order. Sequences in the executor's cache are left as they are."""
    for token_ids in chunks:
        yield trace(executor, token_ids)


def trace(executor: Executor, token_ids: Sequence[int]) -> Trace:
    """The trace of one chunk of at least two tokens."""
    sequence = executor.cache.open_new()
    try:
        batch = Batch.of_sequence(sequence, 0, list(token_ids))
        hidden = executor.run(batch, None, range(0))
        normed = []
        for layer in range(executor.spec.n_layers):
            hidden = executor.run(batch, hidden, range(layer, layer + 1))
            normed.append(executor.final_norm(hidden[FIRST_COUNTED:]).clone())  # the executor may reuse its memory
    finally:
        executor.cache.close(sequence)
    return Trace(tuple(token_ids), tuple(normed[:-1]), normed[-1], chosen_tokens(executor.lm_head(normed[-1])))


def chosen_tokens(logits: Tensor) -> Tensor:
    """(m, vocab) -> (m,): the likeliest token of each row; the lowest id wins a tie, as everywhere in this engine."""
    return torch.from_numpy(logits.numpy().argmax(axis=1))
