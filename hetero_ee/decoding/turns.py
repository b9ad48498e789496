"""A lock with which threads that generate with one model alternate after each step."""

import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from hetero_ee.config import Progress
from hetero_ee.errors import HeteroError

CLOSED = "this engine is closed; open the model again with Engine.from_pretrained."
NEVER = threading.Event()  # never set

T = TypeVar("T")


class Turns:
    """Lock that lets one step run at a time. `progress` is called with the progress of prompts."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.RLock()  # its own thread may take it again: where a step collects a dropped text
        self._texts: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()
        self._stop = NEVER  # stop event of the request whose step runs
        self._is_closed = False

    def taking(self, tokens: Generator[T], stop: threading.Event = NEVER) -> Generator[T]:
        """Yield the tokens, and hold the lock while each is computed. `stop` ends them, even during prefill.

        Raises: HeteroError: if the lock was closed meanwhile.
        """
        self._texts.add(tokens)
        try:
            while (token := self.alone(lambda: next(tokens, None), stop)) is not None:
                yield token
        finally:
            with self._lock:
                tokens.close()

    def tell(self, stage: str, n_done: int, n_all: int) -> None:
        """Report the progress of prefill. Raises: HeteroError: if its request was stopped."""
        if self._progress is not None:
            self._progress(stage, n_done, n_all)
        if self._stop.is_set():
            raise HeteroError("this text was stopped while its prompt was read.")

    def close(self) -> None:
        """End all generation with this model."""
        with self._lock:
            self._is_closed = True
            for tokens in list(self._texts):
                tokens.close()

    def alone(self, action: Callable[[], T], stop: threading.Event = NEVER) -> T:
        """Run the action under the lock and return its result. `stop`: see `taking`. Raises: HeteroError: if closed."""
        with self._lock:
            if self._is_closed:
                raise HeteroError(CLOSED)
            before, self._stop = self._stop, stop
            try:
                return action()
            finally:
                self._stop = before
