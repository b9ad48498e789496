"""Conversations that outgrow the context: what is forgotten, what stays, and what can't be said at all."""

from pathlib import Path

import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.decoding.result import FinishReason
from hetero_ee.text.chat_template import Message
from tests.chat_support import LINES, text_of


def words(n_tokens: int) -> str:
    """Text of so many tokens, or a few less."""
    return " the" * n_tokens


def opened(folder: Path, context_tokens: int) -> Engine:
    return Engine.from_pretrained(folder, quantizer="none", threads=1, context_tokens=context_tokens)


def test_the_oldest_turns_are_forgotten_and_the_system_message_stays(tiny: Path) -> None:
    with (
        opened(tiny, 240) as engine,
        engine.chat("Be brief.", chat_template=LINES, max_new_tokens=4) as chat,
    ):
        n_forgotten, n_largest_turn = [], 0
        for number in range(24):
            asked = [*chat.messages, Message("user", f"{number}{words(4)}")]
            reply = chat.send(f"{number}{words(4)}")
            kept = [asked[0], *asked[1 + reply.n_forgotten_messages :]]
            assert reply.finish().token_ids == engine.generate(text_of(kept), max_new_tokens=4).token_ids
            assert list(chat.messages[:-1]) == kept
            assert reply.n_prompt_tokens + 4 <= 240
            n_forgotten.append(reply.n_forgotten_messages)
            if reply.n_forgotten_messages:
                assert 100 < reply.n_prompt_tokens <= 176  # a quarter is free, and no more than that and a turn
            else:
                n_largest_turn = max(n_largest_turn, reply.n_prefilled_tokens)
        assert n_forgotten[:4] == [0] * 4 and sum(n_forgotten) > 8
        assert all(number % 2 == 0 for number in n_forgotten)
        assert n_forgotten.count(0) > 18  # not every turn has to
        assert n_largest_turn < 45  # the others find their beginning in the cache


def test_as_much_is_kept_as_there_is_room_for(tiny: Path) -> None:
    with opened(tiny, 200) as engine, engine.chat(chat_template=LINES, max_new_tokens=4) as chat:
        chat.send(words(30)).finish()
        chat.send(words(60)).finish()
        reply = chat.send(words(72))
        assert reply.n_forgotten_messages == 2 and reply.n_prompt_tokens > 150  # though no quarter is free now
        reply.finish()
        assert chat.messages[0].content == words(60)


@pytest.mark.parametrize("max_new_tokens", [None, 100])
def test_a_reply_has_room_for_a_quarter_of_the_context(tiny: Path, max_new_tokens: int | None) -> None:
    """Where max_new_tokens is less, that is room enough."""
    with (
        opened(tiny, 200) as engine,
        engine.chat(chat_template=LINES, max_new_tokens=max_new_tokens, ignore_eos=True) as chat,
    ):
        chat.send("Hi", max_new_tokens=4).finish()
        assert chat.send(words(130), max_new_tokens=4).n_forgotten_messages == 0
        reply = chat.send(words(130))
        assert reply.n_forgotten_messages == 2
        result = reply.finish()
        assert result.finish_reason is FinishReason.CONTEXT
        assert result.n_prompt_tokens + result.n_generated_tokens == 200
        follow_up = chat.send("Go on.", max_new_tokens=4)
        assert follow_up.n_forgotten_messages == 2 and follow_up.finish().n_generated_tokens == 4


def test_a_message_takes_the_whole_context_but_one_token(tiny: Path) -> None:
    with opened(tiny, 60) as engine, engine.chat(chat_template=LINES) as chat:
        n_overhead = chat.send("x").n_prompt_tokens - 1
        result = chat.send("x" + words(59 - n_overhead - 1)).finish()
        assert (result.n_prompt_tokens, result.n_generated_tokens) == (59, 1)


def test_a_message_that_can_never_fit_changes_nothing(tiny: Path) -> None:
    with opened(tiny, 60) as engine, engine.chat(chat_template=LINES, max_new_tokens=8) as chat:
        first = chat.send("Hi").finish()
        before, n_cached = chat.messages, chat.n_cached_tokens
        with pytest.raises(UsageError, match=r"the message has \d\d tokens .* the context limit is 60"):
            chat.send(words(60))
        assert (chat.messages, chat.n_cached_tokens) == (before, n_cached)
        assert chat.regenerate().finish().token_ids == first.token_ids
