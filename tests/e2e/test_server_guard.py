"""Who may ask the server, and what becomes of bodies that are too large, too slow or no JSON: never a 500, no hang."""

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_ee import UsageError
from hetero_ee.serving.settings import ServerSettings
from tests.server_support import RunningServer, eventually, opened, serving

KEY = {"authorization": "Bearer the key"}
ORIGIN = "http://localhost:3000"
MAX_BODY_BYTES = 20_000
POSTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/v1/embeddings", "/v1/responses", "/completion", "/apply-template"),
    *("/api/chat", "/api/generate", "/api/show"),
)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    settings: Any = {"api_key": "the key", "cors_origins": (ORIGIN,), "max_body_bytes": MAX_BODY_BYTES}
    with opened(tiny) as engine, serving(engine, body_timeout_s=1.0, **settings) as running:
        yield running


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer another"}, {"x-api-key": ""}, {"x-api-key": b"\xe9"}]
)
def test_every_path_that_says_something_wants_the_key(server: RunningServer, headers: dict[str, Any]) -> None:
    answers = [server.post(path, {}, headers=headers) for path in (*POSTS, "/nothing")]
    answers += [server.get(path, headers=headers) for path in ("/v1/models", "/metrics", "/props", "/nothing")]
    assert {each.status_code for each in answers} == {401}
    assert all(each.headers["www-authenticate"] == "Bearer" for each in answers)
    assert {server.get(path).status_code for path in ("/health", "/", "/page/main.js")} == {200}
    assert not any("the key" in each.text for each in answers)


@pytest.mark.parametrize("headers", [KEY, {"authorization": "bearer  the key"}, {"x-api-key": "the key"}])
def test_the_key_comes_either_way(server: RunningServer, headers: dict[str, str]) -> None:
    assert server.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost.", "[::2]"]
)
def test_a_host_that_is_not_this_machine_is_refused(server: RunningServer, host: str) -> None:
    """A name that its owner points to 127.0.0.1 comes with that name (DNS rebinding)."""
    assert server.get("/health", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]:8080", "LOCALHOST:8080"])
def test_names_of_this_machine_are_taken(server: RunningServer, host: str) -> None:
    assert server.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", f"{ORIGIN}.evil.example", "http://localhost:3001"])
def test_pages_of_other_origins_may_not_ask(server: RunningServer, origin: str) -> None:
    for answer in (
        server.post("/tokenize", {"content": "a"}, headers=KEY | {"origin": origin}),
        httpx.options(f"{server.url}/tokenize", headers={"origin": origin}),
    ):
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_pages_of_allowed_origins_may(server: RunningServer) -> None:
    asked = httpx.options(f"{server.url}/tokenize", headers={"origin": ORIGIN, "access-control-request-method": "POST"})
    assert asked.status_code == 204 and "POST" in asked.headers["access-control-allow-methods"]
    answer = server.post("/tokenize", {"content": "a"}, headers=KEY | {"origin": ORIGIN})
    assert answer.status_code == 200
    assert {each.headers["access-control-allow-origin"] for each in (asked, answer)} == {ORIGIN}
    assert server.post("/tokenize", {"content": "a"}, headers=KEY | {"origin": server.url}).status_code == 200


