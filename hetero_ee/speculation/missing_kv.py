"""Keys and values of layers that an exited token has not passed: four policies.

lazy: the token waits, and catches up with the next one of its text that goes deeper: exact (FREE, arXiv 2310.05424;
EE-LLM, arXiv 2312.04916). propagate: made of the state it exited with, as if each layer's input were that (CALM, arXiv
2207.07061). copy: those of the last layer it passed (DYNAMAX, arXiv 2504.20922). holes: none; deeper layers hold fewer
lines than the text has tokens, a window counts lines, and rotary positions stay the text's (SpecEE's released code,
arXiv 2504.08850).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.waiting import WaitingToken, advance, batch_of, stacked


class MissingKv(Protocol):
    """Of one executor's texts. Tokens come by sequence, in order of position."""

    def advance(self, tokens: Sequence[WaitingToken], to_layer: int) -> Tensor | None:
        """See waiting.advance."""
        ...

    def exited(self, tokens: Sequence[WaitingToken]) -> list[WaitingToken]:
        """Tokens that wait, each text's last of which has just exited: fills what it fills of the layers behind; those
        that still wait."""
        ...

    def end(self, sequence: int) -> None:
        """No token of the sequence follows: the cache is cut to its first tokens that every layer holds."""
        ...


class Lazy:
    """Fills nothing: all wait."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._n_layers = executor, executor.spec.n_layers

    def advance(self, tokens: Sequence[WaitingToken], to_layer: int) -> Tensor | None:
        """See waiting.advance."""
        return advance(self._executor, tokens, to_layer)

    def exited(self, tokens: Sequence[WaitingToken]) -> list[WaitingToken]:
        """See MissingKv.exited."""
        return [token for token in tokens if token.depth < self._n_layers]

    def end(self, sequence: int) -> None:
        """See MissingKv.end."""
        self._executor.cache.cut(sequence, self._executor.cache.length(sequence))


class Propagate(Lazy):
    """Keys and values from the state after the last layer passed."""

    def exited(self, tokens: Sequence[WaitingToken]) -> list[WaitingToken]:
        """See MissingKv.exited."""
        deepest_first = sorted(
            super().exited(tokens), key=lambda token: -token.depth
        )  # no layer holds more than the last
        for depth, group in groupby(deepest_first, key=lambda token: token.depth):
            self._fill(list(group), range(depth, self._n_layers))
        return []

    def _fill(self, tokens: list[WaitingToken], layers: range) -> None:
        hidden = stacked(tokens)
        assert hidden is not None, "a token exits after a layer"
        self._executor.fill(batch_of(tokens), hidden, layers)


class Copy(Propagate):
    """Keys and values of the last layer passed."""

    def _fill(self, tokens: list[WaitingToken], layers: range) -> None:
        self._executor.copy_kv(batch_of(tokens), layers.start - 1, layers)


class Holes(Lazy):
    """No keys and values: deeper layers go without the token."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._first_holes: dict[int, int] = {}  # positions, by sequence

    def advance(self, tokens: Sequence[WaitingToken], to_layer: int) -> Tensor | None:
        """See waiting.advance. In as many passes as there are layers of different lengths."""
        return advance(self, tokens, to_layer)

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        """See Executor.run: each token after the lines that a layer holds of its text, one or more layers."""
        cache, sequences = self._executor.cache, set(batch.sequences)
        for _, group in groupby(layers, key=lambda layer: [cache.length_at(each, layer) for each in sequences]):
            same = list(group)
            hidden = self._executor.run(self._in_lines(batch, same[0]), hidden, range(same[0], same[-1] + 1))
        assert hidden is not None, "a pass has a layer"
        return hidden

    def exited(self, tokens: Sequence[WaitingToken]) -> list[WaitingToken]:
        """See MissingKv.exited."""
        for token in super().exited(tokens):
            self._first_holes.setdefault(token.sequence, token.position)
        return []

    def end(self, sequence: int) -> None:
        """See MissingKv.end."""
        cache = self._executor.cache
        cache.cut(sequence, min(cache.length(sequence), self._first_holes.pop(sequence, cache.max_tokens)))

    def _in_lines(self, batch: Batch, layer: int) -> Batch:
        """The batch with each token's line in this layer as its position."""
        lengths = {each: self._executor.cache.length_at(each, layer) for each in batch.sequences}
        lines = []
        for sequence in batch.sequences:
            lines.append(lengths[sequence])
            lengths[sequence] += 1
        positions = tuple(lines)
        return batch if positions == batch.positions else replace(batch, positions=positions, turned_by=batch.positions)


MISSING_KV: dict[str, Callable[[Executor], MissingKv]] = {
    "lazy": Lazy,
    "propagate": Propagate,
    "copy": Copy,
    "holes": Holes,
}


def missing_kv(kind: str, executor: Executor) -> MissingKv:
    """kind: of planning.limits.EXIT_KV."""
    return MISSING_KV[kind](executor)
