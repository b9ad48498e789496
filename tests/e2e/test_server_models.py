"""Several models behind one server: loaded by requests, closed for others after their requests, and listed."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hetero_ee import Engine, ModelError, UsageError
from hetero_ee.errors import DeviceMemoryError
from hetero_ee.hub.model_folders import models_in
from hetero_ee.serving.metrics import MetricFamilies
from hetero_ee.serving.models import Models
from hetero_ee.serving.scheduler import BusyError
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.server import bind
from hetero_ee.serving.settings import ServerSettings
from hetero_ee_cli.app import app
from tests.chat_support import LINES
from tests.server_support import ENDLESS, chosen_settings, events, eventually, listening, opened, slowed

TEXT = {"prompt": "Tom", "max_tokens": 8, "temperature": 0}


class Server:
    """A server with the models a, b and c, which are all the same, and a record of what was opened."""

    def __init__(self, folder: Path, settings: ServerSettings) -> None:
        self.opened: list[str] = []
        self.engines: dict[str, Engine] = {}
        self.errors: dict[str, Exception] = {}  # raised once when that model is opened
        self.may_open = threading.Event()
        self.may_open.set()
        self._folder, self.url = folder, ""
        self.models = Models(settings, ["a", "b", "c"], self._open)

    def _open(self, name: str, families: MetricFamilies) -> ServedModel:
        self.opened.append(name)
        assert self.may_open.wait(20)
        if name in self.errors:
            raise self.errors.pop(name)
        self.engines[name] = opened(self._folder)
        named = replace(self.models.settings, model_name=name)
        return ServedModel(self.engines[name], named, chat_template=LINES, families=families)

    def ask(self, model: str | None, **fields: Any) -> httpx.Response:
        body = TEXT | ({} if model is None else {"model": model}) | fields
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=5).json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30)

    @property
    def loaded(self) -> list[str]:
        return [each["id"] for each in self.get("/v1/models")["data"] if each["status"]["value"] == "loaded"]


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Server]:
    server = Server(folder, chosen_settings(**settings))
    try:
        with listening(server.models) as server.url:
            yield server
    finally:
        server.may_open.set()
        server.models.close()


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with running(tiny) as found:
        yield found


def test_a_request_loads_its_model_and_closes_the_one_before(server: Server) -> None:
    assert server.opened == [] and server.loaded == []
    assert [each["id"] for each in server.get("/v1/models")["data"]] == ["a", "b", "c"]
    for name in ("b", "a"):
        said = server.ask(name).json()
        assert said["model"] == name and server.loaded == [name]
        assert said["choices"][0]["text"] == server.engines[name].generate("Tom", max_new_tokens=8).text
        assert "meta" in server.get(f"/v1/models/{name}")
    assert server.engines["b"].__repr__().endswith("closed>") and server.opened == ["b", "a"]
    assert server.ask(None).json()["model"] == "a"  # the model used last
    assert server.get("/props?model=b")["model_alias"] == "b" and server.loaded == ["b"]
    counted = httpx.get(f"{server.url}/metrics").text
    assert 'hetero_ee:prompt_tokens_total{model_name="a"}' in counted  # goes on when it is loaded again
    assert 'num_requests_running{model_name="b"}' in counted
    assert 'num_requests_running{model_name="a"}' not in counted


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_an_unknown_model_is_not_found_and_the_list_is_named(server: Server, path: str) -> None:
    answer = httpx.post(server.url + path, json=TEXT | {"model": "d"}, timeout=30)
    assert answer.status_code == 404 and "this server has a, b, c" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/v1/models/d").status_code == 404
    assert httpx.get(f"{server.url}/props?model=d").status_code == 404


def test_unload_closes_a_model(server: Server) -> None:
    server.ask("a")
    assert httpx.post(f"{server.url}/models/unload", json={"model": "a"}, timeout=30).json() == {"success": True}
    assert server.loaded == []
    assert httpx.post(f"{server.url}/models/unload", json={}, timeout=30).status_code == 400


def test_requests_in_flight_end_first_and_loads_do_not_block_health(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ask("a")
    slowed(server.engines["a"], monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        body = TEXT | {"model": "a", "max_tokens": 40, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.may_open.clear()
            n_before = len(server.opened)
            other = threads.submit(server.ask, "b")
            again = threads.submit(server.ask, "a")  # waits for its turn after b
            assert len(list(events(iter([first, *lines])))) >= 40
        eventually(lambda: server.opened[n_before:] == ["b"])
        assert server.get("/health") == {"status": "ok"}
        assert server.get("/v1/models/b")["status"] == {"value": "loading"} and server.loaded == []
        server.may_open.set()
        assert other.result(20).json()["model"] == "b" and again.result(20).json()["model"] == "a"


def test_a_model_that_can_not_be_opened_is_an_error_of_the_server(server: Server) -> None:
    server.errors["c"] = ModelError("c has no weights.")
    answer = server.ask("c")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "c can't be loaded: c has no weights.")
    assert server.ask("c").status_code == 200


@pytest.mark.sample(0)
def test_as_many_stay_as_fit(tiny: Path) -> None:
    with running(tiny, models_max=2) as server:
        for name in "aba":
            server.ask(name)
        assert server.loaded == ["a", "b"]
        server.ask("c")
        assert server.loaded == ["a", "c"]  # b was not used for longest
        server.errors["b"] = DeviceMemoryError("no memory.", "gpu")
        assert server.ask("b").status_code == 200
        assert server.loaded == ["b"] and server.opened == ["a", "b", "c", "b", "b"]
        server.ask("a")
        server.post("/models/unload", model="a")
        assert server.get("/props")["model_alias"] == "b" and server.loaded == ["b"]


def test_a_model_that_is_loaded_too_slowly_is_a_timeout_and_kept(tiny: Path) -> None:
    with running(tiny, request_timeout_s=0.3, models_max=2) as server:
        server.may_open.clear()
        answer = server.ask("a")
        assert answer.status_code == 504 and "--timeout" in answer.json()["error"]["message"]
        with pytest.raises(httpx.ReadTimeout):  # this client leaves while it waits for its turn
            httpx.post(f"{server.url}/v1/completions", json=TEXT | {"model": "b"}, timeout=0.1)
        server.may_open.set()
        eventually(lambda: server.loaded == ["a"])
        assert httpx.post(f"{server.url}/models/unload", json={"model": "a"}, timeout=30).status_code == 200
        assert server.opened == ["a"]


def test_a_client_that_does_not_read_keeps_no_other_model_out(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_small(settings: ServerSettings) -> socket.socket:
        found = bind(settings)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return found

    monkeypatch.setattr("tests.server_support.bind", bind_small)
    with running(tiny, request_timeout_s=3.0) as server, socket.socket() as client:
        server.ask("a")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        body = json.dumps(TEXT | ENDLESS | {"model": "a", "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: server.ask("b").status_code == 200, 20)


class StandIn:
    """A served model of 100 bytes, of which its plan puts `host_bytes` on the CPU."""

    def __init__(self, host_bytes: int) -> None:
        self.engine = self.scheduler = self
        self.memory, self.plan, self.problem = {"weights": 100}, self, None
        self._host_bytes = host_bytes

    def n_bytes(self, device: str) -> int:
        return self._host_bytes if device == "cpu" else 100 - self._host_bytes

    def stop_soon(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(("host_bytes", "expected"), [(10, "loaded"), (90, "unloaded")])
def test_only_memory_of_the_host_counts_as_ram(host_bytes: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_ee.serving.models.memory_info", lambda host: SimpleNamespace(usable_bytes=150))
    served: Any = StandIn(host_bytes)
    models = Models(chosen_settings(models_max=2), ["a", "b"], lambda *_: served)

    async def use_both() -> None:
        for name in models.names:
            async with models.using(name):
                pass

    asyncio.run(asyncio.wait_for(use_both(), 20))
    assert [models.status(name) for name in models.names] == [expected, "loaded"]


def test_a_model_whose_requests_do_not_end_is_not_waited_for_long() -> None:
    served: Any = StandIn(10)
    models = Models(chosen_settings(request_timeout_s=0.05), ["a", "b"], lambda *_: served)

    async def switch() -> None:
        async with models.using("a"):
            with pytest.raises(BusyError, match="a still answers requests"):
                await models.unload("a")
        await models.unload("a")

    asyncio.run(asyncio.wait_for(switch(), 20))
    assert models.status("a") == "unloaded"


def test_models_in_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("one/config.json", "org/two/config.json", "one/a.gguf", "org/three/b.gguf", "c-00001-of-00002.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name in ("c-00002-of-00002.gguf", "mmproj-c.gguf", "imatrix.gguf", "notes.txt"):
        (tmp_path / name).write_text("")
    found = [str(each.relative_to(tmp_path)) for each in models_in(tmp_path)]
    assert found == ["c-00001-of-00002.gguf", "one", "org/three/b.gguf", "org/two"]
    with pytest.raises(UsageError, match=r"org/two has no models; expected folders with config\.json, or GGUF files"):
        models_in(tmp_path / "org" / "two")


@pytest.mark.sample(0)
def test_the_command_serves_a_folder_of_models(tiny: Path, tmp_path: Path, empty_cache: Path) -> None:
    for name in "ab":
        (tmp_path / name).symlink_to(tiny)
    words = ["serve", "--models-dir", tmp_path, "--port", "0", "--quantizer", "none", "-t", "1", "--temp", "0"]
    command = [sys.executable, "-m", "hetero_ee_cli", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.match(r"2 models are served at (http://127\.0\.0\.1:\d+);", line)
            assert found, line + process.stderr.read()
            for name in "ab":
                answer = httpx.post(f"{found[1]}/v1/completions", json=TEXT | {"model": name}, timeout=60)
                assert answer.status_code == 200 and answer.json()["model"] == name, answer.text
            process.send_signal(signal.SIGINT)
            assert process.wait(15) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "x/a", "-m", "y/a"], "two models are called a, x/a and y/a"),
        (["-m", "a", "-m", "b", "--alias", "c"], "--alias names one model, and 2 are served"),
        (["a", "-m", "b", "--draft-head", "org/head"], "--draft-head belongs to one model, and 2 are served"),
        (["--models-max", "0"], "--models-max is 0"),
        (["-m", "a", "-m", "./no-such-folder"], "there is no folder no-such-folder"),
    ],
)
def test_options_of_several_models_are_checked(empty_cache: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        app(["serve", *words], standalone_mode=False)


def test_ollamas_clients_see_and_load_all_models(server: Server) -> None:
    assert [each["name"] for each in server.get("/api/tags")["models"]] == ["a", "b", "c"]
    body = {"model": "c:latest", "prompt": "Tom", "stream": False, "options": {"num_predict": 2}}
    assert httpx.post(f"{server.url}/api/generate", json=body, timeout=30).json()["model"] == "c"
    assert [bool(each["details"]) for each in server.get("/api/tags")["models"]] == [False, False, True]
    (loaded,) = server.get("/api/ps")["models"]
    assert (loaded["name"], loaded["context_length"]) == ("c", 600) and loaded["size"] > 0
    lost = httpx.post(f"{server.url}/api/generate", json=body | {"model": "d"}, timeout=30)
    assert lost.status_code == 404 and lost.json()["error"].startswith("there is no such model")


@pytest.mark.parametrize("keep_alive", [0, "0", "0s"])
def test_ollama_stop_closes_a_model_and_loads_none(server: Server, keep_alive: Any) -> None:
    server.ask("a")
    n_opened = len(server.opened)
    other = server.post("/api/generate", model="b", keep_alive=keep_alive).json()
    assert (other["model"], other["response"], other["done"], other["done_reason"]) == ("b", "", True, "unload")
    assert server.loaded == ["a"]
    stopped = server.post("/api/chat", model="a:latest", messages=[], keep_alive=keep_alive).json()
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("", "unload")
    assert server.loaded == [] and len(server.opened) == n_opened
    assert server.post("/api/generate", model="d", keep_alive=keep_alive).status_code == 404


def test_what_only_reads_loads_no_model(server: Server) -> None:
    server.ask("a")
    n_opened = len(server.opened)
    shown = server.post("/api/show", model="b").json()
    assert (shown["model_info"], shown["details"], shown["capabilities"]) == ({}, {}, ["completion"])
    assert server.get("/slots?model=b") == [] and len(server.get("/slots")) == 4
    assert server.get("/props")["model_alias"] == "a" and "eos_token" in server.get("/tokenizer_info")
    loaded = server.post("/api/show", model="", name="a:latest").json()
    assert loaded["model_info"] and loaded["details"] and set(loaded) == set(shown)
    assert server.post("/api/show", model="d").status_code == 404
    assert server.loaded == ["a"] and len(server.opened) == n_opened


def test_a_request_without_a_model_waits_for_the_one_that_loads(server: Server) -> None:
    server.ask("a")
    n_opened = len(server.opened)
    server.may_open.clear()
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(server.ask, "b")
        eventually(lambda: server.opened[n_opened:] == ["b"])
        props = threads.submit(server.get, "/props")
        assert server.get("/slots") == []
        server.may_open.set()
        assert loading.result(20).status_code == 200 and props.result(20)["model_alias"] == "b"
    assert server.opened[n_opened:] == ["b"]
