"""What huggingface_hub and the network raise, as one sentence of ours with a way out.

Addresses are never quoted: those of large files are signed, and whoever has one has the file.
"""

import errno
from collections.abc import Iterator
from urllib.parse import urlsplit

from hetero_ee.errors import CheckpointError, DiskFullError, HeteroError, ModelError
from hetero_ee.hub.model_id import ModelId

LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
TRY_AGAIN = "try again; what has arrived whole is kept"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def hub_error(error: BaseException, model: ModelId) -> HeteroError:
    """Our error for one that a request or a download for `model` has raised."""
    if isinstance(error, HeteroError):
        return error
    for cause in _causes(error):  # huggingface_hub wraps what went wrong into "not found in the cache"
        found = _disk_error(cause, model) or _answer_error(cause, model) or _network_error(cause, model)
        if found:
            return found
    return ModelError(f"{model.name} can't be downloaded ({_reason(error)}); {TRY_AGAIN}.")


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed a moment later, and huggingface_hub hasn't tried it again itself."""
    return not _is_named(error, "LocalEntryNotFoundError") and any(
        _status(cause) in (408, 429, 500, 502, 503, 504)
        or _is_named(cause, "NetworkError", "TimeoutException", "RemoteProtocolError")
        or "Consistency check failed" in str(cause)
        for cause in _causes(error)
    )


def hub_host() -> str:
    """The Hub's name, or that of the one HF_ENDPOINT names."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2] or "the Hub"


def _page(model: ModelId) -> str:
    from huggingface_hub import constants

    return f"{urlsplit(constants.ENDPOINT).scheme}://{hub_host()}/{model.name}"


def _disk_error(error: BaseException, model: ModelId) -> HeteroError | None:
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    if (isinstance(error, OSError) and error.errno in _NO_SPACE) or "No space left on device" in str(error):
        return DiskFullError(
            f"{cache} has no room left for {model.name}; free some space or set HF_HOME to a folder on another disk, "
            "then try again: what has arrived whole is kept."
        )
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return ModelError(f"the cache {cache} can't be written ({error.strerror}); set HF_HOME to another folder.")
    return None


def _answer_error(error: BaseException, model: ModelId) -> HeteroError | None:
    """For answers that the Hub gave on purpose."""
    from huggingface_hub import errors

    name, host, page = model.name, hub_host(), _page(model)
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"{name} is gated: accept its terms on {page}, then {LOG_IN}.")
    if isinstance(error, errors.DisabledRepoError):
        return ModelError(f"{name} has been disabled on {host}; choose another model.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"{host} has no model {name}, or it is private, and there is no folder of that name; check the spelling, "
            f"and for a private model {LOG_IN}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{name} has no revision {model.revision}; {page} lists its branches and tags.")
    if isinstance(error, errors.EntryNotFoundError) and _status(error):
        return CheckpointError(f"{host} lists a file of {name} that it doesn't have (404); try again later.")
    if isinstance(error, errors.FileMetadataError) or _is_named(error, "JSONDecodeError", "TypeError", "KeyError"):
        return ModelError(f"{host} doesn't answer as a Hugging Face Hub does; check HF_ENDPOINT and the proxy.")
    return _status_error(_status(error), model)


def _status_error(status: int, model: ModelId) -> HeteroError | None:
    name, host = model.name, hub_host()
    if status == 401:
        return ModelError(f"{host} wants a login for {name}, or refuses the token it got (401); {LOG_IN}.")
    if status == 403:
        return ModelError(
            f"{host} refuses access to {name} (403); see {_page(model)} for its terms, and {LOG_IN} with a "
            "token that may read it."
        )
    if status == 429:
        return ModelError(f"{host} has had too many requests (429); wait some minutes, or {LOG_IN} for a higher limit.")
    if status >= 500:
        return ModelError(f"{host} is out of order ({status}) while asked for {name}; {TRY_AGAIN}.")
    if status:
        return ModelError(f"{host} answers {status} when asked for {name}; check the id, HF_ENDPOINT and the proxy.")
    return None


def _network_error(error: BaseException, model: ModelId) -> HeteroError | None:
    """For requests that got no answer, or none to the end."""
    name, host = model.name, hub_host()
    if _is_named(error, "ProxyError"):
        return ModelError(f"the proxy doesn't let {name} through ({_reason(error)}); check HTTPS_PROXY and HTTP_PROXY.")
    if _is_named(error, "TimeoutException"):
        return ModelError(f"{host} doesn't answer in time; check the network, then {TRY_AGAIN}.")
    if _is_named(error, "TooManyRedirects"):
        return ModelError(f"{host} sends requests for {name} in a circle; check HF_ENDPOINT and the proxy.")
    if _is_named(error, "UnsupportedProtocol", "InvalidURL"):
        return ModelError(f"{host} leads to no web address ({_reason(error)}); unset or correct HF_ENDPOINT.")
    if isinstance(error, UnicodeEncodeError) or _is_named(error, "LocalProtocolError"):
        return ModelError(f"the token for {host} holds characters that no token has; {LOG_IN} again.")
    if _is_named(error, "RemoteProtocolError") or "Consistency check failed" in str(error):
        return CheckpointError(f"a file of {name} keeps arriving incomplete from {host}; {TRY_AGAIN}.")
    if _is_named(error, "NetworkError"):
        return ModelError(f"{host} can't be reached ({_reason(error)}); check the network, then {TRY_AGAIN}.")
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__


def _status(error: BaseException) -> int:
    """The HTTP status of the answer that the error is about, 0 where there was none."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0


def _is_named(error: BaseException, *names: str) -> bool:
    """By name, since huggingface_hub 1 and 2 bring different HTTP libraries with the same family of errors."""
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _reason(error: BaseException) -> str:
    """The first line of what the error says, short."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 120 else text[:117] + "..."
