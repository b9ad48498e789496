"""ASGI middleware that logs one line per request, and notices about its texts."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero_ee.serving.generation import Generation

CLIENT_GONE = 499  # logged if the client disconnects before the answer, as in nginx
LONGEST_PATH = 200  # characters


class AccessLog:
    """ASGI middleware that calls `log` with one line after each answer. Messages pass unchanged."""

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
                    for notice in filter(None, (each.notice for each in _generations(scope))):
                        self._log(notice)


def _line(scope: Scope, status: int, seconds: float) -> str:
    """Return time, method, path, status, seconds and, for text generation, the tokens of prompts and replies.

    The query is left out, since it may hold secrets. The path is percent-encoded, so that it stays on one line.
    """
    path = quote(scope["path"])[:LONGEST_PATH]
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {scope['method']} {path} {status} {seconds:.3f} s"
    generations = _generations(scope)
    if not generations:
        return line
    n_prompt, n_tokens = (sum(getattr(each, n) for each in generations) for n in ("n_prompt_tokens", "n_tokens"))
    return f"{line}, {n_prompt} + {n_tokens} tokens"


def _generations(scope: Scope) -> Sequence[Generation]:
    found: Sequence[Generation] = scope.get("state", {}).get("generations", ())
    return found
