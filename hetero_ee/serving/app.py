"""The server's paths and their handlers. Every error has the format of the API that its path belongs to."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hetero_ee.errors import HeteroError
from hetero_ee.serving.access_log import CLIENT_GONE, AccessLog
from hetero_ee.serving.answers import until_gone
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.guard import Guard, refusal
from hetero_ee.serving.models import Models
from hetero_ee.serving.page import files
from hetero_ee.serving.protocols import anthropic, llama_server, native, ollama, ollama_models, openai, openapi
from hetero_ee.serving.protocols.body import read_body
from hetero_ee.serving.protocols.responses import responses
from hetero_ee.serving.protocols.slot_actions import slot_action
from hetero_ee.serving.served_model import ServedModel

LOG = logging.getLogger(__name__)
Answer = Callable[[Request, Any], Awaitable[Response]]
GETS: dict[str, Answer] = {
    **dict.fromkeys(files.FILES, files.file),
    "/health": native.health,
    "/metrics": native.metrics,
    "/props": native.props,
    "/slots": llama_server.slots,
    "/tokenizer_info": native.tokenizer_info,
    "/openapi.json": openapi.document,
    "/v1/models": native.models,
    "/v1/models/{name:path}": native.model,
    "/api/tags": ollama_models.tags,
    "/api/ps": ollama_models.running,
    "/api/version": ollama_models.version,
}
POSTS: dict[str, Answer] = {
    "/v1/chat/completions": openai.chat_completions,
    "/v1/completions": openai.completions,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/tokenize": native.tokenize,
    "/detokenize": native.detokenize,
    "/models/unload": native.unload,
    "/slots/{number}": slot_action,
    "/v1/responses": responses,
    "/completion": llama_server.completion,
    "/apply-template": llama_server.apply_template,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/show": ollama_models.show,
    **dict.fromkeys(native.NOT_OFFERED, native.not_offered),
}
# Handlers that receive `Models` and load none. The others receive the ServedModel that the request names.
OF_ALL_MODELS: frozenset[Answer] = frozenset(
    (
        *(files.file, openapi.document, native.health, native.metrics, native.models, native.model, native.unload),
        *(native.not_offered, ollama_models.tags, ollama_models.running, ollama_models.version, ollama_models.show),
        *(ollama.unload, llama_server.slots),
    )
)


def create_app(models: Models | ServedModel, log: Callable[[str], None] | None = None) -> ASGIApp:
    """Return the server as an ASGI application. The caller must close `models` (or the single model).

    Args:
        log: Called with a line for each request; None logs nothing.
    """
    models = models if isinstance(models, Models) else Models.single(models)
    routes = [
        Route(path, _Endpoint(answer, models), methods=[method])
        for method, answers in (("GET", GETS), ("POST", POSTS))
        for path, answer in answers.items()
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
    guarded = Guard(app, models.settings)
    return guarded if log is None else AccessLog(guarded, log)


class _Endpoint:
    """ASGI application of one path. The model of the request stays loaded until the answer is sent."""

    def __init__(self, answer: Answer, models: Models) -> None:
        self._answer, self._models = answer, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        async with AsyncExitStack() as held:
            response = await self._response(request, held)
            await response(scope, receive, send)

    async def _response(self, request: Request, held: AsyncExitStack) -> Response:
        try:
            answer = self._answer
            if answer in (ollama.chat, ollama.generate) and await ollama.is_unload(request, self._models):
                answer = ollama.unload
            if answer in OF_ALL_MODELS:
                return await answer(request, self._models)
            return await answer(request, await self._served(request, held))
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except HeteroError as error:
            return refusal(request.url.path, error)
        except Exception as error:  # a defect: details go to the log, not to the client
            LOG.exception("%r failed", request.url.path)
            message = f"the server failed ({type(error).__name__}); see its log."
            return refusal(request.url.path, RequestError(message, status=500))

    async def _served(self, request: Request, held: AsyncExitStack) -> ServedModel:
        """Return the model that a request names, loaded until `held` ends.

        Raises:
            RequestError: if that needs more time than an answer may need.
            ClientDisconnect: if the client disconnects first.
        """
        name, timeout_s = await self._model_name(request), self._models.settings.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await until_gone(request, held.enter_async_context(self._models.using(name)))
        except TimeoutError:
            message = f"the model was not loaded after {timeout_s:g} s, the server's --timeout."
            raise RequestError(message, status=504, code="timeout") from None

    async def _model_name(self, request: Request) -> str | None:
        """Return the model that a request names. The only model of a server answers to any name."""
        if request.method != "POST":
            return request.query_params.get("model")
        fields = await read_body(request, self._models.settings)  # all of it, before until_gone() skips it
        return None if self._models.is_single else fields.text("model")


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or method. The error lists the paths or methods that exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    asked, headers = f"{request.method} {request.url.path[:200]}", getattr(error, "headers", None) or {}
    if status == 405:
        message = f"{asked} is not supported; use {' or '.join(sorted(headers['Allow'].split(', ')))}."
    else:
        message = f"{asked} does not exist; the paths are {_paths('GET', GETS)}, and {_paths('POST', POSTS)}."
    response = refusal(request.url.path, RequestError(message, status=status))
    response.headers.update(headers)
    return response


def _paths(method: str, answers: Mapping[str, Answer]) -> str:
    offered = (path for path, answer in answers.items() if answer is not native.not_offered)
    return f"{method} {', '.join(path for path in offered if not path.startswith('/page/'))}"
