"""Maps errors to HTTP statuses and to the error objects of OpenAI, Anthropic and ollama."""

from typing import Any

from hetero_ee.errors import CheckpointError, DeviceMemoryError, GrammarError, HeteroError, ModelError, UsageError
from hetero_ee.serving.scheduler import BusyError

RETRY_AFTER_S = "5"
OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(UsageError):
    """A request can't be answered. `param` names the field with the error, and `code` is a word for programs."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def status_of(error: HeteroError) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, BusyError | DeviceMemoryError):
        return 503
    # A template refuses what a user wrote by a ModelError; what else it says of a model was said when it was opened.
    is_model = isinstance(error, ModelError) and not isinstance(error, CheckpointError)
    return 400 if is_model or isinstance(error, UsageError | GrammarError) else 500


def headers_of(status: int) -> dict[str, str]:
    if status in (429, 503):
        return {"retry-after": RETRY_AFTER_S}
    return {"www-authenticate": "Bearer"} if status == 401 else {}


def openai_error(error: HeteroError) -> dict[str, Any]:
    status = status_of(error)
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def ollama_error(error: HeteroError) -> dict[str, Any]:
    return {"error": str(error)}


def anthropic_error(error: HeteroError) -> dict[str, Any]:
    status = status_of(error)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
