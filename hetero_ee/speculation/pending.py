"""Pending tokens: the only state of speculative and early-exit decoding.

A pending token has passed `depth` layers, and its keys and values exist in exactly those layers. No token passes a
layer before all earlier tokens of its sequence have. Source: pending tokens as in EE-LLM (arXiv 2312.04916); derived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor


@dataclass(slots=True, eq=False)
class PendingToken:
    """A token that has passed only some of the layers."""

    token_id: int
    sequence: int  # sequence number in the KV cache
    position: int
    depth: int = 0  # layers passed
    hidden: Tensor | None = None  # (hidden,) after them; None before the embedding
    path: tuple[int, ...] = ()  # in a draft tree, see Batch.paths
    captured: tuple[Tensor, ...] = ()  # (hidden,) before each of the capturing layers that it has passed

    @property
    def slot(self) -> int:
        return self.path[-1] if self.path else self.position

    @classmethod
    def last_of(cls, request: Request) -> "PendingToken":
        """Return the request's last token, before any layer."""
        return cls(request.token_ids[-1], request.kv_sequence, len(request.token_ids) - 1)


def advance(executor: Executor, tokens: Sequence[PendingToken], to_layer: int) -> Tensor | None:
    """Run the tokens through the layers up to `to_layer`, the shallowest first.

    Each pass includes all tokens that are pending at the layer where it begins, so weights are read once for all of
    them.

    Args:
        tokens: Grouped by sequence, each in order of slots.

    Returns: The states (m, hidden), or None if no layer was passed.
    """
    while True:
        depth = min(token.depth for token in tokens)
        if depth >= to_layer:
            return stacked(tokens)
        moving = [token for token in tokens if token.depth == depth]
        stop = min((token.depth for token in tokens if token.depth > depth), default=to_layer)
        stop = min(stop, to_layer)
        hidden = executor.run(batch_of(moving), stacked(moving), range(depth, stop))
        for row, (token, state) in enumerate(zip(moving, hidden.unbind(), strict=True)):
            token.hidden, token.depth = state, stop
            token.captured += tuple(states[row] for states in executor.captured)
        if len(moving) == len(tokens) and stop == to_layer:
            return hidden


def batch_of(tokens: Sequence[PendingToken]) -> Batch:
    return Batch(
        tuple(token.token_id for token in tokens),
        tuple(token.sequence for token in tokens),
        tuple(token.position for token in tokens),
        paths=tuple(token.path for token in tokens) if any(token.path for token in tokens) else (),
    )


def stacked(tokens: Sequence[PendingToken]) -> Tensor | None:
    """Return the tokens' hidden states (m, hidden), or None for tokens that have not been embedded."""
    states = [token.hidden for token in tokens if token.hidden is not None]
    return rows_of(states) if states else None


def captured_states(tokens: Sequence[PendingToken]) -> list[Tensor]:
    """Return the states (m, hidden) of tokens that have passed all layers, before each of the capturing layers."""
    return [rows_of(states) for states in zip(*(token.captured for token in tokens), strict=True)]


def rows_of(states: Sequence[Tensor]) -> Tensor:
    """Stack states (hidden,) to (m, hidden). A single one is not copied."""
    if len(states) == 1:
        return states[0][None]
    if len({state.device for state in states}) > 1:  # memory ran out half-way, and some had to leave the GPU
        states = [state.cpu() for state in states]
    return torch.stack(list(states))
