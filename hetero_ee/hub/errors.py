"""Translate errors of huggingface_hub and the network to one sentence that says what to do.

Messages never quote addresses: those of large files are signed, so anyone who sees one could download the file.
"""

import errno
from collections.abc import Iterator
from urllib.parse import urlsplit

from hetero_ee.errors import CheckpointError, DiskFullError, HeteroError, ModelError
from hetero_ee.hub.model_id import ModelId

LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
TRY_AGAIN = "try again; completed files are kept"
# Traits of errors, in addition to their class names and the HTTP status, such as "404".
NO_SPACE, UNWRITABLE, INCOMPLETE, OUT_OF_ORDER, ANY_STATUS = "no-space", "unwritable", "incomplete", "5xx", "status"
_TRAIT_OF_ERRNO = {errno.ENOSPC: NO_SPACE, errno.EDQUOT: NO_SPACE} | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST), UNWRITABLE
)
_TRANSIENT = {"408", "429", "500", "502", "503", "504", "NetworkError", "TimeoutException", INCOMPLETE}
# The message for the first key of which an error has a trait; raised as ModelError unless _KINDS names another class.
_SENTENCES = {
    NO_SPACE: "{cache} has no space left for {name}; free some space or set HF_HOME to a folder on another disk, then "
    "try again: completed files are kept.",
    UNWRITABLE: "the cache {cache} can't be written ({reason}); set HF_HOME to another folder.",
    "GatedRepoError": "{name} is gated: accept its terms on {page}, then {log_in}.",
    "DisabledRepoError": "{name} has been disabled on {host}; choose another model.",
    "RepositoryNotFoundError": "{host} has no model {name}, or it is private, and there is no folder of that name; "
    "check the spelling, and for a private model {log_in}.",
    "RevisionNotFoundError": "{name} has no revision {revision}; {page} lists its branches and tags.",
    "RemoteEntryNotFoundError": "{host} lists a file of {name} that it doesn't have (404); try again later.",
    "FileMetadataError JSONDecodeError TypeError KeyError": "{host} does not answer like a Hugging Face Hub; check "
    "HF_ENDPOINT and the proxy.",
    "401": "{host} requires a login for {name}, or rejects the token it got (401); {log_in}.",
    "403": "{host} refuses access to {name} (403); see {page} for its terms, and {log_in} with a token that may read "
    "it.",
    "429": "{host} has received too many requests (429); wait some minutes, or {log_in} for a higher limit.",
    OUT_OF_ORDER: "{host} failed ({status}) on a request for {name}; {try_again}.",
    ANY_STATUS: "{host} answered {status} to a request for {name}; check the id, HF_ENDPOINT and the proxy.",
    "ProxyError": "the proxy does not let requests for {name} through ({reason}); check HTTPS_PROXY and HTTP_PROXY.",
    "TimeoutException": "{host} does not answer in time; check the network, then {try_again}.",
    "TooManyRedirects": "{host} redirects requests for {name} in a circle; check HF_ENDPOINT and the proxy.",
    "UnsupportedProtocol InvalidURL": "{host} is not a web address ({reason}); unset or correct HF_ENDPOINT.",
    "UnicodeEncodeError LocalProtocolError": "the token for {host} has characters no token has; {log_in} again.",
    INCOMPLETE: "a file of {name} keeps arriving incomplete from {host}; {try_again}.",
    "NetworkError": "{host} cannot be reached ({reason}); check the network, then {try_again}.",
}
_KINDS = {NO_SPACE: DiskFullError, "RemoteEntryNotFoundError": CheckpointError, INCOMPLETE: CheckpointError}


def hub_error(error: BaseException, model: ModelId) -> HeteroError:
    """Translate an error of a request or a download for `model` into one of the engine's."""
    from huggingface_hub import constants

    if isinstance(error, HeteroError):
        return error
    words = {
        "name": model.name,
        "revision": model.revision,
        "cache": constants.HF_HUB_CACHE,
        "host": hub_host(),
        "page": f"{urlsplit(constants.ENDPOINT).scheme}://{hub_host()}/{model.name}",
        "log_in": LOG_IN,
        "try_again": TRY_AGAIN,
    }
    for cause in _causes(error):  # huggingface_hub wraps the cause in "not found in the cache"
        found = _traits(cause)
        for key, sentence in _SENTENCES.items():
            if found.intersection(key.split()):
                kind = _KINDS.get(key, ModelError)
                return kind(sentence.format(**words, status=_status(cause), reason=_reason(cause)))
    return ModelError(f"{model.name} can't be downloaded ({_reason(error)}); {TRY_AGAIN}.")


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed and huggingface_hub hasn't already retried the request itself."""
    if isinstance(error, CheckpointError):  # a damaged file
        return True
    return "LocalEntryNotFoundError" not in _traits(error) and any(_TRANSIENT & _traits(e) for e in _causes(error))


def hub_host() -> str:
    """Return the host name of the Hub, or that in HF_ENDPOINT."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2] or "the Hub"


def _traits(error: BaseException) -> set[str]:
    """Return the error's traits and the names of its classes, which huggingface_hub 1 and 2 have in common."""
    traits, status = {kind.__name__ for kind in type(error).__mro__}, _status(error)
    if isinstance(error, OSError) and error.errno in _TRAIT_OF_ERRNO:
        traits.add(_TRAIT_OF_ERRNO[error.errno])
    if "No space left on device" in str(error):
        traits.add(NO_SPACE)
    if "RemoteProtocolError" in traits or "Consistency check failed" in str(error):
        traits.add(INCOMPLETE)
    if status:
        traits |= {str(status), ANY_STATUS}
    if status >= 500:
        traits.add(OUT_OF_ORDER)
    return traits


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__


def _status(error: BaseException) -> int:
    """Return the HTTP status of the answer that caused the error, 0 if there was no answer."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0


def _reason(error: BaseException) -> str:
    """Return the first line of the operating system's or the error's message, shortened."""
    text = (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0]
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 120 else text[:117] + "..."
