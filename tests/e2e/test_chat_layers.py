"""Conversations over layers that go ahead of each other: a pass that fails between them leaves nothing behind."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.decoding.conversation import Conversation
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from tests.chat_support import LINES
from tests.e2e.test_chat_faults import N_LAYERS, N_TOKENS, OPENING, QUESTION, assert_goes_on


def layer_by_layer(executor: Executor, failing_range: int) -> Any:
    """Executor.hidden through one layer after the other; the n-th of them (from 0) fails before it begins."""
    calls = itertools.count()

    def hidden(batch: Batch) -> torch.Tensor:
        state = None
        for layer in range(N_LAYERS):
            if next(calls) == failing_range:
                raise KeyboardInterrupt
            state = executor.run(batch, state, range(layer, layer + 1))
        assert state is not None
        return state

    return hidden


@pytest.mark.parametrize("quantizer", ["none", "rtn"])
@pytest.mark.sample(1)
def test_a_pass_that_ends_between_layers(tiny: Path, quantizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.from_pretrained(tiny, quantizer=quantizer, threads=1) as engine:
        executor: Any = engine.executor
        for n_passes, layer in itertools.product(range(3), range(N_LAYERS)):
            with engine.chat(chat_template=LINES, max_new_tokens=N_TOKENS, ignore_eos=True) as chat:
                chat.send(OPENING).finish()
                with monkeypatch.context() as patch:
                    patch.setattr(executor, "hidden", layer_by_layer(executor, N_LAYERS * n_passes + layer))
                    with pytest.raises(KeyboardInterrupt):
                        chat.send(QUESTION).finish()
                assert_waiting(executor, chat, layer)
                assert_goes_on(chat, engine)
                assert lengths(executor, chat) == [len(chat._cached_ids)] * N_LAYERS
        assert executor.cache.n_bytes == 0


def assert_waiting(executor: Executor, chat: Conversation, layer: int) -> None:
    """The layers before the one that failed are ahead, and the conversation counts on none of it."""
    executor.cache.check()
    ahead, behind = lengths(executor, chat)[:layer], lengths(executor, chat)[layer:]
    assert chat.n_cached_tokens == executor.cache.length(chat._sequence) == min(behind)
    assert all(length > max(behind) for length in ahead)


def lengths(executor: Executor, chat: Conversation) -> list[int]:
    return [executor.cache.length_at(chat._sequence, layer) for layer in range(N_LAYERS)]


def test_texts_of_a_call_that_ends_between_layers_are_freed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        executor: Any = engine.executor
        expected = [result.token_ids for result in engine.generate([OPENING, QUESTION], max_new_tokens=N_TOKENS)]
        for failing_range in (1, 4, 8):
            with monkeypatch.context() as patch:
                patch.setattr(executor, "hidden", layer_by_layer(executor, failing_range))
                with pytest.raises(KeyboardInterrupt):
                    engine.generate([OPENING, QUESTION], max_new_tokens=N_TOKENS)
            assert executor.cache.sequences == () and executor.cache.n_bytes == 0
        again = engine.generate([OPENING, QUESTION], max_new_tokens=N_TOKENS)
        assert [result.token_ids for result in again] == expected
