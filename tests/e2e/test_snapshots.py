"""Snapshots of recurrent state: a chat's next turn reads only what is new, with the bits of a fresh read."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from hetero_ee import Engine
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import DeviceCaches
from hetero_ee.kv.recurrent import RecurrentCache
from hetero_ee.kv.snapshots import Snapshots
from hetero_ee.layers.state import RecurrentState
from hetero_ee.models.blocks import layer_states
from hetero_ee.ops import torch_delta
from hetero_ee.runtime.executors.executor import Executor
from tests.emulation import emulated, planned
from tests.executor_support import executor_for, hidden_alone, model_of
from tests.families import random_model, save_checkpoint
from tests.server_support import NAME, opened, serving

TEXT = [(7 * i * i + 3) % 131 for i in range(150)]
OTHER = [(5 * i + 11) % 131 for i in range(150)]
SHORT = """{% for message in messages %}{{ message.role }}: \
{{ message.content[:9] if message.role == 'assistant' else message.content }}{{ eos_token }}
{% endfor %}assistant: Hm."""  # shortens earlier replies, as templates that drop thoughts do


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    made = executor_for(model_of("qwen3.5", "fp32", tmp_path_factory.mktemp("model")), "fp32")
    yield made
    made.close()


def read(executor: Executor, sequence: int, tokens: list[int]) -> torch.Tensor:
    first = executor.cache.length(sequence)
    return executor.hidden(Batch.of_sequence(sequence, first, tokens[first:]))


def test_a_cut_restores_the_latest_snapshot_before_it(executor: Executor) -> None:
    cache, sequence = executor.cache, executor.cache.open_new()
    for length in (40, 70, 150):
        read(executor, sequence, TEXT[:length])
        cache.mark(sequence)
    assert (cache.restorable(sequence, 39), cache.restorable(sequence, 100), cache.restorable(sequence, 140)) == (
        0,
        70,
        140,  # by the log
    )
    assert cache.truncate(sequence, 100) == 70
    changed = [*TEXT[:70], *OTHER[:50]]
    assert torch.equal(read(executor, sequence, changed), hidden_alone(executor, changed)[70:])
    assert cache.truncate(sequence, 69) == 40  # what was kept later belongs to forgotten tokens
    assert torch.equal(read(executor, sequence, OTHER[:0] + TEXT[:60]), hidden_alone(executor, TEXT[:60])[40:])
    cache.check()
    cache.close(sequence)


def test_a_restoration_that_ctrl_c_ends_leaves_nothing(executor: Executor) -> None:
    cache = RecurrentCache(
        next(each for each in layer_states(executor.spec) if isinstance(each, RecurrentState)), 99, [0]
    )
    cache.open(0)
    cache.admit(Batch.of_sequence(0, 0, [1] * 50))
    matrices, *_ = copies = tuple(torch.ones_like(part) for part in cache.snapshot(0))
    with pytest.raises(RuntimeError):
        cache.restore(0, 40, (matrices, torch.ones(1, 2), *copies[2:]))
    assert cache.truncate(0, 0) == 0 and not cache.storage(0).matrices.any()


def test_pending_tokens_are_not_settled(executor: Executor) -> None:
    """The layers that they have passed can forget them."""
    cache, sequence = executor.cache, executor.cache.open_new()
    read(executor, sequence, TEXT[:40])
    for position in range(40, 46):
        cache.settle(sequence, position)
        executor.run(Batch.of_sequence(sequence, position, TEXT[position : position + 1]), None, range(2))
    assert cache.truncate(sequence, cache.length(sequence)) == 40
    cache.close(sequence)


def test_the_least_recently_used_snapshot_leaves_first() -> None:
    kept = Snapshots(budget_bytes=3 * 40)
    part = [(torch.zeros(10),)]
    for sequence, length in ((0, 5), (0, 9), (1, 5)):
        kept.keep(sequence, length, part)
    kept.take(0, 5)
    kept.keep(2, 7, part)
    assert kept.n_bytes == 120
    assert [kept.latest(number, 100) for number in range(3)] == [5, 5, 7]
    kept.forget(0)
    kept.keep(3, 1, [(torch.zeros(31),)])  # exceeds the budget by itself
    assert [kept.latest(number, 100) for number in range(4)] == [0, 5, 7, 0]


def test_a_closed_sequence_keeps_nothing(executor: Executor) -> None:
    cache, sequence = executor.cache, executor.cache.open_new()
    assert isinstance(cache, DeviceCaches)
    read(executor, sequence, TEXT[:30])
    cache.mark(sequence)
    assert cache.snapshots.n_bytes > 0
    cache.close(sequence)
    assert cache.snapshots.n_bytes == 0


@pytest.fixture(scope="module")
def hybrid(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid with the demo model's tokenizer."""
    model = random_model("qwen3.5", vocab_size=read_spec(demo).vocab_size, eos_token_id=1, max_position_embeddings=2000)
    return save_checkpoint(model, tmp_path_factory.mktemp("models") / "hybrid", tokenizer_from=demo)


