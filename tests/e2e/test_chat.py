"""Conversations: every turn is what a fresh run over the whole text would be, and computes only what is new."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, HeteroError, ModelError, UsageError
from hetero_ee.decoding.channels import CHANNEL, MESSAGE, START
from hetero_ee.decoding.conversation import Conversation, Reply
from hetero_ee.decoding.result import FinishReason, GeneratedToken
from hetero_ee.text.chat_template import Message
from tests.chat_support import CHATML, GEMMA, LINES, LLAMA_2, text_of
from tests.families import random_model, save_checkpoint

GREEDY: dict[str, Any] = {"max_new_tokens": 20}
SAMPLED: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.95, "repeat_penalty": 1.1, "seed": 5}
LONG = "Once upon a time there was a little girl who had a red ball, and " * 6


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as opened:
        yield opened


@pytest.fixture
def chat(engine: Engine) -> Iterator[Conversation]:
    """A conversation of short greedy replies."""
    with engine.chat(chat_template=LINES, max_new_tokens=8) as opened:
        yield opened


def rows_of_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the number of rows of every pass from here on."""
    executor = engine.executor
    real, passes = executor.hidden, list[int]()

    def hidden(rows: Any) -> Any:
        passes.append(len(rows))
        return real(rows)

    monkeypatch.setattr(executor, "hidden", hidden)
    return passes


def kv_bytes(engine: Engine) -> int:
    return engine.executor.cache.n_bytes


def said(chat: Conversation) -> list[str]:
    return [message.content for message in chat.messages]


# Turns.


def test_only_the_answer_of_a_reply_with_channels_is_kept(chat: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    markers = {1: CHANNEL, 2: MESSAGE, 3: START}
    texts = ["", "analysis", "", "Hm.", "", "assistant", "", "final", "", "Yes."]
    ids = [1, 9, 2, 9, 3, 9, 1, 9, 2, 9]
    made = [GeneratedToken(text, each, 0, 0, None, 0.0) for text, each in zip(texts, ids, strict=True)]
    monkeypatch.setattr("hetero_ee.decoding.conversation.channel_ids", lambda tokenizer: markers)
    monkeypatch.setattr(chat, "_generate", lambda continuation, params: iter(made))
    assert "".join(token.text for token in chat.send("Well?")) == "<think>Hm.</think>\nYes."
    assert said(chat) == ["Well?", "Yes."]


@pytest.mark.few(6)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("model", "quantizer"),
    [("tiny", "none"), ("tiny", "rtn"), ("demo", "none"), ("demo", "codebook"), ("stories260k", "none")],
)
@pytest.mark.sample(1)
def test_a_turn_computes_its_new_tokens_alone_and_says_what_a_fresh_run_says(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    quantizer: str,
    sampling: dict[str, Any],
) -> None:
    folder = request.getfixturevalue(model)
    with (
        Engine.from_pretrained(folder, quantizer=quantizer, threads=1) as engine,
        Engine.from_pretrained(folder, quantizer=quantizer, threads=1) as fresh,
        engine.chat("A story.", chat_template=LINES, **sampling) as chat,
    ):
        passes = rows_of_passes(engine, monkeypatch)
        n_cached = []
        for text in (LONG, "And then?", "Who was it?"):
            asked = [*chat.messages, Message("user", text)]
            passes.clear()
            reply = chat.send(text)
            assert passes == []  # nothing before the first token is asked for
            result = reply.finish()
            whole = fresh.generate(text_of(asked), **sampling)
            assert (result.token_ids, result.text) == (whole.token_ids, whole.text)
            assert (result.n_prompt_tokens, result.finish_reason) == (whole.n_prompt_tokens, whole.finish_reason)
            assert chat.messages == (*asked, Message("assistant", result.text))
            assert sum(passes) == result.n_prefilled_tokens + result.n_generated_tokens - 1
            assert (reply.n_prefilled_tokens, reply.n_cached_tokens) == (
                result.n_prefilled_tokens,
                result.n_prompt_tokens - result.n_prefilled_tokens,
            )
            assert chat.n_cached_tokens == sum(passes) + reply.n_cached_tokens
            n_cached.append(reply.n_cached_tokens)
        assert n_cached[0] == 0 and n_cached[2] > n_cached[1] > 60  # what LONG takes at least


def test_a_model_with_a_sliding_window_keeps_its_conversation(demo: Path, tmp_path: Path) -> None:
    model = random_model("mistral", vocab_size=2048, max_position_embeddings=600)
    folder = save_checkpoint(model, tmp_path / "mistral", tokenizer_from=demo)
    with (
        Engine.from_pretrained(folder, quantizer="none", threads=1) as engine,
        engine.chat(chat_template=LINES, max_new_tokens=12) as chat,
    ):
        for text in (LONG, "And then?"):
            asked = [*chat.messages, Message("user", text)]
            reply = chat.send(text)
            assert reply.finish().token_ids == engine.generate(text_of(asked), max_new_tokens=12).token_ids
        assert reply.n_cached_tokens > 60


