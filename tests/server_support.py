"""A server on a port of its own, in a thread, with a tiny model behind it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_ee import Engine
from hetero_ee.kv.batch import Batch
from hetero_ee.serving.models import Models
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.server import bind, http_server, url_of
from hetero_ee.serving.settings import ServerSettings
from hetero_ee.text.chat_template import ChatTemplate, Message
from tests.chat_support import LINES

NAME = "tiny-model"
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 500, "temperature": 0}


class RunningServer:
    """Its address, and the engine behind it, which tests ask when nobody else does."""

    def __init__(self, engine: Engine, served: ServedModel, url: str) -> None:
        self.engine, self.served, self.url = engine, served, url

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """With JSON in ASCII, which has room for what is not valid Unicode."""
        headers = {"content-type": "application/json"} | more.pop("headers", {})
        return httpx.post(self.url + path, content=json.dumps(body), headers=headers, timeout=30, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **more)

    def completion(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def text_of(self, prompt: Any, **fields: Any) -> str:
        """What a completion says."""
        return str(self.completion(prompt, **fields)["choices"][0]["text"])

    def chat_ids(self, *messages: tuple[str, str]) -> list[int]:
        """The ids that (role, content) become."""
        template = ChatTemplate(LINES, self.engine.tokenizer.special_tokens)
        try:
            text = template.render([Message(*each) for each in messages])
        finally:
            template.close()
        return self.engine.tokenizer.encode(text, with_special_tokens=False)

    def is_idle(self) -> bool:
        scheduler = self.served.scheduler
        return scheduler.n_running == scheduler.n_waiting == 0


@contextmanager
def serving(
    engine: Engine, chat_template: str | None = LINES, log: Callable[[str], None] | None = None, **settings: Any
) -> Iterator[RunningServer]:
    served = ServedModel(engine, chosen_settings(**settings), chat_template=chat_template)
    try:
        with listening(Models.single(served), log) as url:
            yield RunningServer(engine, served, url)
    finally:
        served.close()


def chosen_settings(**settings: Any) -> ServerSettings:
    return ServerSettings(**{"port": 0, "model_name": NAME} | settings)


@contextmanager
def listening(models: Models, log: Callable[[str], None] | None = None) -> Iterator[str]:
    """Serve these models in a thread, at the address that is yielded. The caller closes them."""
    server = http_server(models, log)
    with bind(models.settings) as bound:
        bound.listen()
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
        thread.start()
        try:
            url = url_of(models.settings, bound)
            eventually(lambda: httpx.get(f"{url}/health", timeout=30).status_code == 200)
            yield url
        finally:
            server.should_exit = True
            thread.join(10)
    assert not thread.is_alive()


def opened(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, threads=1, **{"quantizer": "none", "profile": "off"} | options)


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.005)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The documents of a stream, whose last line has to be [DONE]."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert found.pop() == "[DONE]"
    yield from map(json.loads, found)


def slowed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """From now on every pass takes 10 ms at least; the passes, as they come."""
    passes: list[Batch] = []
    run = engine.executor.run

    def slow(batch: Batch, hidden: Any, layers: range) -> Any:
        passes.append(batch)
        time.sleep(0.01)
        return run(batch, hidden, layers)

    monkeypatch.setattr(engine.executor, "run", slow)
    return passes
