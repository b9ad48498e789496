"""Access control by key, Host, Origin and content type, as an ASGI layer through which streams pass unchanged.

A page of any site can make a browser send requests to 127.0.0.1, or to a name that the site's owner points to this
address. Browsers send an Origin with such requests, which must be allowed. On a local address, the Host must be one of
this machine's names.
"""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero_ee.errors import HeteroError, shown
from hetero_ee.serving.errors import RequestError, anthropic_error, headers_of, ollama_error, openai_error, status_of
from hetero_ee.serving.page.files import FILES
from hetero_ee.serving.settings import LOCAL_NAMES, ServerSettings

OPEN_PATHS = ("/health", *FILES)  # reveal nothing about requests
SHAPES = {"/v1/messages": anthropic_error, "/api/": ollama_error}  # by how a path begins; others are OpenAI's
CORS_HEADERS = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "authorization, content-type, x-api-key, anthropic-version",
    "access-control-max-age": "600",
}


def refusal(path: str, error: HeteroError) -> Response:
    """Return the error as a response in the format of the API at `path`."""
    shape = next((each for start, each in SHAPES.items() if path.startswith(start)), openai_error)
    status = status_of(error)
    return JSONResponse(shape(error), status, headers_of(status))


class Guard:
    """ASGI layer that forwards allowed requests and answers browsers' preflight requests."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin if origin in self._settings.cors_origins else None
        if "content-length" in headers and "transfer-encoding" in headers:
            await _refuse_two_lengths(scope, receive, send)
            return
        try:
            self._check_caller(headers, origin)
            if scope["method"] == "OPTIONS" and allowed is not None:
                await Response(status_code=204, headers=CORS_HEADERS | _cors(allowed))(scope, receive, send)
                return
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            if scope["method"] == "POST":
                _check_content(headers)
        except RequestError as error:
            await refusal(scope["path"], error)(scope, receive, _with_cors(send, allowed))
            return
        await self._app(scope, receive, _with_cors(send, allowed))

    def _check_caller(self, headers: Headers, origin: str | None) -> None:
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if self._settings.is_local and name.strip("[]").lower() not in (*LOCAL_NAMES, self._settings.host):
            raise RequestError(
                f"Host {shown(host)} is not recognized; use one of this machine's local names.", status=403
            )
        is_own = origin in (f"http://{host}", f"https://{host}")
        if origin is not None and not is_own and origin not in self._settings.cors_origins:
            raise RequestError(
                f"origin {shown(origin)} is not allowed; add --cors-origin {shown(origin)} when starting the server.",
                status=403,
            )

    def _check_key(self, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise RequestError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key.",
                status=401,
                code="invalid_api_key",
            )


def _check_content(headers: Headers) -> None:
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return  # no content, such as that of `curl -X POST`
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"Content-Type is {shown(kind)}; expected application/json.", status=415)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError("compressed bodies are not supported; send plain JSON.", status=415)


async def _refuse_two_lengths(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request with two lengths and close the connection, since a proxy may see another end (RFC 9112, 6.1)."""
    error = RequestError("Content-Length and Transfer-Encoding are both given; send one of them.")
    answer = refusal(scope["path"], error)
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)


def _cors(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


def _with_cors(send: Send, origin: str | None) -> Send:
    """Return a `send` that adds CORS headers, which let pages from this origin read the response."""
    if origin is None:
        return send

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            pairs = [(name.encode(), value.encode()) for name, value in _cors(origin).items()]
            message["headers"] = [*message.get("headers", ()), *pairs]
        await send(message)

    return sending
