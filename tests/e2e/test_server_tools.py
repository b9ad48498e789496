"""Tools, thoughts and forms of answers, as OpenAI's and Anthropic's own clients see them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from hetero_ee import Engine
from tests.chat_support import LINES
from tests.families import random_model, save_checkpoint
from tests.server_support import NAME, RunningServer, opened, serving
from tests.tool_templates import TEMPLATES, THINKING

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Says how it will be.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock", "parameters": CLOCK}},
    {"type": "web_search", "filters": {}},
]
THEIRS: Any = [
    {"name": "weather", "description": "Says how it will be.", "input_schema": PLACE},
    {"name": "clock", "input_schema": CLOCK},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
]
ASKED: Any = [{"role": "user", "content": "How will it be in Rome?"}]
HOT: Any = {"model": NAME, "temperature": 1.5, "seed": 5}


@pytest.fixture(scope="module")
def engine(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Nonsense, with room for what agents send."""
    model = random_model("llama", vocab_size=2048, max_position_embeddings=16384)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("models") / "long", tokenizer_from=demo)
    with opened(folder) as found:
        yield found


@pytest.fixture(scope="module")
def servers(engine: Engine) -> Iterator[dict[str, RunningServer]]:
    """By template."""
    templates = {"lines": LINES, "thinking": THINKING, **TEMPLATES}
    with ExitStack() as running:
        yield {name: running.enter_context(serving(engine, text)) for name, text in templates.items()}


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def their_client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def check_call(name: str, arguments: Any) -> None:
    jsonschema.validate(arguments, {"weather": PLACE, "clock": CLOCK}[name])


