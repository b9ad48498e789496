"""Connections: how many there may be, and how long one may take to ask for something."""

import errno
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_ee.serving import connections
from hetero_ee.serving.connections import Listener
from tests.server_support import RunningServer, eventually, opened, serving

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEAD_S", 0.5)
        patch.setattr(Listener, "most", 8)
        with serving(engine) as running:
            yield running


def connected(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def n_open(server: RunningServer) -> int:
    """Connections that the server, a thread of this process, has accepted and not closed."""
    port = int(server.url.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in found)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    try:
        while piece := connection.recv(4096):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_connections_beyond_the_limit_are_closed_at_once(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: n_open(server) == 0, 20)  # a client of the start keeps its own until its next head is late
    monkeypatch.setattr(connections, "HEAD_S", 60.0)  # of those that are held, and of any that was accepted
    held = [connected(server) for _ in range(8)]
    try:
        begin_s = time.monotonic()
        for _ in range(20):
            with connected(server) as refused:
                answer = rest_of(refused)
                assert answer == b"" or answer.startswith(b"HTTP/1.1 503")
        assert time.monotonic() - begin_s < 30
    finally:
        for each in held:
            each.close()
    eventually(lambda: answers(server))


def answers(server: RunningServer) -> bool:
    with connected(server) as connection:
        connection.sendall(HEAD + b"Connection: close\r\n\r\n")
        return rest_of(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEAD + b"\r\n" + HEAD], ids=range(4))
def test_a_head_that_does_not_arrive_is_not_waited_for(server: RunningServer, sent: bytes) -> None:
    """Nor a second one on the same connection."""
    with connected(server) as connection:
        begin_s = time.monotonic()
        connection.sendall(sent)
        found = rest_of(connection)
        assert 0.4 < time.monotonic() - begin_s < 8
        assert found.startswith(b"HTTP/1.1 200") == (b"\r\n\r\n" in sent)


def test_a_head_that_arrives_byte_by_byte_is_not_waited_for(server: RunningServer) -> None:
    with connected(server) as connection:
        begin_s = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() - begin_s < 10:
                connection.sendall(b"a")
                time.sleep(0.05)


def test_an_answer_may_take_longer_than_a_head(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    read = server.served.engine.tokenizer.encode

    def slow(*arguments: Any, **more: Any) -> list[int]:
        time.sleep(1.0)
        return read(*arguments, **more)

    monkeypatch.setattr(server.served.engine.tokenizer, "encode", slow)
    assert server.post("/tokenize", {"content": "a"}).status_code == 200


def test_without_file_descriptors_connections_are_refused_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, n_left = socket.socket.accept, [1]

    def scarce(listening: socket.socket) -> Any:
        if n_left:
            n_left.pop()
            raise OSError(errno.EMFILE, "no file descriptors")
        return accept(listening)

    with Listener(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(socket.socket, "accept", scarce)
        with socket.create_connection(listening.getsockname(), timeout=5) as refused:
            with pytest.raises(BlockingIOError):
                listening.accept()
            assert rest_of(refused).startswith(b"HTTP/1.1 503")
        with socket.create_connection(listening.getsockname(), timeout=5):
            listening.accept()[0].close()


@pytest.mark.parametrize(("n_files", "most"), [(10, 5), (resource.RLIM_INFINITY, 7)])
def test_half_of_the_files_are_for_connections(n_files: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "most", 7)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (n_files, n_files))
    with Listener(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        assert listening.most == most
