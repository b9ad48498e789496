"""Grammars that take all time or memory: they are refused, and nobody else waits for them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.serving import grammar_checks
from hetero_ee.serving.grammar_checks import CompileLimits, GrammarChecks
from tests.server_support import RunningServer, eventually, opened, serving

MIB = 2**20
FAR = r"/(.|\n)*a(.|\n){%d}b(.|\n)*/"
EXPLOSIVE = "start: A\nA: " + " & ".join(FAR % n for n in range(10, 40))
ITEM = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/item"}}, "required": ["inner"]}
ENDLESS = {"$defs": {"item": ITEM | {"additionalProperties": False}}, "$ref": "#/$defs/item"}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine) as running:
        limits = CompileLimits(seconds=1.5, memory_bytes=256 * MIB)
        running.served.grammars.close()
        running.served.grammars = GrammarChecks(engine.grammars, limits)
        yield running


def explosive(number: int) -> str:
    """One of its kind that was not asked for before."""
    return EXPLOSIVE + " " * number


def is_busy(process: psutil.Process) -> bool:
    try:
        return bool(process.cpu_percent(0.2) > 20)
    except psutil.Error:
        return False


def test_a_grammar_that_takes_everything_is_refused(server: RunningServer) -> None:
    before = psutil.Process().memory_info().rss
    begin_s = time.monotonic()
    answer = server.post("/v1/completions", {"prompt": "Tom", "grammar": explosive(1), "max_tokens": 4})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "grammar", answer.text
    assert "simplify it" in answer.text
    assert time.monotonic() - begin_s < 15 and psutil.Process().memory_info().rss - before < 200 * MIB


@pytest.mark.sample(0)
def test_nobody_else_waits_for_such_grammars(server: RunningServer) -> None:
    with ThreadPoolExecutor(6) as clients:
        asked = [
            clients.submit(server.post, "/v1/completions", {"prompt": "a", "grammar": explosive(10 + n)})
            for n in range(6)
        ]
        time.sleep(0.3)
        begin_s = time.monotonic()
        server.text_of("Tom had", max_tokens=1)
        assert not all(each.done() for each in asked) and time.monotonic() - begin_s < 10
        assert server.get("/health").json() == {"status": "ok"}
        assert {each.result().status_code for each in asked} == {400}


@pytest.mark.sample(0)
def test_a_client_that_goes_away_ends_its_compilation(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes of its own, since a process keeps the limit of memory that it started with.
    patient = GrammarChecks(server.served.grammars._grammars, CompileLimits(seconds=60.0, memory_bytes=2**14 * MIB))
    monkeypatch.setattr(server.served, "grammars", patient)
    for path in ("completions", "chat/completions"):
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "grammar": explosive(30)}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/{path}", json=body, timeout=1.5)
        eventually(lambda: not any(map(is_busy, psutil.Process().children())))
    patient.close()


@pytest.mark.parametrize(
    "asked", [{"grammar": "root ::= root"}, {"json_schema": ENDLESS}, {"grammar": 'start: "<" start ">"'}], ids=range(3)
)
def test_a_grammar_without_an_end_is_refused_by_the_request(server: RunningServer, asked: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 400, "temperature": 0} | asked)
    assert answer.status_code in (200, 400), answer.text  # 200: cut off by its length


def test_only_so_many_grammars_wait(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 0)
    go_on = threading.Event()

    def slow(params: SamplingParams, child: Any) -> None:
        go_on.wait(20)

    with opened(tiny) as engine, serving(engine) as server, ThreadPoolExecutor(2) as clients:
        monkeypatch.setattr(server.served.grammars, "_check", slow)
        bodies = [{"prompt": "a", "grammar": f'start: "{n}"', "max_tokens": 1} for n in range(3)]
        first = [clients.submit(server.post, "/v1/completions", each) for each in bodies[:2]]
        eventually(lambda: server.served.grammars._n_asked == 2)
        refused = server.post("/v1/completions", bodies[2])
        assert refused.status_code == 503 and "grammars wait" in refused.text
        go_on.set()
        assert {each.result().status_code for each in first} == {200}
        assert server.post("/v1/completions", bodies[2]).status_code == 200


def test_a_grammar_that_does_not_finish_shows_in_health(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny) as engine, serving(engine) as server:
        server.served.grammars._began_s[object()] = time.monotonic() - 1000
        answer = server.get("/health")
        assert answer.status_code == 503 and "grammar" in answer.json()["reason"]


def test_a_grammar_that_is_slow_at_every_token_ends_its_own_text(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_ee.decoding.constrained.constraint.FREE_S", -1.0)
    with opened(tiny) as engine:
        with pytest.raises(HeteroError, match="holds up other texts"):
            engine.generate("a", grammar="start: /[a-z]*/", max_new_tokens=5)
        with serving(engine) as server:
            monkeypatch.setattr(server.served.grammars, "_check", lambda *_: None)
            answer = server.post("/v1/completions", {"prompt": "a", "grammar": "start: /[b-z]*/", "max_tokens": 5})
            assert answer.status_code == 400
