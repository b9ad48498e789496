"""The server as Anthropic's own client sees it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.server_support import NAME, RunningServer, opened, serving

GREEDY: Any = {"temperature": 0}  # which the client no longer knows
ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "extra_body": GREEDY}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine, api_key="a key") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="a key", max_retries=0) as found:
        yield found


def test_a_message_says_what_generate_says(client: anthropic.Anthropic, server: RunningServer) -> None:
    ids = server.chat_ids(("system", "Be brief."), ("user", "Hello"))
    said = server.engine.generate(ids, max_new_tokens=12, temperature=0)
    system: Any = [{"type": "text", "text": "Be brief."}]
    answer = client.messages.create(system=system, max_tokens=12, **ASKED)
    (block,) = answer.content
    assert block.type == "text" and block.text == said.text
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", NAME, "max_tokens")
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(ids) and usage.output_tokens == 12
    assert client.messages.count_tokens(model=NAME, system=system, messages=ASKED["messages"]).input_tokens == len(ids)


def test_a_message_streams_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(max_tokens=12, **ASKED)
    with client.messages.stream(max_tokens=12, **ASKED) as stream:
        kinds = [each.type for each in stream]
        final = stream.get_final_message()
    said: Any = whole.content[0]
    assert [each.text for each in final.content] == [said.text]
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12
    ours = [kind for kind in kinds if kind not in ("text", "content_block_delta")]
    start, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert ours == start + end and "content_block_delta" in kinds


def test_a_full_context_is_a_reason_of_its_own(client: anthropic.Anthropic, server: RunningServer) -> None:
    words = server.engine.tokenizer.decode([500] * 550)
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": words}], "extra_body": GREEDY}
    assert client.messages.create(max_tokens=599, **asked).stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_is_named(client: anthropic.Anthropic, stream: bool) -> None:
    whole: Any = client.messages.create(max_tokens=20, **ASKED).content[0]
    stop = whole.text[10:13]
    asked = ASKED | {"max_tokens": 20, "stop_sequences": ["not there", stop]}
    if stream:
        with client.messages.stream(**asked) as events:
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == whole.text[: whole.text.index(stop)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_body": {"mcp_servers": [{"name": "f"}]}}, "mcp_servers is"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages ends with"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "supports text and tools only",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_sequences": [""]}, "stop_sequences holds ''"),
        ({"extra_body": {"temperature": -1.0}}, "temperature is -1"),
    ],
)
def test_what_is_not_offered_is_refused(client: anthropic.Anthropic, changes: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        client.messages.create(**{"max_tokens": 5} | ASKED | changes)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_a_wrong_key_is_said_in_its_own_shape(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="another", max_retries=0)
    with client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(max_tokens=5, **ASKED)
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"
