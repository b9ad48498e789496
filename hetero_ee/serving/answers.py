"""Sends an answer as one JSON document or as events. If the client disconnects, the request ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hetero_ee.serving.generation import Generation

T = TypeVar("T")
EVENTS_TYPE = "text/event-stream"
PING = b": ping\n\n"  # a comment, which clients skip


def event(data: dict[str, Any] | str, name: str | None = None) -> bytes:
    """Return a server-sent event. Its JSON is ASCII, so that unusual line ends can't make clients split it."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class Answer(Protocol):
    """Interface of an answer to one request, as one document or as events."""

    async def whole(self) -> dict[str, Any]:
        """Return the answer as one document."""

    def events(self, ping_s: float) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, or as lines of JSON."""


async def answered(
    request: Request,
    answer: Answer,
    generations: Sequence[Generation],
    ping_s: float | None,
    events_type: str = EVENTS_TYPE,
) -> Response:
    """Answer with events, or with one document if `ping_s` is None. The JSON is ASCII, since parts of the answer may be
    half a character."""
    request.state.generations = generations  # for the access log
    if ping_s is not None:
        return EventStream(answer.events(ping_s), generations, events_type)
    document = await until_gone(request, answer.whole(), generations)
    return Response(json.dumps(document, allow_nan=False), media_type="application/json")


async def until_gone(request: Request, work: Coroutine[Any, Any, T], generations: Sequence[Generation] = ()) -> T:
    """Return the result of `work`. Its generations are closed, however it ends.

    Raises:
        ClientDisconnect: if the client disconnects first. `work` is then cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for each in generations:
            each.close()
        await _cancelled(working, leaving)


class EventStream(Response):
    """Response of events. When the client disconnects, the events and their generations are closed."""

    def __init__(self, events: AsyncIterator[bytes], generations: Sequence[Generation], media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._generations = events, generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for each in self._generations:
                each.close()
            await _cancelled(sending, leaving)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
