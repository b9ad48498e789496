"""The server as ollama's clients see it: by bodies that its Python client 0.6.3 sends, and what it reads of answers."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.chat_support import LINES
from tests.families import random_model, save_checkpoint
from tests.server_support import NAME, RunningServer, opened, serving
from tests.tool_templates import HERMES, MISTRAL, THINKING

HELLO: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "tools": []}
GREEDY: dict[str, Any] = {"options": {"num_predict": 12, "temperature": 0}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say how it will be.",
        "parameters": {
            "type": "object",
            "required": ["place"],
            "properties": {"place": {"type": "string", "description": "the place"}},
        },
    },
}
RESULT: list[dict[str, Any]] = [
    {"role": "user", "content": "How?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Rome"}}}]},
    {"role": "tool", "content": "Rain, xylophones.", "tool_name": "weather"},
]
FIGURES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def servers(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningServer]]:
    """By template."""
    model = random_model("llama", vocab_size=2048, max_position_embeddings=2048)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("models") / "long", tokenizer_from=demo)
    templates = {"lines": LINES, "thinking": THINKING, "hermes": HERMES, "mistral": MISTRAL, "none": ""}
    with opened(folder) as engine, ExitStack() as running:
        yield {name: running.enter_context(serving(engine, text or None)) for name, text in templates.items()}


@pytest.fixture(scope="module")
def server(servers: dict[str, RunningServer]) -> RunningServer:
    return servers["lines"]


def lines(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(each) for each in answer.text.splitlines()]


def whole(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body | {"stream": False})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_chat_says_what_generate_says_whole_and_streamed(server: RunningServer) -> None:
    ids = server.chat_ids(("user", "Hello"))
    said = server.engine.generate(ids, max_new_tokens=12, temperature=0)
    answer = whole(server, "/api/chat", HELLO | GREEDY)
    assert answer["message"] == {"role": "assistant", "content": said.text} and answer["model"] == NAME
    assert (answer["done"], answer["done_reason"]) == (True, "length")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (len(ids), 12)
    assert all(type(answer[name]) is int for name in FIGURES)
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] > 10_000
    assert datetime.fromisoformat(answer["created_at"]).tzinfo is not None
    for more in ({}, {"stream": True, "keep_alive": "5m", "think": False}):
        *pieces, last = lines(server, "/api/chat", HELLO | GREEDY | more)
        assert "".join(each["message"]["content"] for each in pieces) == said.text
        assert not any(each["done"] for each in pieces) and last["message"]["content"] == ""
        assert set(last) == set(answer) and last["eval_count"] == 12


def test_a_prompt_is_a_users_message_unless_it_is_raw(servers: dict[str, RunningServer]) -> None:
    server = servers["lines"]
    engine, asked = server.engine, {"model": NAME, "prompt": "Once upon a time"} | GREEDY
    ids = server.chat_ids(("system", "Be brief."), ("user", "Once upon a time"))
    said = engine.generate(ids, max_new_tokens=12, temperature=0).text
    *pieces, last = lines(server, "/api/generate", asked | {"system": "Be brief."})
    assert "".join(each["response"] for each in pieces) == said and last["done_reason"] == "length"
    raw = engine.generate("Once upon a time", max_new_tokens=12, temperature=0).text
    assert whole(server, "/api/generate", asked | {"raw": True})["response"] == raw
    served = servers["none"].served
    source, served.template = served.template, None  # a model without one
    try:
        assert whole(servers["none"], "/api/generate", asked)["response"] == raw
    finally:
        served.template = source


def test_what_loads_the_model_is_answered_at_once(server: RunningServer) -> None:
    loaded = server.post("/api/generate", {"model": NAME}).json()
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    loaded = server.post("/api/chat", {"model": NAME, "messages": []}).json()
    assert loaded["message"]["role"] == "assistant" and loaded["done_reason"] == "load"
    unloaded = server.post("/api/generate", {"model": "any", "keep_alive": 0}).json()  # though the only one stays
    assert (unloaded["model"], unloaded["response"], unloaded["done_reason"]) == (NAME, "", "unload")
    for more in ({"keep_alive": False}, {"keep_alive": "5m"}):
        assert server.post("/api/generate", {"model": NAME} | more).json()["done_reason"] == "load"
    said = whole(server, "/api/chat", HELLO | GREEDY | {"keep_alive": 0})
    assert said["done_reason"] == "length" and server.post("/api/generate", {"keep_alive": 0, "model": 5}).is_error


def test_a_format_is_kept(server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    hot = {"options": {"temperature": 1.5, "seed": 3}}
    answer = whole(server, "/api/chat", HELLO | hot | {"format": schema})
    jsonschema.validate(json.loads(answer["message"]["content"]), schema)
    assert answer["done_reason"] == "stop"
    for any_object in ("json", {}):
        raw = {"model": NAME, "prompt": "Once", "raw": True, "format": any_object, "options": {"num_predict": 3}}
        assert whole(server, "/api/generate", raw)["response"].startswith("{")


def test_calls_come_with_an_object_and_results_find_their_call(servers: dict[str, RunningServer]) -> None:
    server = servers["mistral"]  # whose template wants ids
    hot = {"model": NAME, "tools": [WEATHER], "options": {"temperature": 1.5, "seed": 3, "num_predict": 300}}
    assert whole(server, "/api/chat", hot | {"messages": RESULT, "options": {"num_predict": 2}})["done"]
    prompt = servers["hermes"].served
    seen, generation = list[list[int]](), prompt.generation

    def kept(ids: list[int], *rest: Any, **more: Any) -> Any:
        seen.append(ids)
        return generation(ids, *rest, **more)

    prompt.generation = kept  # type: ignore[method-assign]
    try:
        whole(servers["hermes"], "/api/chat", hot | {"messages": RESULT, "options": {"num_predict": 2}})
    finally:
        prompt.generation = generation  # type: ignore[method-assign]
    text = servers["hermes"].engine.tokenizer.decode(seen[0])
    assert "xylophones" in text and '{"place": "Rome"}' in text and "Say how it will be." in text


def test_a_call_is_one_line(servers: dict[str, RunningServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nonsense calls nothing by itself, so that it is made to."""
    from dataclasses import replace

    from hetero_ee.serving.protocols import ollama

    read = ollama.openai_tools
    monkeypatch.setattr(
        ollama, "openai_tools", lambda fields: replace(read(fields), is_required=True, is_parallel=False)
    )
    body = {"model": NAME, "messages": HELLO["messages"], "tools": [WEATHER], "options": {"temperature": 1, "seed": 5}}
    answer = whole(servers["hermes"], "/api/chat", body)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and isinstance(call["function"]["arguments"]["place"], str)
    *_, called, last = lines(servers["hermes"], "/api/chat", body)
    assert called["message"]["tool_calls"] == [call] and not called["done"] and last["done"]