@pytest.fixture
def engine(hybrid: Path) -> Iterator[Engine]:
    with opened(hybrid) as made:
        yield made


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of prompt tokens that pass the model, chunk by chunk."""
    read, prompt = list[int](), engine.executor.prompt

    def counting(chunks: Iterator[Batch], *rest: object) -> torch.Tensor:
        def noted() -> Iterator[Batch]:
            for chunk in chunks:
                read.append(len(chunk))
                yield chunk

        return prompt(noted(), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.executor, "prompt", counting)
    return read


QUESTION, MORE = "Once upon a time there was a dog. " * 30, "And then? "
SAMPLING = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}


def test_a_second_turn_reads_only_the_new_messages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the template shortens the reply, whose tokens have to leave the cache."""
    read = counted(engine, monkeypatch)
    with engine.chat(chat_template=SHORT, **SAMPLING) as chat:
        first = chat.send(QUESTION)
        first.finish()
        n_first = sum(read)
        second = chat.send(MORE)
        text = second.finish().text
        messages, sampling = chat.messages, chat.sampling
    assert n_first == first.n_prompt_tokens > 200
    assert sum(read) - n_first == second.n_prefilled_tokens < 100
    assert second.n_cached_tokens > 200
    with engine.chat(chat_template=SHORT, **SAMPLING) as fresh:
        fresh.restore(messages[:2], sampling)
        again = fresh.send(MORE)
        assert again.finish().text == text
        assert again.n_cached_tokens == 0


@pytest.mark.sample(0)
def test_a_reply_is_generated_again_without_reading_its_prompt(engine: Engine) -> None:
    with engine.chat(chat_template=SHORT, **SAMPLING) as chat:
        text = chat.send(QUESTION).finish().text
        again = chat.regenerate()
        assert again.finish().text == text
        assert again.n_prefilled_tokens < 20


@pytest.mark.sample(0)
def test_the_server_continues_a_chat_and_counts_what_it_restored(hybrid: Path) -> None:
    with opened(hybrid) as engine, serving(engine, SHORT) as server:

        def say(*messages: dict[str, str]) -> dict[str, object]:
            body = {"model": NAME, "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()

        question = {"role": "user", "content": QUESTION}
        first = say(question)
        reply = first["choices"][0]["message"]
        second = say(question, reply, {"role": "user", "content": MORE})
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'hetero_ee:state_snapshots_restored{model_name="tiny-model"} 1.0' in metrics


def test_a_plan_reserves_the_ram_and_its_executor_uses_it(tmp_path: Path) -> None:
    spec, weights = model_of("qwen3.5", "fp32", tmp_path)
    for limits, expected in (({}, 32), ({"snapshot_budget_bytes": 0}, 0)):
        plan = planned(spec, kv_type="fp32", **limits)
        one = sum(state.n_bytes(0, "fp32") for state in layer_states(spec) if isinstance(state, RecurrentState))
        assert plan.snapshot_bytes == expected * one
        executor = emulated(spec, weights, plan)
        assert executor.cache.snapshots.budget_bytes == plan.snapshot_bytes
        executor.close()


def test_ctrl_c_amid_a_pass_loses_the_state_and_not_its_bits(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, sequence = executor.cache, executor.cache.open_new()
    read(executor, sequence, TEXT[:30])
    cache.mark(sequence)
    read(executor, sequence, TEXT[:35])
    with monkeypatch.context() as patch:
        patch.setattr(torch_delta, "write_matrix", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(executor, sequence, TEXT[:36])
    assert cache.truncate(sequence, 35) == 30
    assert torch.equal(read(executor, sequence, TEXT[:40]), hidden_alone(executor, TEXT[:40])[30:])
    cache.close(sequence)


def interrupted(blocks: torch.Tensor, matrix: torch.Tensor) -> None:
    blocks.fill_(1.0)
    raise KeyboardInterrupt
