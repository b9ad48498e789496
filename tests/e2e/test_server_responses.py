"""/v1/responses as OpenAI's own client sees it, and as Codex asks it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from hetero_ee import Engine
from tests.families import random_model, save_checkpoint
from tests.server_support import NAME, RunningServer, opened, serving
from tests.tool_templates import HERMES, THINKING

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Says how it will be.", "parameters": PLACE, "strict": True},
    {"type": "web_search"},
]
HOT: Any = {"model": NAME, "temperature": 1.5, "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def engine(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = random_model("llama", vocab_size=2048, max_position_embeddings=8192)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("models") / "long", tokenizer_from=demo)
    with opened(folder) as found:
        yield found


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with serving(engine, HERMES) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(messages=asked, max_tokens=12, **HOT)
    answer = client.responses.create(instructions="Be brief.", input="Hello", max_output_tokens=12, **HOT)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert answer.usage is not None and chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    same = client.responses.create(instructions="Be brief.", input=items, max_output_tokens=12, **HOT)
    assert same.output_text == answer.output_text


def test_a_response_streams_the_same(client: openai.OpenAI) -> None:
    asked: Any = HOT | {"input": "Hello", "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    kinds = [each.type for each in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == whole.output_text
    with client.responses.stream(**asked) as stream:  # which keeps a response of its own from what it is told
        snapshots = [each.snapshot for each in stream if each.type == "response.output_text.delta"]
    assert snapshots[-1] == text


def test_a_call_is_an_item(client: openai.OpenAI) -> None:
    asked: Any = HOT | {"input": "Rome?", "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (item,) = client.responses.create(**asked).output
    assert item.type == "function_call" and item.name == "weather" and item.status == "completed"
    jsonschema.validate(json.loads(item.arguments), PLACE)
    events = list(client.responses.create(stream=True, **asked))
    deltas = "".join(each.delta for each in events if each.type == "response.function_call_arguments.delta")
    (done,) = (each for each in events if each.type == "response.function_call_arguments.done")
    assert deltas == done.arguments == item.arguments and events[-1].type == "response.completed"
    assert events[-1].response.output[0].type == "function_call"


def test_thoughts_are_items_of_their_own(engine: Engine) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": PLACE, "strict": True}}
    with serving(engine, THINKING) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        asked: Any = HOT | {"input": "Rome?", "max_output_tokens": 20, "text": form}
        (item,) = client.responses.create(**asked).output
        assert item.type == "reasoning" and item.content and item.content[0].text
        events = list(client.responses.create(stream=True, **asked))
    text = "".join(each.delta for each in events if each.type == "response.reasoning_text.delta")
    assert text == item.content[0].text


def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": PLACE, "strict": True}}
    jsonschema.validate(json.loads(client.responses.create(input="Rome?", text=form, **HOT).output_text), PLACE)


def test_codex_is_answered(server: RunningServer) -> None:
    """As its source sends a turn after a tool's result: tools of other types, thoughts, fields unknown here."""
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>…"}]}
    body = {
        "model": "gpt-5-codex",
        "instructions": "You are Codex. " * 200,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only"}]},
            user,
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": '{"output": "a.py", "metadata": {}}'},
        ],
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs a shell command and returns its output.",
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "command": {"type": "array", "items": {"type": "string"}},
                        "timeout_ms": {"type": "number", "description": "The timeout in ms"},
                    },
                    "required": ["command"],
                    "additionalProperties": False,
                },
            },
            {"type": "local_shell"},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "a"},
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "max_output_tokens": 8,
    }
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[0] == "response.created" and names[-1] == "response.incomplete"


def test_what_is_said_again_may_hold_half_a_character(server: RunningServer) -> None:
    for is_stream in (False, True):
        body = {"input": "Hello", "metadata": {"a": "\ud800"}, "max_output_tokens": 2, "stream": is_stream}
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 200 and r'{"a": "\ud800"}' in answer.text, answer.text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
    ],
)
def test_what_is_not_offered_is_refused(server: RunningServer, changes: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/responses", {"input": "Hello"} | changes)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
