"""Many clients of one engine: their texts are their own, they wait in bounds, and leave when they go away."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_ee import Engine
from tests.server_support import ENDLESS, RunningServer, events, eventually, opened, serving, slowed

WORDS = (
    "Once upon a time",
    "Tom had a dog.",
    "The sun",
    "Lily and Ben",
    "A red ball " * 40,
    "It was",
    "One day",
    "Mia",
)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with opened(tiny) as found:
        found.executor.prompt_chunk_tokens = 32
        yield found


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with serving(engine, n_slots=3) as running:
        yield running


@pytest.fixture
def slowly(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return slowed(engine, monkeypatch)


def fields_of(number: int) -> dict[str, Any]:
    if number % 2:
        return {"max_tokens": 10 + 3 * number, "temperature": 0}
    return {"max_tokens": 25, "temperature": 1.1, "top_k": 30, "seed": number}


def test_eight_clients_get_the_tokens_that_generate_gives(
    server: RunningServer, slowly: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(number: int) -> str:
        prompt, fields = WORDS[number], fields_of(number)
        if number % 3:
            return server.text_of(prompt, **fields)
        body = fields | {"prompt": prompt, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            return "".join(each["choices"][0]["text"] for each in events(answer.iter_lines()))

    with ThreadPoolExecutor(len(WORDS)) as clients:
        said = list(clients.map(ask, range(len(WORDS))))
    monkeypatch.undo()
    for number, text in enumerate(said):
        fields = fields_of(number)
        n_tokens = fields.pop("max_tokens")
        wanted = server.engine.generate(WORDS[number], max_new_tokens=n_tokens, **fields)
        assert text == wanted.text
    n_shared = max(len(set(batch.sequences)) for batch in slowly)  # texts have shared a pass: of 3 slots, and perhaps
    assert n_shared in (3, 4)  # the one for a short prompt, while the long one was read


def test_a_client_that_goes_away_ends_its_text(server: RunningServer, slowly: list[Any]) -> None:
    """However late a busy machine hears of it: before the 500 tokens that each asks for, 5 seconds."""
    body = ENDLESS | {"prompt": "Tom"}
    message = {"max_tokens": 500, "messages": [{"role": "user", "content": "a"}]}

    def ended_early() -> None:
        eventually(server.is_idle)
        assert 0 < len(slowly) < 450
        slowly.clear()

    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as answer:
        next(answer.iter_lines())
    ended_early()
    for path, asked in (("completions", body), ("messages", message)):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/{path}", json=asked, timeout=1)
        ended_early()


def test_a_text_that_is_closed_while_a_token_arrives_ends(server: RunningServer) -> None:
    """As if the cancellation that comes with it were lost."""
    params = server.served.usual.changed(max_new_tokens=300, ignore_eos=True)

    async def reading() -> int:
        generation, n_tokens = server.served.generation([5] * 9, params), 0
        async for _ in generation.tokens():
            generation.close()
            n_tokens += 1
        return n_tokens

    assert asyncio.run(asyncio.wait_for(reading(), 10)) == 1
    eventually(server.is_idle)


def test_who_finds_no_room_is_told_when_to_come_back(engine: Engine, slowly: list[Any]) -> None:
    with serving(engine, n_slots=1, queue_size=1) as server, ThreadPoolExecutor(2) as clients:
        message = {"max_tokens": 1, "messages": [{"role": "user", "content": "c"}]}
        assert server.post("/v1/messages", message).status_code == 200  # a busy machine renders the first one slowly
        first, second = (clients.submit(server.completion, word, max_tokens=40, ignore_eos=True) for word in "ab")
        eventually(lambda: server.served.scheduler.n_running == server.served.scheduler.n_waiting == 1)
        refused = server.post("/v1/completions", {"prompt": "c"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "1 requests wait already" in refused.json()["error"]["message"]
        assert server.post("/v1/messages", message).json()["error"]["type"] == "overloaded_error"
        assert server.get("/health").status_code == 200
        assert first.result()["usage"]["completion_tokens"] == second.result()["usage"]["completion_tokens"] == 40


def test_who_waits_in_the_queue_may_leave_it(engine: Engine, slowly: list[Any]) -> None:
    with serving(engine, n_slots=1, queue_size=1) as server, ThreadPoolExecutor(1) as clients:
        first = clients.submit(server.completion, "a", max_tokens=40, ignore_eos=True)
        eventually(lambda: server.served.scheduler.n_running == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=ENDLESS | {"prompt": "b"}, timeout=0.1)
        eventually(lambda: server.served.scheduler.n_waiting == 0)
        assert not first.done() and first.result()["usage"]["completion_tokens"] == 40
        eventually(server.is_idle)  # the answer may be there a moment before its slot is free


def test_an_answer_that_takes_too_long_is_ended(engine: Engine, slowly: list[Any]) -> None:
    with serving(engine, request_timeout_s=0.3) as server:
        answer = server.post("/v1/completions", ENDLESS | {"prompt": "a"})
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        streamed = server.post("/v1/completions", ENDLESS | {"prompt": "a", "stream": True})
        assert streamed.status_code == 200 and '"code": "timeout"' in streamed.text.splitlines()[-2]
        eventually(server.is_idle)


def test_a_stream_without_tokens_shows_that_it_lives(engine: Engine, slowly: list[Any]) -> None:
    with serving(engine, ping_s=0.02) as server:
        body = {"prompt": "Tom had a dog. " * 30, "max_tokens": 1, "stream": True}
        assert ": ping" in server.post("/v1/completions", body).text.splitlines()


def test_a_defect_ends_the_requests_that_met_it_and_no_other(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.text_of("Tom", max_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.executor, "run", lambda *_: 1 / 0)
        answer = server.post("/v1/completions", {"prompt": "Tom had", "max_tokens": 5})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "ZeroDivisionError" in answer.text and "Traceback" not in answer.text and "Traceback" in caplog.text
    assert server.text_of("Tom", max_tokens=5) == before


def test_the_server_ends_its_texts_when_it_is_told_to(engine: Engine, slowly: list[Any]) -> None:
    with (
        serving(engine) as server,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json=ENDLESS | {"prompt": "a", "stream": True}, timeout=10
        ) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.served.scheduler.stop_soon()
        assert "the server is shutting down" in [line for line in lines if line][-1]
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
