"""Runs the ASGI application on a socket until a signal ends it."""

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType

import uvicorn

from hetero_ee.errors import UsageError
from hetero_ee.serving.app import create_app
from hetero_ee.serving.connections import Connection, Listener
from hetero_ee.serving.models import Models
from hetero_ee.serving.settings import ServerSettings

MAX_HEADER_BYTES = 32 * 2**10
BACKLOG = 128  # connections that wait to be accepted
SHUTDOWN_S = 5  # for answers to leave; then connections are cut


class _Server(uvicorn.Server):
    """uvicorn's server, changed so that a shutdown ends running requests instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, models: Models) -> None:
        super().__init__(config)
        self._models = models

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._models.stop_soon()
        super().handle_exit(sig, frame)


def bind(settings: ServerSettings) -> socket.socket:
    """Return the listening socket, which is opened before the model is loaded.

    Raises:
        UsageError: if the address is not available.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With its protocol named asyncio sends small pieces at once; else each token could wait 40 ms for the one before.
    found = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((settings.host, settings.port))
    except OSError as error:
        found.close()
        raise UsageError(
            f"can't listen on {settings.host}:{settings.port} ({error.strerror or error}); choose another --port."
        ) from error
    return found


def url_of(settings: ServerSettings, listening: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


def page_of(settings: ServerSettings, listening: socket.socket) -> str:
    """Return the address at which a browser on this machine finds the chat page."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"{url_of(replace(settings, host=host), listening)}/"


def http_server(models: Models, log: Callable[[str], None] | None = None) -> uvicorn.Server:
    """Return uvicorn's server, with limits on headers and connections. See `create_app`."""
    config = uvicorn.Config(
        create_app(models, log),
        loop="asyncio",  # others accept connections past the listener's limit
        http=partial(Connection, read_s=models.settings.request_timeout_s),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return _Server(config, models)


def serve(
    models: Models,
    listening: socket.socket,
    begun: Callable[[], None],
    log: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM, then raise that signal again.

    Args:
        begun: Called once the server listens.
        log: See `create_app`.
    """
    try:
        listening.listen()
        begun()
        http_server(models, log).run(sockets=[listening])
    finally:
        models.close()