def test_the_ids_are_those_of_transformers(engine: Engine, tiny: Path) -> None:
    """The template writes every special token; none is added."""
    import transformers

    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tiny)
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi <s é"}]
    for template in (LINES, CHATML, LLAMA_2):
        ids = reference.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        with engine.chat("Short.", chat_template=template, max_new_tokens=2) as chat:
            reply = chat.send("Hi <s é")
            reply.finish()
            assert reply.n_prompt_tokens == len(ids) and chat._cached_ids[: len(ids)] == ids


def test_tokens_come_one_by_one_and_the_reply_knows_what_it_amounts_to(chat: Conversation) -> None:
    reply = chat.send("Hi")
    assert reply.result is None and chat.messages == ()
    tokens = []
    for token in reply:
        tokens.append(token)
        assert reply.result is not None and reply.result.text == "".join(token.text for token in tokens)
        assert said(chat) == ["Hi", reply.result.text]
    assert [token.finish_reason for token in tokens] == [None] * 7 + [FinishReason.LENGTH]
    assert reply.finish() == reply.result


def test_messages_in_one_call_give_the_reply_of_a_conversation(engine: Engine) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, Message("user", "Hello")]
    with engine.chat("Be brief.", chat_template=LINES, **GREEDY) as chat:
        first = chat.send("Hello").finish()
        second = chat.send("Why?").finish()
    assert engine.chat(messages, chat_template=LINES, **GREEDY).token_ids == first.token_ids
    longer = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    assert str(engine.chat(longer, GREEDY, chat_template=LINES)) == second.text
    assert kv_bytes(engine) == 0


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages are []"),
        ([{"role": "user"}], "messages have {'role': 'user'}"),
        ([{"role": "tool", "content": "2"}], "messages have {'role': 'tool'"),
        (["Hello"], "messages have 'Hello'"),
        ([{"role": "user", "content": 5}], "a message is a string"),
        ([Message("user", "Hello"), Message("assistant", "Hi")], "the last message is the assistant's"),
    ],
)
def test_messages_that_are_none(engine: Engine, messages: list[Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine.chat(messages, chat_template=LINES)
    assert problem in str(caught.value)


def test_regenerate_replaces_the_last_reply(engine: Engine, chat: Conversation) -> None:
    with pytest.raises(UsageError, match="no reply yet"):
        chat.regenerate()
    chat.send("Hi").finish()
    second = chat.send("And you?").finish()
    again = chat.regenerate()
    assert (again.n_prefilled_tokens, again.finish().token_ids) == (1, second.token_ids)
    replies = {chat.regenerate(temperature=1.5).finish().text for _ in range(3)}
    assert len(replies) == 3 and len(said(chat)) == 4
    assert said(chat)[2] == "And you?" and said(chat)[3] in replies
    with engine.chat(chat_template=LINES, **SAMPLED) as sampled:
        first = sampled.send("Hi").finish()
        reply = sampled.regenerate()
        assert reply.sampling.seed == 6 and reply.finish().token_ids != first.token_ids
        assert sampled.regenerate(seed=5).finish().token_ids == first.token_ids
        sampled.send("Hi").finish()
        assert sampled.regenerate().sampling.seed == 6


def test_clear_and_system(chat: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    first = chat.send("Hi").finish()
    chat.system = LONG
    assert chat.system == LONG and said(chat) == [LONG, "Hi", first.text]
    told = chat.send("Hi").finish()
    assert told.n_cached_tokens < 3
    chat.clear()
    assert said(chat) == [LONG]
    again = chat.send("Hi")
    assert again.n_cached_tokens > 60 and again.finish().text == chat.messages[-1].content
    chat.system = None
    chat.clear()
    assert chat.messages == () and chat.send("Hi").finish().token_ids == first.token_ids


def test_changes_are_for_one_turn(chat: Conversation) -> None:
    assert chat.send("Hi", max_new_tokens=3).finish().n_generated_tokens == 3
    assert chat.send("Hi").finish().n_generated_tokens == 8
    with pytest.raises(UsageError, match="'tokens' is not a sampling parameter"):
        chat.send("Hi", tokens=3)


# What can't be used.


def test_unusable_messages_change_nothing(chat: Conversation) -> None:
    chat.send("Hi").finish()
    before = chat.messages
    for text, sentence in (
        ("", "the message is empty"),
        (None, "a message is a string, got NoneType"),
        ("bad \ud800 half", "not valid Unicode at character 4"),
        ("x" * (2**20 + 1), "1048577 characters"),
    ):
        with pytest.raises(UsageError, match=sentence):
            chat.send(text)  # type: ignore[arg-type]
        assert chat.messages == before
    for text in (" ", "\x00", "é" * 20, "👩‍👩‍👧‍👦", "a" + "\u0301" * 50, "</s><s>", "{{ 1/0 }}"):
        assert chat.send(text, max_new_tokens=2).finish().n_generated_tokens == 2
        assert chat.messages[-2].content == text


def test_a_template_that_refuses_leaves_the_conversation_as_it_was(engine: Engine) -> None:
    with pytest.raises(ModelError, match="No system role"):
        engine.chat("Be brief.", chat_template=GEMMA)
    with engine.chat(chat_template=GEMMA, max_new_tokens=3) as chat:
        chat.send("Hi").finish()
        with pytest.raises(ModelError, match="No system role"):
            chat.system = "Be brief."
        assert chat.system is None and len(chat.messages) == 2
        chat.send("Hi").finish()
    for source in ("{% if", "{{ raise_exception('never') }}", "{{ '' }}{% for m in messages %}{% endfor %}"):
        with pytest.raises(ModelError), engine.chat(chat_template=source) as chat:
            chat.send("Hi")
    assert kv_bytes(engine) == 0


def test_where_the_template_comes_from(own_tiny: Path) -> None:
    with (
        Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine,
        pytest.raises(ModelError, match=r"has no chat template; give one with chat_template, or use generate\."),
    ):
        engine.chat()
    config = (own_tiny / "tokenizer_config.json").read_text()
    named = '"chat_template": [{"name": "%s", "template": "named"}, {"name": "tool_use", "template": "tools"}]'
    for changed, prompt in (
        (config.replace("{", '{"chat_template": "inside",', 1), "inside"),
        (config.replace("{", "{" + named % "default" + ",", 1), "named"),
    ):
        (own_tiny / "tokenizer_config.json").write_text(changed)
        with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine, engine.chat() as chat:
            assert chat.send("Hi").n_prompt_tokens == engine.count_tokens(prompt) - 1  # no begin token
    (own_tiny / "chat_template.jinja").write_text("beside the others")
    with Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine, engine.chat() as chat:
        assert chat.send("Hi").n_prompt_tokens == engine.count_tokens("beside the others") - 1
    (own_tiny / "chat_template.jinja").unlink()
    (own_tiny / "tokenizer_config.json").write_text(config.replace("{", "{" + named % "rag" + ",", 1))
    with (
        Engine.from_pretrained(own_tiny, quantizer="none", threads=1) as engine,
        pytest.raises(ModelError, match=r"2 chat templates.*none of them called default"),
    ):
        engine.chat()


def test_a_store_keeps_the_template(own_tiny: Path, cache: Path) -> None:
    (own_tiny / "chat_template.jinja").write_text(LINES)
    with Engine.from_pretrained(own_tiny, quantizer="rtn", threads=1) as engine, engine.chat(**GREEDY) as chat:
        said_first = chat.send("Hi").finish()
    (store,) = cache.glob("stores/*/manifest.json")
    with Engine.from_pretrained(store.parent, threads=1) as engine, engine.chat(**GREEDY) as chat:
        assert chat.send("Hi").finish().token_ids == said_first.token_ids


# What is left behind.


def test_closing_frees_everything(engine: Engine) -> None:
    assert kv_bytes(engine) == 0
    chat = engine.chat(chat_template=LINES, max_new_tokens=8)
    chat.send("Hi").finish()
    assert kv_bytes(engine) > 0
    reply = chat.send("Hi")
    next(reply)
    for _ in range(2):
        chat.close()
        assert kv_bytes(engine) == 0 and list(reply) == []
    for use in (lambda: chat.send("Hi"), chat.regenerate, chat.clear, lambda: setattr(chat, "system", "x")):
        with pytest.raises(HeteroError, match="this conversation is closed"):
            use()
    forgotten = engine.chat(chat_template=LINES)
    forgotten.send("Hi", max_new_tokens=3).finish()
    del forgotten
    assert kv_bytes(engine) == 0


def test_closing_the_engine_ends_its_conversations(tiny: Path) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        chat = engine.chat(chat_template=LINES)
        reply = chat.send("Hi")
        next(reply)
    assert list(reply) == []
    with pytest.raises(HeteroError, match="this conversation is closed"):
        chat.send("Hi")
    with pytest.raises(HeteroError, match="this engine is closed"):
        engine.chat(chat_template=LINES)


def test_conversations_and_generation_side_by_side(engine: Engine) -> None:
    with engine.chat(chat_template=LINES, max_new_tokens=8) as first, engine.chat(chat_template=CHATML) as second:
        alone = [first.send(text).finish().token_ids for text in ("Hi", "And you?")]
        first.clear()
        replies: list[Reply] = []
        for text, expected in zip(("Hi", "And you?"), alone, strict=True):
            reply = first.send(text)
            next(reply)
            replies.append(second.send("Something else", max_new_tokens=4))
            next(replies[-1])
            engine.generate("Once", max_new_tokens=3)
            assert reply.finish().token_ids == expected
            assert replies[-1].finish().n_generated_tokens == 4
