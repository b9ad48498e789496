"""Engine.astream: the tokens of `stream` for asyncio, and what becomes of a text whose task is cancelled."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, GeneratedToken, HeteroError, UsageError
from tests.emulation import LAPTOP

PROMPTS = ["Once upon a time", "Lily and Tom went to the park. They saw a big dog and"]
N_TOKENS = 24


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def exact(demo: Path) -> Iterator[Engine]:
    """Drafts on an emulated machine."""
    with Engine.from_pretrained(demo, threads=1, profile=LAPTOP, emulate=True, mode="exact") as opened:
        yield opened


def is_free(engine: Engine) -> bool:
    return engine.executor.cache.sequences == ()


async def text_of(engine: Engine, prompt: str, **changes: Any) -> str:
    return "".join([token.text async for token in engine.astream(prompt, max_new_tokens=N_TOKENS, **changes)])


@pytest.mark.parametrize("mode", ["full", "exact"])
@pytest.mark.sample(1)
def test_texts_side_by_side_are_what_each_is_alone(mode: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue("engine" if mode == "full" else "exact")
    alone = [engine.generate(prompt, max_new_tokens=N_TOKENS).text for prompt in PROMPTS]

    async def together() -> list[str]:
        beside = asyncio.to_thread(engine.generate, PROMPTS[0], max_new_tokens=N_TOKENS)
        *texts, result = await asyncio.gather(*(text_of(engine, prompt) for prompt in PROMPTS), beside)
        return [*texts, result.text]

    assert asyncio.run(together()) == [*alone, alone[0]]
    assert is_free(engine)


def test_the_loop_goes_on_while_a_token_is_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    attend = engine.executor._ops.attend  # type: ignore[attr-defined]

    def waits(*arguments: object) -> object:
        begun.set()
        assert may_go_on.wait(10)
        return attend(*arguments)

    async def asks() -> None:
        tokens = engine.astream(PROMPTS[0])
        first = asyncio.ensure_future(anext(tokens))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert not first.done()
        may_go_on.set()
        assert isinstance(await first, GeneratedToken)
        await tokens.aclose()

    monkeypatch.setattr(engine.executor._ops, "attend", waits)
    asyncio.run(asks())
    assert is_free(engine)


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_a_timeout_ends_the_text_and_frees_it(mode: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue("engine" if mode == "full" else "exact")
    expected = engine.generate(PROMPTS[0], max_new_tokens=N_TOKENS).text
    seen: list[GeneratedToken] = []

    async def cut_short() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                while True:
                    async for token in engine.astream(PROMPTS[0], ignore_eos=True):
                        seen.append(token)
        assert is_free(engine)  # at once, not when somebody collects what is left
        return await text_of(engine, PROMPTS[0])

    assert asyncio.run(cut_short()) == expected and seen


def test_leaving_the_loop_frees_the_text_at_once(engine: Engine) -> None:
    async def leaves() -> None:
        async for _ in engine.astream(PROMPTS[0]):
            break
        assert is_free(engine)
        tokens = engine.astream(PROMPTS[0])
        async with aclosing(tokens):
            await anext(tokens)
            assert not is_free(engine)
        assert is_free(engine)
        assert [token async for token in tokens] == []  # it has ended
        await tokens.aclose()

    asyncio.run(leaves())


def test_cancelling_stops_a_long_prompt_in_its_middle(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    async def cancelled() -> None:
        task = asyncio.ensure_future(text_of(engine, " the" * 500))
        while not told:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_free(engine)

    def slow(stage: str, n_done: int, n_all: int) -> None:
        told.append(n_done)
        time.sleep(0.05)

    with Engine.from_pretrained(tiny, quantizer="none", threads=1, progress=slow) as engine:
        monkeypatch.setattr(engine.executor, "prompt_chunk_tokens", 16)
        asyncio.run(cancelled())
        n_told = len(told)
        assert n_told < 500 / 16
        expected = engine.generate(" the" * 500, max_new_tokens=4).token_ids
        assert len(told) > n_told + 500 / 16  # the whole prompt, and the engine is as it was
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
        assert engine.generate(" the" * 500, max_new_tokens=4).token_ids == expected


def test_a_text_that_is_cancelled_leaves_others_alone(engine: Engine) -> None:
    expected = engine.generate(PROMPTS[1], max_new_tokens=N_TOKENS).text

    async def one_of_two() -> str:
        kept = asyncio.ensure_future(text_of(engine, PROMPTS[1]))
        ended = asyncio.ensure_future(text_of(engine, PROMPTS[0], ignore_eos=True))
        await asyncio.sleep(0.005)
        ended.cancel()
        assert isinstance((await asyncio.gather(ended, return_exceptions=True))[0], asyncio.CancelledError)
        return await kept

    assert asyncio.run(one_of_two()) == expected and is_free(engine)


def test_errors_arrive_where_tokens_are_awaited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise HeteroError("the pass has failed.")

    with pytest.raises(UsageError, match="empty"):
        engine.astream("")  # at the call, as of stream
    monkeypatch.setattr(engine.executor._ops, "attend", fails)
    with pytest.raises(HeteroError, match="the pass has failed"):
        asyncio.run(text_of(engine, PROMPTS[0]))
    assert is_free(engine)


def test_a_text_of_a_closed_engine_says_so(tiny: Path) -> None:
    async def closed_meanwhile() -> None:
        with Engine.from_pretrained(tiny, quantizer="none", threads=1) as engine:
            tokens = engine.astream(PROMPTS[0])
            await anext(tokens)
        await anext(tokens)

    with pytest.raises(HeteroError, match="this engine is closed"):
        asyncio.run(closed_meanwhile())
