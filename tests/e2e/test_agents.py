"""What coding agents are publicly known to send is answered: tools, long system prompts, fields of their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.families import random_model, save_checkpoint
from tests.server_support import RunningServer, opened, serving
from tests.tool_templates import HERMES

CACHED = {"type": "ephemeral"}
READ: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "file_path": {"type": "string", "description": "The absolute path to the file to read"},
        "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "description": "The number of lines to read"},
    },
    "required": ["file_path"],
    "additionalProperties": False,
}
FETCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "format": "uri"},
        "headers": {"type": "object", "propertyNames": {"type": "string"}},
        "todos": {
            "type": "array",
            "minItems": 1,
            "uniqueItems": True,
            "items": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "required": ["url"],
}  # fmt: skip
CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 32,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "system": [
        {"type": "text", "text": "You are Claude Code, a command line tool.", "cache_control": CACHED},
        {"type": "text", "text": "Be concise. Use tools. " * 300, "cache_control": CACHED | {"ttl": "1h"}},
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file. " * 40, "input_schema": READ},
        {"name": "WebFetch", "description": "Fetches a page.", "input_schema": FETCH, "cache_control": CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
                {"type": "text", "text": "What is in a.py?", "cache_control": CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should read it.", "signature": "Ep0C"},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "/b.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1\tprint('a')"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "File does not exist."}],
                    "cache_control": CACHED,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}
BETA = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
# aider asks for text alone; its edits are text, too.
AIDER: dict[str, Any] = {
    "model": "openai/any",
    "messages": [
        {"role": "system", "content": "Act as an expert software developer. " * 100},
        {"role": "user", "content": "I have *added these files to the chat*: a.py"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        {"role": "user", "content": "Add a docstring."},
        {"role": "system", "content": "Reply with SEARCH/REPLACE blocks."},
    ],
    "temperature": 0,
    "stream": True,
    "max_tokens": 8,
}
CLINE: dict[str, Any] = {
    "model": "any",
    "messages": [
        {"role": "system", "content": "You are Cline, a highly skilled software engineer. " * 200},
        {"role": "user", "content": [{"type": "text", "text": "<task>\nFix it\n</task>"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "read_file", "arguments": '{"file_path": "a.py"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "print('a')"}]},
    ],
    "tools": [
        {"type": "function", "function": {"name": "read_file", "strict": False, "parameters": READ}},
        {"type": "function", "function": {"name": "web_fetch", "parameters": FETCH}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = random_model("llama", vocab_size=2048, max_position_embeddings=16384)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("models") / "long", tokenizer_from=demo)
    with opened(folder) as engine, serving(engine, HERMES) as running:
        yield running


def test_claude_code_is_answered(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="dummy", max_retries=0)
    answer = server.post("/v1/messages?beta=true", CLAUDE_CODE, headers=BETA | {"x-api-key": "dummy"})
    assert answer.status_code == 200, answer.text
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[0] == "message_start" and names[-1] == "message_stop"
    asked = {name: CLAUDE_CODE[name] for name in ("model", "messages", "tools", "system")}
    counted = client.messages.count_tokens(**asked)
    started = json.loads(answer.text.splitlines()[1].removeprefix("data: "))["message"]["usage"]
    assert counted.input_tokens == started["input_tokens"] + started["cache_read_input_tokens"]


def test_its_tools_can_be_wanted(server: RunningServer) -> None:
    """Though a text can't be held to all that their schemas say."""
    for name in ("Read", "WebFetch"):
        wanted = {"stream": False, "tool_choice": {"type": "tool", "name": name}, "max_tokens": 40}
        (block,) = server.post("/v1/messages", CLAUDE_CODE | wanted).json()["content"]
        assert block["type"] == "tool_use" and block["name"] == name


@pytest.mark.parametrize("body", [AIDER, CLINE], ids=["aider", "cline"])
@pytest.mark.sample(1)
def test_agents_with_openais_client_are_answered(server: RunningServer, body: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="dummy", max_retries=0)
    chunks = list(client.chat.completions.create(**body))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"


def test_the_next_turn_goes_on_from_what_is_cached(server: RunningServer) -> None:
    server.post("/v1/messages", CLAUDE_CODE | {"stream": False})
    again = server.post("/v1/messages", CLAUDE_CODE | {"stream": False}).json()["usage"]
    assert again["cache_read_input_tokens"] > 10 * again["input_tokens"]