@pytest.mark.parametrize("template", ["lines", *TEMPLATES])
def test_a_required_call_comes_whole_and_streamed(servers: dict[str, RunningServer], template: str) -> None:
    asked: Any = HOT | {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    chats = client(servers[template]).chat.completions
    answer = chats.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.id
    check_call(call.function.name, json.loads(call.function.arguments))
    chunks = list(chats.create(stream=True, **asked))
    deltas = [delta for each in chunks for delta in each.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].type == "function" and not any(each.id for each in deltas[1:])
    assert {each.index for each in deltas} == {0} and chunks[-1].choices[0].finish_reason == "tool_calls"
    functions = [each.function for each in deltas if each.function]
    assert functions[0].name == call.function.name
    assert "".join(each.arguments or "" for each in functions) == call.function.arguments


def test_a_named_tool_is_called_once(servers: dict[str, RunningServer]) -> None:
    """Without a limit of tokens, as clients that read one call send it."""
    for seed in range(3):
        named: Any = {"type": "function", "function": {"name": "clock"}}
        asked: Any = HOT | {"messages": ASKED, "tools": TOOLS, "tool_choice": named, "seed": seed}
        (choice,) = client(servers["lines"]).chat.completions.create(**asked).choices
        assert [each.function.name for each in choice.message.tool_calls or []] == ["clock"]
        assert choice.finish_reason == "tool_calls"
    theirs: Any = {"model": NAME, "messages": ASKED, "tools": THEIRS, "max_tokens": 200}
    answer = their_client(servers["hermes"]).messages.create(tool_choice={"type": "tool", "name": "clock"}, **theirs)
    assert [each.type for each in answer.content] == ["tool_use"] and answer.stop_reason == "tool_use"


@pytest.mark.parametrize("template", ["lines", "mistral"])
def test_a_required_call_is_not_repeated(servers: dict[str, RunningServer], template: str) -> None:
    """Every second call of a tool without arguments is a repetition, at which the reply ends."""
    tools = [each for each in TOOLS if each.get("function", {}).get("name") == "clock"]
    asked: Any = HOT | {"messages": ASKED, "tools": tools, "tool_choice": "required", "max_tokens": 600}
    chats, n_repeated = client(servers[template]).chat.completions, 0
    for seed in range(4):
        answer = chats.create(**asked | {"seed": seed})
        chunks = list(chats.create(stream=True, **asked | {"seed": seed}))
        deltas = [delta for each in chunks for delta in each.choices[0].delta.tool_calls or []]
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.arguments == "{}" == "".join(each.function.arguments or "" for each in deltas)  # type: ignore[union-attr]
        assert {each.index for each in deltas} == {0}
        assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
        n_repeated += answer.usage.completion_tokens > 40  # type: ignore[union-attr]
    assert n_repeated  # or nothing was tested


def test_an_effort_is_passed_on_or_ignored(servers: dict[str, RunningServer]) -> None:
    asked: Any = HOT | {"messages": ASKED, "max_tokens": 8}
    for effort, thinks in (("high", True), ("none", False)):
        chat = client(servers["thinking"]).chat.completions.create(reasoning_effort=effort, **asked)  # type: ignore[call-overload]
        assert bool((chat.choices[0].message.model_extra or {}).get("reasoning_content")) == thinks
        body = {"input": "Hello", "max_output_tokens": 8, "reasoning": {"effort": effort}}
        response = servers["thinking"].post("/v1/responses", body).json()
        assert response["output"][0]["type"] == ("reasoning" if thinks else "message")
        assert response["reasoning"]["effort"] == effort
    plain = [
        client(servers["lines"]).chat.completions.create(**asked, **more) for more in ({}, {"reasoning_effort": "low"})
    ]
    assert plain[0].choices[0].message.content == plain[1].choices[0].message.content


def test_a_reply_that_may_call_says_something_else(servers: dict[str, RunningServer]) -> None:
    asked: Any = HOT | {"messages": ASKED, "max_tokens": 20}
    with client(servers["hermes"]) as openais:
        for choice in ("auto", "none"):
            answer = openais.chat.completions.create(tools=TOOLS, tool_choice=choice, **asked)
            message = answer.choices[0].message
            assert message.content and not message.tool_calls and answer.choices[0].finish_reason == "length"
        free = openais.chat.completions.create(**asked).choices[0].message.content
        assert openais.chat.completions.create(tools=[], **asked).choices[0].message.content == free
        assert message.content == free  # of none


@pytest.mark.parametrize("template", ["lines", "hermes", "mistral", "harmony"])
def test_results_of_calls_are_in_the_next_prompt(servers: dict[str, RunningServer], template: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    said: Any = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain, xylophones."},
    ]
    server, prompts = servers[template], list[list[int]]()
    generation = server.served.generation

    def kept(ids: list[int], *rest: Any, **more: Any) -> Any:
        prompts.append(ids)
        return generation(ids, *rest, **more)

    server.served.generation = kept  # type: ignore[method-assign]
    try:
        client(server).chat.completions.create(messages=said, tools=TOOLS, max_tokens=2, **HOT)
        theirs: Any = [
            *ASKED,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {"place": "Rome"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Rain, xylophones."}]},
        ]
        their_client(server).messages.create(model=NAME, messages=theirs, tools=THEIRS, max_tokens=2)
    finally:
        server.served.generation = generation  # type: ignore[method-assign]
    texts = [server.engine.tokenizer.decode(ids) for ids in prompts]
    for text in texts:
        assert "xylophones" in text and '{"place": "Rome"}' in text and "Says how it will be." in text
    assert texts[0] == texts[1] or template == "mistral"  # whose ids are in the prompt


@pytest.mark.parametrize("template", ["lines", *TEMPLATES])
def test_anthropics_client_sees_calls(servers: dict[str, RunningServer], template: str) -> None:
    messages = their_client(servers[template]).messages
    asked: Any = {"model": NAME, "messages": ASKED, "tools": THEIRS, "max_tokens": 200}
    asked |= {
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"seed": 5, "temperature": 1.0},
    }
    answer = messages.create(**asked)
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.type == "tool_use"
    check_call(block.name, block.input)
    with messages.stream(**asked) as stream:
        kinds = [each.type for each in stream]
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "tool_use" and streamed.content[0].type == "tool_use"
    assert (streamed.content[0].name, streamed.content[0].input) == (block.name, block.input)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "input_json" in kinds


def test_thoughts_are_told_apart(servers: dict[str, RunningServer]) -> None:
    """The prompt begins them; nonsense doesn't end them, but a schema wants them ended."""
    server = servers["thinking"]
    asked: Any = HOT | {"messages": ASKED, "max_tokens": 30}
    message = client(server).chat.completions.create(**asked).choices[0].message
    assert message.content == "" and message.model_extra and message.model_extra["reasoning_content"]
    chunks = list(client(server).chat.completions.create(stream=True, **asked))
    thought = "".join((each.choices[0].delta.model_extra or {}).get("reasoning_content", "") for each in chunks)
    assert thought == message.model_extra["reasoning_content"]
    plain: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    assert client(server).chat.completions.create(extra_body=plain, **asked).choices[0].message.content
    theirs = their_client(server).messages.create(model=NAME, messages=ASKED, max_tokens=30)
    assert [each.type for each in theirs.content] == ["thinking"]
    off: Any = {"type": "disabled"}
    told = their_client(server).messages.create(model=NAME, messages=ASKED, max_tokens=30, thinking=off)
    assert [each.type for each in told.content] == ["text"]


FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": PLACE}}
    },
    "an object and its schema": {"response_format": {"type": "json_object", "schema": PLACE}},
    "llama-server's": {"json_schema": PLACE},
    "vLLM's": {"guided_json": json.dumps(PLACE)},
    "a grammar": {"grammar": 'root ::= "{\\"place\\": \\"Rome\\", \\"days\\": " [1-9] "}"'},
    "vLLM's grammar": {"guided_grammar": 'start: "{\\"place\\": \\"Rome\\", \\"days\\": " /[1-9]/ "}"'},
    "a choice": {"guided_choice": ['{"place": "Rome", "days": 1}', '{"place": "Oslo", "days": 2}']},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_answers_have_the_form_that_was_asked_for(servers: dict[str, RunningServer], name: str, path: str) -> None:
    what: Any = {"messages": ASKED} if path.startswith("chat") else {"prompt": "Rome:"}
    answer = servers["lines"].post(f"/v1/{path}", HOT | what | FORMS[name])
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"] if "message" in choice else choice["text"]), PLACE)
    assert choice["finish_reason"] == "stop"


