"""Conversations in which something goes wrong: at any layer of any token they stay usable, and true to their ids."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine, GenerationResult
from hetero_ee.decoding.conversation import Conversation
from hetero_ee.kv import cpu as kv_cache
from hetero_ee.kv.batch import Batch
from hetero_ee.text.chat_template import ChatTemplate, Message
from tests.chat_support import LINES, text_of

N_TOKENS = 5
N_LAYERS = 3
OPENING, QUESTION, FOLLOW_UP = "Hello there, old friend", "And who are you?", "Go on."
Fault = Callable[[], BaseException]


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as opened:
        yield opened


@pytest.fixture
def chat(engine: Engine) -> Iterator[Conversation]:
    """A conversation after its first turn."""
    with engine.chat(chat_template=LINES, max_new_tokens=N_TOKENS, ignore_eos=True) as opened:
        opened.send(OPENING).finish()
        yield opened


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> GenerationResult:
    """The second turn, where nothing goes wrong."""
    with engine.chat(chat_template=LINES, max_new_tokens=N_TOKENS, ignore_eos=True) as chat:
        chat.send(OPENING).finish()
        return chat.send(QUESTION).finish()


def failing_at(n_calls: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The function, whose n-th call (from 0) raises once its work is done."""
    calls = itertools.count()

    def fail(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if next(calls) == n_calls:
            raise error
        return result

    return fail


def assert_goes_on(chat: Conversation, engine: Engine, text: str = FOLLOW_UP) -> None:
    """The cache holds what it should, and the next turn says what a fresh run over the whole text says."""
    assert_cache_is_true(chat, engine)
    asked = [*chat.messages, Message("user", text)]
    reply = chat.send(text)
    fresh = engine.generate(text_of(asked), max_new_tokens=N_TOKENS, ignore_eos=True)
    assert reply.finish().token_ids == fresh.token_ids
    assert chat.messages[:-1] == tuple(asked)


def assert_cache_is_true(chat: Conversation, engine: Engine) -> None:
    """What the conversation counts on are the keys and values of a fresh pass over its ids, bit for bit."""
    executor, ids = engine.executor, chat._cached_ids
    fresh = executor.cache.open_new()
    executor.hidden(Batch.of_sequence(fresh, 0, ids))
    for layer in range(N_LAYERS):
        found, expected = (executor.cache.read(layer, number, 0, len(ids)) for number in (chat._sequence, fresh))
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    executor.cache.close(fresh)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("n_passes", range(N_TOKENS))
@pytest.mark.parametrize("layer", range(N_LAYERS))
def test_a_fault_in_any_layer_of_any_pass(
    chat: Conversation,
    engine: Engine,
    undisturbed: GenerationResult,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    n_passes: int,
    layer: int,
) -> None:
    """Before the first token the turn leaves no trace; later, what was said stays."""
    before = chat.messages
    executor = engine.executor
    with monkeypatch.context() as patch:
        patch.setattr(executor._ops, "attend", failing_at(N_LAYERS * n_passes + layer, executor._ops.attend, error))
        reply = chat.send(QUESTION)
        with pytest.raises(type(error)):
            reply.finish()
    assert list(reply) == []
    said = [] if reply.result is None else list(reply.result.token_ids)
    assert said == list(undisturbed.token_ids[:n_passes])
    if reply.result is None:
        assert chat.messages == before
    else:
        assert chat.messages == (*before, Message("user", QUESTION), Message("assistant", reply.result.text))
    assert_goes_on(chat, engine)


def test_a_fault_between_tokens(chat: Conversation, engine: Engine, undisturbed: GenerationResult) -> None:
    for n_tokens in range(1, N_TOKENS):
        reply = chat.send(QUESTION)
        with pytest.raises(KeyboardInterrupt):
            for number, _ in enumerate(reply, 1):
                if number == n_tokens:
                    raise KeyboardInterrupt
        assert reply.result is not None
        assert reply.result.token_ids == undisturbed.token_ids[:n_tokens]
        assert chat.messages[-1].content == reply.result.text
        assert chat.regenerate().finish().token_ids == undisturbed.token_ids  # the traceback holds the old reply still
        assert_goes_on(chat, engine)
        chat.clear()
        chat.send(OPENING).finish()


def test_an_abandoned_reply_keeps_what_was_said(chat: Conversation, engine: Engine) -> None:
    for end in (lambda reply: reply.close(), lambda reply: None):
        reply = chat.send(QUESTION)
        text = next(reply).text + next(reply).text
        end(reply)
        assert chat.messages[-1].content == text
        assert_goes_on(chat, engine)
        assert list(reply) == []
    before = chat.messages
    chat.send(QUESTION)  # never begun
    assert chat.messages == before
    assert_goes_on(chat, engine)


@pytest.mark.parametrize("n_calls", range(2))
def test_a_fault_while_the_cache_grows(engine: Engine, monkeypatch: pytest.MonkeyPatch, n_calls: int) -> None:
    """Keys and values grow together or not at all."""
    with engine.chat(chat_template=LINES, max_new_tokens=N_TOKENS, ignore_eos=True) as chat:
        chat.send(" the" * 200).finish()
        before = chat.messages
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache.torch, "from_numpy", failing_at(n_calls, torch.from_numpy, MemoryError()))
            with pytest.raises(MemoryError):
                chat.send(" the" * 100).finish()
        assert chat.messages == before
        assert_goes_on(chat, engine, " the" * 100)


def test_a_fault_in_the_template_or_the_tokenizer(
    chat: Conversation, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = chat.messages
    for owner, name in ((ChatTemplate, "render"), (type(engine._tokenizer), "encode")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing_at(0, getattr(owner, name), KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                chat.send(QUESTION)
        assert chat.messages == before
    assert_goes_on(chat, engine)


def test_a_fault_on_the_cpu_kernels(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Engine.from_pretrained(tiny, quantizer="rtn", threads=2) as engine,
        engine.chat(chat_template=LINES, max_new_tokens=N_TOKENS, ignore_eos=True) as chat,
    ):
        chat.send(" the" * 240).finish()
        executor: Any = engine.executor
        for n_calls in (0, 4, 8):  # the first inside the pass that makes the cache grow
            with monkeypatch.context() as patch:
                patch.setattr(executor._ops, "attend", failing_at(n_calls, executor._ops.attend, KeyboardInterrupt()))
                with pytest.raises(KeyboardInterrupt):
                    chat.send(QUESTION).finish()
            assert_goes_on(chat, engine)