def test_thoughts_are_told_apart(servers: dict[str, RunningServer]) -> None:
    body = HELLO | GREEDY
    told = whole(servers["thinking"], "/api/chat", body)["message"]
    assert told["thinking"] and not told["content"]
    *pieces, _ = lines(servers["thinking"], "/api/chat", body)
    assert "".join(each["message"].get("thinking", "") for each in pieces) == told["thinking"]
    assert "thinking" not in whole(servers["thinking"], "/api/chat", body | {"think": False})["message"]
    assert whole(servers["thinking"], "/api/generate", {"prompt": "Hello", "think": True} | GREEDY)["thinking"]


def test_clients_learn_what_there_is(servers: dict[str, RunningServer]) -> None:
    server = servers["thinking"]
    (model,) = server.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == NAME and model["size"] > 0 and len(model["digest"]) == 64
    assert model["details"]["family"] == "llama" and datetime.fromisoformat(model["modified_at"])
    assert server.get("/api/version").json()["version"].count(".") == 2
    shown = server.post("/api/show", {"model": NAME}).json()
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] == 2048 and shown["details"] == model["details"]
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert server.post("/api/show", {"name": NAME}).json() == shown
    assert servers["lines"].post("/api/show", {"model": NAME}).json()["capabilities"] == ["completion", "tools"]


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "options.mirostat": ("/api/chat", {"options": {"mirostat": 2}}),
    "num_predict": ("/api/chat", {"options": {"num_predict": 0}}),
    "messages[0].images": ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}),
    "suffix": ("/api/generate", {"prompt": "a", "suffix": "b"}),
    "think": ("/api/generate", {"prompt": "a", "think": 5}),
    "prompt": ("/api/generate", {"prompt": 5}),
    "format": ("/api/generate", {"prompt": "a", "format": {"type": "object", "not": {}}}),
    "format is 'xml'": ("/api/generate", {"prompt": "a", "format": "xml"}),
    "format is [": ("/api/generate", {"prompt": "a", "format": [1]}),
    "stream": ("/api/chat", {"messages": [], "stream": "x"}),
    "raw": ("/api/generate", {"raw": 5}),
    "model": ("/api/show", {"model": {}}),
    "name": ("/api/show", {"name": 5}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_can_not_do_is_refused_by_name_in_ollamas_words(server: RunningServer, name: str) -> None:
    path, fields = REFUSED[name]
    answer = server.post(path, HELLO | fields)
    assert answer.status_code == 400 and answer.json()["error"].startswith(name), answer.text


def test_an_error_in_a_stream_is_a_line(servers: dict[str, RunningServer], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = servers["lines"].engine

    def fails(*arguments: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(engine.executor, "run", fails)
    monkeypatch.setattr(engine.executor, "prompt", fails)
    assert "error" in lines(servers["lines"], "/api/chat", HELLO)[-1]
