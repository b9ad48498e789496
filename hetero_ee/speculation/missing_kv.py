"""What becomes of keys and values in the layers that a token has skipped."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.waiting import WaitingToken, advance


class MissingKv(Protocol):
    """One call's way to have them, or to do without."""

    def advance(self, tokens: Sequence[WaitingToken], to_layer: int) -> Tensor | None:
        """See waiting.advance."""
        ...

    def exited(self, tokens: list[WaitingToken]) -> list[WaitingToken]:
        """One text's tokens that wait, of which the last one has just exited -> those that still wait."""
        ...

    def end(self, sequence: int) -> None:
        """No token of the sequence follows: the cache is cut to what is whole."""
        ...


class Lazy:
    """They are computed with the next token that goes deeper, exactly: one read of the weights for all that wait.

    Source: EE-LLM (arXiv 2312.04916); derived for exits at several layers.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def advance(self, tokens: Sequence[WaitingToken], to_layer: int) -> Tensor | None:
        return advance(self._executor, tokens, to_layer)

    def exited(self, tokens: list[WaitingToken]) -> list[WaitingToken]:
        return tokens

    def end(self, sequence: int) -> None:
        cache = self._executor.cache
        cache.truncate(sequence, cache.length(sequence))


def missing_kv(kind: str, executor: Executor) -> MissingKv:
    """kind: of planning.limits.EXIT_KV."""
    return {"lazy": Lazy}[kind](executor)