def test_a_form_that_any_page_could_send_is_refused(server: RunningServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.post("/tokenize", {"content": "a"}, headers=KEY | {"content-type": kind})
        assert answer.status_code == 415
    assert server.post("/tokenize", {}, headers=KEY | {"content-encoding": "gzip"}).status_code == 415


def test_a_request_without_a_body_has_no_fields(server: RunningServer) -> None:
    url = f"{server.url}/slots/0?action=erase"
    for more in ({}, {"content-type": "application/x-www-form-urlencoded"}):  # curl -X POST, and curl -d ""
        assert httpx.post(url, headers=KEY | more).json() == {"id_slot": 0, "n_erased": 0}
    assert httpx.post(url, headers=KEY | {"origin": "http://example.org"}).status_code == 403
    assert httpx.post(f"{server.url}/v1/completions", headers=KEY).status_code == 400


def test_a_body_that_is_too_large_is_refused(server: RunningServer) -> None:
    large = {"content": "a" * MAX_BODY_BYTES}
    assert server.post("/tokenize", large, headers=KEY).status_code == 413
    assert server.post("/v1/messages", large, headers=KEY).json()["error"]["type"] == "request_too_large"

    def endless() -> Iterator[bytes]:
        yield b'{"content": "'
        for _ in range(100):
            yield b"a" * 1000

    headers = KEY | {"content-type": "application/json"}
    assert httpx.post(f"{server.url}/tokenize", content=endless(), headers=headers).status_code == 413


def test_a_body_that_does_not_arrive_is_not_waited_for(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nx-api-key: the key\r\n"
        connection.sendall((head + "Content-Length: 50\r\n\r\n{").encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_request_with_two_lengths_is_one_request(server: RunningServer) -> None:
    """What a proxy takes for its body must not become another request."""
    host, port = server.url.removeprefix("http://").split(":")
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nx-api-key: the key\r\n"
    lengths = f"Content-Length: {5 + len(inner)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall((head + lengths).encode() + inner)
        found = b""
        while piece := connection.recv(4096):
            found += piece
    assert found.startswith(b"HTTP/1.1 400 ") and found.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff{}", b'{"a": NaN}', b'{"a": Infinity}', b"9" * 5000, b'{"a":' * 500, b"[" * 9000],
)
def test_a_body_that_is_no_object_is_refused(server: RunningServer, body: bytes) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", content=body, headers=KEY | {"content-type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("the body is")


def test_a_body_that_is_too_deep_is_refused(server: RunningServer) -> None:
    body: Any = {"prompt": "a"}
    for _ in range(70):
        body = {"prompt": "a", "metadata": body}
    assert "deeper than 64" in server.post("/v1/completions", body, headers=KEY).text


def test_small_pieces_leave_at_once(server: RunningServer) -> None:
    """Where asyncio is not told the protocol, it leaves them to Nagle's algorithm: 40 ms for every second one."""
    with httpx.Client(base_url=server.url, headers=KEY) as client:
        client.get("/v1/models")
        times = []
        for _ in range(9):
            start_s = time.perf_counter()
            client.get("/v1/models")
            times.append(time.perf_counter() - start_s)
    assert min(times) < 0.03


def test_paths_and_methods_that_there_are_not(server: RunningServer) -> None:
    assert server.get("/nothing", headers=KEY).status_code == 404
    assert server.get("/v1/completions", headers=KEY).status_code == 405
    assert httpx.delete(f"{server.url}/v1/models", headers=KEY).status_code == 405
    error = server.get("/v1/nothing", headers=KEY).json()["error"]
    assert error["type"] == "not_found_error"
    assert error["message"].startswith("GET /v1/nothing does not exist; the paths are GET /, /health, ")
    assert ", and POST /v1/chat/completions, " in error["message"] and "/v1/embeddings" not in error["message"]
    answer = server.get("/v1/completions", headers=KEY)
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["message"] == "GET /v1/completions is not supported; use POST."
    assert server.post("/v1/models", {}, headers=KEY).json()["error"]["message"].endswith("; use GET or HEAD.")
    assert server.post("/api/nothing", {}, headers=KEY).json()["error"].startswith("POST /api/nothing does not exist")


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**400, 1e308, -0.0, "", "a", "\x00", "\ud800", "\u202e", "9" * 500),
    *([], {}, [[]], [None], [1, "a"], ["a"], [["a"]], [{}], [{"role": "user"}], {"type": "text"}, {"a": {"b": []}}),
    *([{"role": "user", "content": "hi"}], [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    *([{"role": {}, "content": "hi"}], [2**70], [-1], [5] * 3),
)
NAMES = (
    *(
        "model",
        "messages",
        "prompt",
        "content",
        "tokens",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
    ),
    *("top_k", "min_p", "seed", "stop", "stop_sequences", "stop_token_ids", "stream", "stream_options", "system", "n"),
    *("logprobs", "logit_bias", "tools", "tool_choice", "response_format", "add_special", "repeat_penalty", "thinking"),
    *("options", "format", "think", "raw", "return_tokens", "reasoning_effort"),
)


def drawn_body(draw: random.Random) -> dict[str, Any]:
    usual: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 2}
    usual |= {"options": {"num_predict": 2}}
    return usual | {name: draw.choice(VALUES) for name in draw.sample(NAMES, draw.randint(1, 5))}


def test_no_body_makes_the_server_fail(server: RunningServer) -> None:
    draw, statuses = random.Random(3), set[int]()
    with httpx.Client(base_url=server.url, headers=KEY | {"content-type": "application/json"}, timeout=20) as client:
        for _ in range(200):
            path, body = draw.choice(POSTS), drawn_body(draw) | {"max_tokens": draw.choice((2, -3, "a", 2, 2.5, 2))}
            answer = client.post(path, content=json.dumps(body))
            assert answer.status_code in (200, 400), (path, body, answer.text)
            error = {} if answer.status_code == 200 else answer.json()["error"]
            message = error if isinstance(error, str) else error.get("message", ".")
            assert message.endswith((".", "?")), answer.text
            statuses.add(answer.status_code)
    assert statuses == {200, 400}
    eventually(server.is_idle)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "0.0.0.0"}, "can be reached by others"),
        ({"host": "example.org"}, "can be reached by others"),
        ({"port": 70000}, "port is 70000"),
        ({"n_slots": 0}, "n_slots is 0"),
        ({"api_key": ""}, "api_key is empty"),
        ({"api_key": "caf\xe9"}, "api_key is empty"),
        ({"cors_origins": ("*",)}, "cors_origins is"),
        ({"request_timeout_s": 0.0}, "request_timeout_s is 0"),
        ({"slot_save_path": Path(__file__)}, "slot_save_path is .* is not a folder"),
        ({"slot_save_path": Path(__file__) / "slots"}, "slot_save_path is .* is not a folder"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ServerSettings(**changes)


def test_others_reach_it_with_a_key_or_when_asked_plainly() -> None:
    assert not ServerSettings(host="0.0.0.0", api_key="a").is_local
    assert not ServerSettings(host="0.0.0.0", insecure=True).is_local
    assert ServerSettings(host="::1").is_local and ServerSettings(host="127.1.2.3").is_local
