"""Limits the number of open connections, and the times in which a request's head arrives and an answer is read.

uvicorn has no such limit: its limit_concurrency answers 503 and keeps the connection, and a connection that sends no
request stays open forever. Without file descriptors, asyncio would log thousands of tracebacks per second.
"""

import asyncio
import errno
import os
import socket
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
HEAD_S = 10.0  # for a request's head to arrive, and for a closed connection to take what was sent
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Listener(socket.socket):
    """A listening socket that closes new connections while `most` connections are open."""

    most = MAX_CONNECTIONS

    def __init__(self, *kind: int) -> None:
        super().__init__(*kind)
        self._open = set[socket.socket]()
        self._spare = os.open(os.devnull, os.O_RDONLY)
        with suppress(ImportError):
            import resource

            n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if n_files != resource.RLIM_INFINITY:  # which is -1
                self.most = min(self.most, max(1, n_files // 2))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: if none is pending, or it was closed for lack of file descriptors or above the limit.
        """
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._refuse_with_spare()
            raise BlockingIOError from error
        if len(self._open) >= self.most:
            self._open = {each for each in self._open if each.fileno() != -1}
        if len(self._open) >= self.most:
            _refuse(connection)
            raise BlockingIOError
        self._open.add(connection)
        return connection, address

    def close(self) -> None:
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _refuse_with_spare(self) -> None:
        """Refuse a connection with the spare file descriptor. Otherwise the system would report it again at once."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)
        try:
            _refuse(super().accept()[0])
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)


class Connection(H11Protocol):
    """A connection that is closed when a request's head takes longer than HEAD_S to arrive.

    Args:
        read_s: Seconds after which a client that does not read its answer is disconnected.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, read_s: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._read_s = read_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._watch_head()

    def handle_events(self) -> None:
        """Handle received data. uvicorn also calls this at the end of a response."""
        super().handle_events()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """Start the timer for the client to read. asyncio calls this when too much was sent and not read."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self._read_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timer."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _watch_head(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._expire)
        elif not is_waiting and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expire(self) -> None:
        self.transport.close()
        self.loop.call_later(HEAD_S, self.transport.abort)  # if the client does not read what was sent


def _refuse(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.setblocking(False)
        connection.send(FULL)
