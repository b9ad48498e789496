"""Logs one line per request, as an ASGI layer through which messages pass unchanged."""

import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLIENT_GONE = 499  # the status that servers log if the client disconnects before it has an answer
LONGEST_PATH = 200  # characters


class AccessLog:
    """ASGI layer that passes `log` a line for each request once its answer has ended."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None]) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s, status = time.monotonic(), CLIENT_GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                with suppress(OSError):  # requests continue if the log is closed
                    self._log(_line(scope, status, time.monotonic() - start_s))


def _line(scope: Scope, status: int, seconds: float) -> str:
    """Return method, path, status, seconds and, if the request was for text, tokens of its prompts and replies.

    The path is without its query, which may hold secrets, and as in the address, without line ends.
    """
    path = quote(scope["path"])[:LONGEST_PATH]
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {scope['method']} {path} {status} {seconds:.3f} s"
    generations = scope.get("state", {}).get("generations", ())
    if not generations:
        return line
    n_prompt, n_tokens = (sum(getattr(each, n) for each in generations) for n in ("n_prompt_tokens", "n_tokens"))
    return f"{line}, {n_prompt} + {n_tokens} tokens"