def test_any_object_will_do(servers: dict[str, RunningServer]) -> None:
    answer = servers["lines"].post(
        "/v1/chat/completions", HOT | {"messages": ASKED, "response_format": {"type": "json_object"}, "max_tokens": 5}
    )
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


def test_anthropics_answers_have_a_form_too(servers: dict[str, RunningServer]) -> None:
    form = {"format": {"type": "json_schema", "schema": PLACE}}
    body = {"model": NAME, "messages": ASKED, "max_tokens": 99, "temperature": 1, "output_config": form}
    answer = servers["lines"].post("/v1/messages", body).json()
    jsonschema.validate(json.loads(answer["content"][0]["text"]), PLACE)


NEGATION: dict[str, Any] = {"type": "object", "not": {}}
STRICT = {"type": "function", "function": {"name": "x", "strict": True, "parameters": NEGATION}}
NO_SUCH = {"type": "function", "function": {"name": "x"}}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a negation": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": NEGATION}}},
        "response_format",
        "asks for not",
    ),
    "a bad grammar": ({"grammar": "root ::= ("}, "grammar", "can't be"),
    "two forms": ({"grammar": "start: /a/", "json_schema": PLACE}, "grammar", "combined with json_schema"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    "another form": ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    "no such tool": ({"tools": TOOLS, "tool_choice": NO_SUCH}, "tool_choice", "not among the tools"),
    "no tool at all": ({"tool_choice": "required"}, "tool_choice", "no tool"),
    "a strict tool": ({"tools": [STRICT]}, "tools", "asks for not"),
    "a tool without a name": (
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
        "missing",
    ),
    "too many tools": (
        {"tools": [NO_SUCH] * 513, "tool_choice": NO_SUCH},
        "tools",
        "holds 513 tools",
    ),
    "another choice": ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "maybe"),
    "a schema that is no JSON": ({"json_schema": "{"}, "json_schema", "not JSON"),
    "a schema that is no object": ({"tools": TOOLS, "json_schema": "[1]"}, "json_schema", "an object"),
    "a schema nested too deep": ({"tools": TOOLS, "json_schema": '{"a":' * 9999}, "json_schema", "not JSON"),
    "a grammar and tools": ({"tools": TOOLS, "grammar": "start: /a/"}, "grammar", "and tools are both given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_done_is_refused_by_name(servers: dict[str, RunningServer], case: str) -> None:
    fields, param, message = REFUSED[case]
    answer = servers["lines"].post("/v1/chat/completions", HOT | {"messages": ASKED, "max_tokens": 5} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error
