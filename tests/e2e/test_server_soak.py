"""Thousands of requests of every bad kind at once: nothing is left behind, nothing hangs, and the next one is right."""

import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hetero_ee.serving.settings import N_EXPRESS
from tests.server_support import ENDLESS, RunningServer, eventually, opened, serving

N_CLIENTS = 12
GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
LEAK_BYTES = 64 * 2**20  # that many requests may leave in the allocator's hands


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with (
        opened(tiny) as engine,
        serving(engine, queue_size=200, body_timeout_s=1, max_body_bytes=100_000, request_timeout_s=60) as running,
    ):
        yield running


class Client:
    """One of those who ask, with a stream of chance of its own."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self._server, self._drawn = server, random.Random(seed)
        host, port = server.url.removeprefix("http://").split(":")
        self._address, self.seen = (host, int(port)), Counter[str]()
        self._http = httpx.Client(base_url=server.url, timeout=60)

    def ask(self) -> None:
        """One request of a kind that chance decides."""
        kinds = (self.plain, self.chat, self.stream, self.leave, self.slow, self.half_open, self.oversized)
        kind = self._drawn.choice((*kinds, self.bad_json, self.bad_field, self.cut_body, self.scored, self.several))
        kind()
        self.seen[kind.__name__] += 1

    def close(self) -> None:
        self._http.close()

    def plain(self) -> None:
        n_tokens = self._drawn.randrange(1, 30)
        self._expect(200, "/v1/completions", GREEDY | {"max_tokens": n_tokens, "seed": self._drawn.randrange(99)})

    def chat(self) -> None:
        messages = [{"role": "user", "content": "Hello " * self._drawn.randrange(1, 40)}]
        self._expect(200, "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 1})

    def several(self) -> None:
        self._expect(200, "/v1/completions", GREEDY | {"n": 3, "max_tokens": 3})

    def scored(self) -> None:
        asked = {"prompt": [[5, 6, 7] * 20, [8, 9]], "echo": True, "logprobs": 1, "max_tokens": 1}
        self._expect(200, "/v1/completions", asked)

    def stream(self) -> None:
        with self._http.stream("POST", "/v1/completions", json=GREEDY | {"stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" or "error" in lines[-1]

    def leave(self) -> None:
        """In the midst of a stream."""
        with self._http.stream("POST", "/v1/completions", json=GREEDY | ENDLESS | {"stream": True}) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= self._drawn.randrange(8):
                    return

    def slow(self) -> None:
        """Reads a little, then nothing for a while, then goes."""
        with self._raw(self._request(GREEDY | ENDLESS | {"stream": True})) as connection:
            connection.recv(64)
            time.sleep(self._drawn.uniform(0, 0.2))

    def half_open(self) -> None:
        """Sends a part of its headers, and no more."""
        with self._raw(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"):
            time.sleep(self._drawn.uniform(0, 0.05))

    def cut_body(self) -> None:
        """Promises more than it sends."""
        request = self._request(GREEDY)
        with self._raw(request[: -self._drawn.randrange(1, 20)]):
            time.sleep(self._drawn.uniform(0, 0.1))

    def oversized(self) -> None:
        self._expect(413, "/v1/completions", {"prompt": "a" * 100_001})

    def bad_json(self) -> None:
        body = json.dumps(GREEDY)[: -self._drawn.randrange(1, 9)].encode() + self._drawn.choice((b"", b"\xff", b"NaN"))
        headers = {"content-type": "application/json"}
        assert self._http.post("/v1/completions", content=body, headers=headers).status_code == 400

    def bad_field(self) -> None:
        wrong = self._drawn.choice(({"temperature": -1}, {"n": 10**9}, {"prompt": []}, {"stop": 5}, {"grammar": "x("}))
        self._expect(400, "/v1/completions", GREEDY | wrong)

    def _expect(self, status: int, path: str, body: dict[str, Any]) -> None:
        answer = self._http.post(path, json=body)
        assert answer.status_code in (status, 503), answer.text[:300]  # 503: the queue is full
        self.seen[f"status {answer.status_code}"] += 1

    def _request(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    def _raw(self, sent: bytes) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=30)
        connection.sendall(sent)
        return connection


@pytest.mark.parametrize("n_requests", [pytest.param(500), pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.sample(0)
def test_nothing_is_left_of_thousands_of_requests(server: RunningServer, n_requests: int) -> None:
    right = server.text_of(**GREEDY)
    asked_by(server, 100, seed=1)  # what is allocated once is there
    before = _state(server)
    start_s = time.monotonic()
    seen = asked_by(server, n_requests, seed=2)
    took_s = time.monotonic() - start_s
    assert sum(count for kind, count in seen.items() if not kind.startswith("status")) == n_requests
    assert seen["status 200"] > n_requests / 5
    eventually(server.is_idle, 20)
    assert server.text_of(**GREEDY) == right
    eventually(lambda: _state(server)["files"] <= before["files"] + 2, 20)
    after = _state(server)
    assert after["threads"] <= before["threads"] + 2  # asyncio's pool has at most some that wait
    assert after["sequences"] <= server.served.settings.n_slots + N_EXPRESS
    assert after["bytes"] < before["bytes"] + LEAK_BYTES
    print(f"{n_requests} requests in {took_s:.0f} s: {dict(seen)}; before {before}, after {after}")


def asked_by(server: RunningServer, n_requests: int, seed: int) -> Counter[str]:
    """What so many requests of several clients at once were, and were answered with."""
    clients = [Client(server, 1000 * seed + number) for number in range(N_CLIENTS)]

    def work(client: Client) -> None:
        for _ in range(len(range(clients.index(client), n_requests, N_CLIENTS))):
            client.ask()

    try:
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            list(pool.map(work, clients))
    finally:
        for each in clients:
            each.close()
    return sum((each.seen for each in clients), Counter[str]())


def _state(server: RunningServer) -> dict[str, int]:
    """Of this process, which is the server's too."""
    gc.collect()
    process = psutil.Process(os.getpid())
    files, n_bytes = process.num_fds(), process.memory_info().rss
    sequences = len(server.engine.executor.cache.sequences)
    return {"files": files, "threads": threading.active_count(), "sequences": sequences, "bytes": n_bytes}
