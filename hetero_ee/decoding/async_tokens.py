"""Iterates over tokens in asyncio. Each step runs in a thread, so that the event loop stays free."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from threading import Event
from typing import TypeVar

from hetero_ee.decoding.result import GeneratedToken

T = TypeVar("T")


class AsyncTokens(AsyncIterator[GeneratedToken]):
    """Asynchronous iterator over the tokens of one request. Nothing is computed before the first is awaited.

    Cancelling the waiting task, calling aclose() or leaving the loop ends the request and frees its memory.
    """

    def __init__(self, tokens: Generator[GeneratedToken], stop: Event) -> None:
        """Wrap a generator of tokens. `stop` is set on cancellation, so that prefill ends after its current chunk."""
        self._tokens, self._stop = tokens, stop

    async def __anext__(self) -> GeneratedToken:
        try:
            token = await self._in_thread(lambda tokens: next(tokens, None))
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if token is None:
            raise StopAsyncIteration
        return token

    async def aclose(self) -> None:
        """End the request after the tokens so far. Closing twice does nothing."""
        await self._in_thread(lambda tokens: tokens.close())

    async def _in_thread(self, action: Callable[[Generator[GeneratedToken]], T]) -> T:
        """Run the action in a thread. A cancellation waits until it has ended, since a running pass can't be
        interrupted."""
        held = [self._tokens]

        def work() -> T:
            return action(held.pop())  # the thread keeps `work` for a while, which must not keep a dropped text

        future = asyncio.get_running_loop().run_in_executor(None, work)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
                self._stop.set()
        if cancelled is None:
            return future.result()
        future.exception()  # read, or asyncio would report it as lost
        raise cancelled
