"""Texts that several threads generate with one model: they take turns, token by token."""

import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from hetero_ee.config import Progress
from hetero_ee.errors import HeteroError

CLOSED = "this engine is closed; open the model again with Engine.from_pretrained."
NEVER = threading.Event()  # set by nobody

T = TypeVar("T")


class Turns:
    """Whose step it is. progress: what `tell` passes on to."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.RLock()  # its own thread may take it again: where a step collects a dropped text
        self._texts: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()
        self._stop = NEVER  # of the text whose step it is
        self._is_closed = False

    def taking(self, tokens: Generator[T], stop: threading.Event = NEVER) -> Generator[T]:
        """The tokens, each step of them alone. stop: ends the text even while its prompt is read.

        Raises HeteroError where all was closed meanwhile.
        """
        self._texts.add(tokens)
        try:
            while (token := self.alone(lambda: next(tokens, None), stop)) is not None:
                yield token
        finally:
            with self._lock:
                tokens.close()

    def tell(self, stage: str, n_done: int, n_all: int) -> None:
        """How far a prompt is read. Raises HeteroError where its text was stopped."""
        if self._progress is not None:
            self._progress(stage, n_done, n_all)
        if self._stop.is_set():
            raise HeteroError("this text was stopped while its prompt was read.")

    def close(self) -> None:
        """Ends every text."""
        with self._lock:
            self._is_closed = True
            for tokens in list(self._texts):
                tokens.close()

    def alone(self, action: Callable[[], T], stop: threading.Event = NEVER) -> T:
        """What the action returns, no step beside it. stop: as in `taking`. Raises HeteroError where all was closed."""
        with self._lock:
            if self._is_closed:
                raise HeteroError(CLOSED)
            before, self._stop = self._stop, stop
            try:
                return action()
            finally:
                self._stop = before
