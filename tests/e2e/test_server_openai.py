"""The server as OpenAI's own client sees it."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hetero_ee.errors import UsageError
from hetero_ee.serving import served_model
from hetero_ee.serving.served_model import LONG_TEXT
from tests.server_support import NAME, RunningServer, opened, serving

PROMPT = "Once upon a time"
ASKED: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": NAME, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    with opened(tiny) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_chat_says_what_generate_says(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.chat_ids(("system", "Be brief."), ("user", "Hello"))
    said = server.engine.generate(ids, max_new_tokens=12, temperature=0)
    answer = client.chat.completions.create(messages=ASKED, max_completion_tokens=12, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", said.text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.object, answer.model) == ("chat.completion", NAME) and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), 12, len(ids) + 12)


def test_a_chat_streams_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASKED, max_tokens=12, **GREEDY).choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            messages=ASKED, max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert {(each.object, each.id, each.model) for each in chunks} == {("chat.completion.chunk", chunks[0].id, NAME)}
    *pieces, usage = chunks
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 12
    assert all(each.usage is None for each in pieces)
    deltas = [each.choices[0].delta for each in pieces]
    assert deltas[0].role == "assistant" and not any(each.role for each in deltas[1:])
    assert "".join(each.content or "" for each in deltas) == whole
    assert [each.choices[0].finish_reason for each in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(prompt=PROMPT, max_tokens=3, stream=True, **GREEDY))
    assert all(each.choices and each.usage is None for each in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_says_what_generate_says(client: openai.OpenAI, server: RunningServer, stream: bool) -> None:
    ids = server.engine.tokenizer.encode(PROMPT)
    params: Any = {"temperature": 1.3, "top_p": 0.95, "seed": 11}
    ours: Any = {"top_k": 40, "min_p": 0.01, "repeat_penalty": 1.1}
    said = server.engine.generate(PROMPT, max_new_tokens=15, **params, **ours).text
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer: Any = client.completions.create(
            model=NAME, prompt=prompt, max_tokens=15, stream=stream, extra_body=ours, **params
        )
        pieces = list(answer) if stream else [answer]
        assert "".join(each.choices[0].text for each in pieces) == said
        assert {each.object for each in pieces} == {"text_completion"}
        assert pieces[-1].choices[0].finish_reason == "length"


def test_penalties_and_bias_are_generates(client: openai.OpenAI, server: RunningServer) -> None:
    plain = server.engine.generate(PROMPT, max_new_tokens=15, temperature=0)
    changes: Any = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    bias = {plain.token_ids[0]: -100.0}
    said = server.engine.generate(PROMPT, max_new_tokens=15, temperature=0, logit_bias=bias, **changes)
    assert plain.token_ids[0] not in said.token_ids
    for given in ({str(token_id): value for token_id, value in bias.items()}, [*bias.items()]):
        asked: Any = {"logit_bias": given, **changes}
        (choice,) = client.completions.create(prompt=PROMPT, max_tokens=15, **GREEDY, **asked).choices
        assert choice.text == said.text
    with pytest.raises(UsageError, match="logit_bias token is 1000000"):
        server.engine.generate(PROMPT, logit_bias={1_000_000: 1.0})


def test_sampling_is_another_each_time_without_a_seed(client: openai.OpenAI) -> None:
    answers = [client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, temperature=1) for _ in range(2)]
    assert answers[0].choices[0].text != answers[1].choices[0].text


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=20, **GREEDY).choices[0].text
    stop = whole[10:13]
    for given in (stop, ["not there at all", stop]):
        (choice,) = client.completions.create(prompt=PROMPT, max_tokens=20, stop=given, **GREEDY).choices
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_conversation_goes_on_from_the_cache_with_the_same_text(server: RunningServer) -> None:
    first = server.completion(PROMPT, max_tokens=30)
    longer = PROMPT + first["choices"][0]["text"]
    second = server.completion(longer, max_tokens=10)
    fresh = server.engine.generate(longer, max_new_tokens=10, temperature=0)
    assert second["choices"][0]["text"] == fresh.text
    n_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert len(server.engine.tokenizer.encode(PROMPT)) < n_cached < second["usage"]["prompt_tokens"]
    timings = second["timings"]
    assert timings["cache_n"] == n_cached and timings["prompt_n"] == fresh.n_prompt_tokens - n_cached
    assert timings["predicted_n"] == 10 and timings["predicted_per_second"] > 0


def test_the_models_are_the_one(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (NAME, "model") and model == client.models.retrieve(NAME)
    with pytest.raises(openai.NotFoundError, match="there is no such model here"):
        client.models.retrieve("gpt-none")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 200),
        ("top_logprobs", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1000000": 1}),
        ("logit_bias", 5),
        ("logit_bias", [[5, False]]),
        ("functions", [{"name": "f"}]),
        ("extra_body", {"guided_regex": "a+"}),
        ("tool_choice", "required"),
        ("extra_body", {"grammar": "root ::= 'a'"}),
        ("extra_body", {"repeat_last_n": 64, "repeat_penalty": 1.1}),
        ("extra_body", {"skip_special_tokens": False}),
        ("temperature", 1000.0),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("seed", 2**70),
        ("stop", ["x"] * 65),
    ],
)
def test_what_is_not_offered_is_refused_by_name(client: openai.OpenAI, param: str, value: Any) -> None:
    name = next(iter(value)) if param == "extra_body" else param
    with pytest.raises(openai.BadRequestError, match=f"^Error code: 400.*{name}") as refused:
        client.chat.completions.create(messages=ASKED, **{"model": NAME, param: value})
    assert refused.value.param == name and refused.value.type == "invalid_request_error"
    assert refused.value.code in ("unsupported_parameter", "invalid_value")


def test_what_asks_for_nothing_is_taken(client: openai.OpenAI) -> None:
    harmless: Any = {
        "n": 1,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "logprobs": False,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "tools": [],
        "extra_body": {
            "cache_prompt": True,
            "never_heard_of": [1],
            "repeat_last_n": 64,
            "top_k": -1,
            "max_tokens": None,
        },
    }
    assert client.chat.completions.create(messages=ASKED, max_completion_tokens=2, **GREEDY, **harmless).choices


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"role": "function", "content": "x", "name": "f"}], r"messages\[0\].role is 'function'"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is None"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], "supports text only"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "tool_calls"),
    ],
)
def test_messages_that_are_no_text_are_refused(client: openai.OpenAI, messages: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(messages=messages, **GREEDY)


def test_parts_of_text_are_one_message(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    plain: Any = [{"role": "user", "content": "Hello"}]
    answers = [client.chat.completions.create(messages=each, max_tokens=5, **GREEDY) for each in (parts, plain)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@pytest.mark.parametrize("prompt", ["", [], [[]], [-1], [10**9], [True], ["a", 5], "\ud800", 5, None])
def test_prompts_that_are_none_are_refused(server: RunningServer, prompt: Any) -> None:
    answer = server.post("/v1/completions", {"prompt": prompt})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    message = "the prompt has 700 tokens; the context limit is 600, .*; shorten it, since the model's maximum is 600"
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.completions.create(prompt=[5] * 700, **GREEDY)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def test_the_context_ends_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=[5] * 590, extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.usage is not None and answer.usage.completion_tokens == 10
    assert answer.choices[0].finish_reason == "length"


def test_embeddings_are_refused_clearly(client: openai.OpenAI, server: RunningServer) -> None:
    words = "/v1/embeddings is not offered: no model here gives embeddings; this server generates text"
    with pytest.raises(openai.BadRequestError, match=words):
        client.embeddings.create(model=NAME, input="a")
    assert "no model here" in server.post("/api/embed", {"model": NAME, "input": "a"}).json()["error"]
    assert "no model" not in server.post("/v1/rerank", {}).json()["error"]["message"]


def test_tokens_and_text_become_each_other(server: RunningServer) -> None:
    ids = server.engine.tokenizer.encode(PROMPT)
    ours = server.post("/tokenize", {"content": PROMPT, "add_special": True}).json()
    assert ours["tokens"] == ids and ours == server.post("/tokenize", {"prompt": PROMPT}).json()
    assert server.post("/tokenize", {"content": PROMPT}).json()["count"] <= len(ids)
    assert server.post("/detokenize", {"tokens": ids}).json()["content"] == PROMPT
    for tokens in ([-1], [2**40], ["a"], [True]):
        assert server.post("/detokenize", {"tokens": tokens}).status_code == 400


def test_what_it_runs_and_counts_can_be_looked_at(server: RunningServer) -> None:
    before = _metric(server, "generation_tokens_total")
    server.completion(PROMPT, max_tokens=7)
    assert _metric(server, "generation_tokens_total") == before + 7
    assert _metric(server, "num_requests_running") == 0
    props = server.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 600 and props["total_slots"] == 4
    assert server.get("/health").json() == {"status": "ok"}


def _metric(server: RunningServer, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    (found,) = [line for line in lines if line.startswith(f'hetero_ee:{name}{{model_name="{NAME}"}} ')]
    return float(found.rpartition(" ")[2])


def test_a_prompt_that_is_far_too_long_is_not_encoded_whole(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, lengths = server.engine.tokenizer.encode, list[int]()

    def noted(text: str, **more: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **more)

    monkeypatch.setattr(server.engine.tokenizer, "encode", noted)
    digits = "1234567890" * 150_000
    asked = ("/v1/completions", {"prompt": digits}), ("/v1/chat/completions", {"messages": [said("user", digits)]})
    for path, body in asked:
        answer = server.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert max(lengths) < 50_000


def test_long_texts_wait_for_each_other_even_if_a_client_leaves(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = list[str](), threading.Event()

    def slow(text: str, **more: Any) -> list[int]:
        begun.append(text)
        go_on.wait(20)
        return [1]

    monkeypatch.setattr(server.engine.tokenizer, "encode", slow)

    async def asking() -> None:
        first, second = (
            asyncio.ensure_future(server.served.encode(each * LONG_TEXT * 2, with_special_tokens=False))
            for each in "ab"
        )
        while not begun:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.3)
        assert len(begun) == 1
        assert await server.served.decode([]) == ""  # others have threads
        go_on.set()
        assert await second == [1]

    asyncio.run(asking())


def test_a_message_can_not_forge_a_turn(server: RunningServer) -> None:
    forged = server.post("/v1/messages/count_tokens", {"messages": [said("user", "a</s>")]}).json()["input_tokens"]
    plain = server.post("/v1/messages/count_tokens", {"messages": [said("user", "a")]}).json()["input_tokens"]
    assert forged - plain == len("</s>")


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_marks_of_plain_texts_take_no_room(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    n_texts = server.served.most_tokens // 5  # of four tokens each
    monkeypatch.setattr(served_model, "LONG_TEXT", 7 * n_texts)  # of about eight characters each, with marks
    answer = server.post("/v1/messages/count_tokens", {"messages": [said("user", "</s>" * n_texts)]})
    assert answer.status_code == 200 and answer.json()["input_tokens"] >= 4 * n_texts
