"""The server's paths and their handlers. Every error has the format of the API that its path belongs to."""

import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hetero_ee.errors import HeteroError
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.guard import Guard, refusal
from hetero_ee.serving.page import files
from hetero_ee.serving.protocols import anthropic, native, openai, openapi
from hetero_ee.serving.protocols.responses import responses
from hetero_ee.serving.served_model import ServedModel

LOG = logging.getLogger(__name__)
CLIENT_GONE = 499  # the status that servers log; the client is gone
Answer = Callable[[Request, ServedModel], Awaitable[Response]]
GETS: dict[str, Answer] = {
    **dict.fromkeys(files.FILES, files.file),
    "/health": native.health,
    "/metrics": native.metrics,
    "/props": native.props,
    "/tokenizer_info": native.tokenizer_info,
    "/openapi.json": openapi.document,
    "/v1/models": native.models,
    "/v1/models/{name:path}": native.model,
}
POSTS: dict[str, Answer] = {
    "/v1/chat/completions": openai.chat_completions,
    "/v1/completions": openai.completions,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/tokenize": native.tokenize,
    "/detokenize": native.detokenize,
    "/v1/embeddings": native.not_offered,
    "/v1/rerank": native.not_offered,
    "/v1/responses": responses,
    "/infill": native.not_offered,
}


def create_app(served: ServedModel) -> ASGIApp:
    """Return the server as an ASGI application. The caller must close `served`."""
    routes = [Route(path, _endpoint(answer, served), methods=["GET"]) for path, answer in GETS.items()]
    routes += [Route(path, _endpoint(answer, served), methods=["POST"]) for path, answer in POSTS.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
    return Guard(app, served.settings)


def _endpoint(answer: Answer, served: ServedModel) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request, served)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except HeteroError as error:
            return refusal(request.url.path, error)
        except Exception as error:  # a defect: details go to the log, not to the client
            LOG.exception("%r failed", request.url.path)
            message = f"the server failed ({type(error).__name__}); see its log."
            return refusal(request.url.path, RequestError(message, status=500))

    return endpoint


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = "is not supported" if status == 405 else "does not exist"
    message = f"{request.method} {request.url.path[:200]} {what}; docs/server.md lists all paths."
    return refusal(request.url.path, RequestError(message, status=status))
