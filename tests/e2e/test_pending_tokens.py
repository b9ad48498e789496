"""Tokens that exited catch up with a later one: keys, values and states have the bits of a pass through all layers."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_ee.kv.batch import Batch
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.executors.executor import Executor
from tests.emulation import emulated, planned
from tests.executor_support import Model, executor_for, model_of
from tests.exit_patterns import VOCABULARY, Exiting, assert_same_lines, end_sequence, exiting_texts, run_exiting, stored

N_LAYERS, CONTEXT_TOKENS = 4, 160
FAMILIES = ("llama", "qwen3", "opt", "mistral", "qwen2-window", "phi3-partial")
CASES = [(family, "fp32", "fp32") for family in FAMILIES]  # weights, cache
CASES += [(family, "int4", kind) for family in ("llama-tied", "qwen3", "mistral") for kind in ("fp32", "fp16", "int8")]
ONE_FIXTURE = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(
    scope="module",
    params=CASES,
    ids="-".join,
)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    family, weights, kind = request.param
    changes = {"head_dim": 16} if family == "qwen3" else {}
    model = model_of(family, weights, tmp_path_factory.mktemp(family), num_hidden_layers=N_LAYERS, **changes)
    executor = executor_for(model, weights, kind)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama", "int4", tmp_path_factory.mktemp("llama"), num_hidden_layers=N_LAYERS)


def in_sequences(executor: Executor, texts: list[Exiting]) -> dict[int, Exiting]:
    return {executor.cache.open_new(): text for text in texts}


def close(executor: Executor) -> None:
    executor.cache.check()
    for sequence in executor.cache.sequences:
        executor.cache.close(sequence)


@ONE_FIXTURE
@given(texts=exiting_texts(N_LAYERS), more=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5))
def test_keys_and_values_are_those_of_one_pass(executor: Executor, texts: list[Exiting], more: list[int]) -> None:
    """So are the states; and a text that has ended goes on as a fresh one."""
    cache = executor.cache
    sequences = in_sequences(executor, texts)
    states = run_exiting(executor, sequences)
    for sequence, text in sequences.items():
        whole = cache.open_new()
        whole_states = [None, *(torch.empty(0) for _ in range(N_LAYERS))]
        batch = Batch.of_sequence(whole, 0, text.token_ids)
        for layer in range(N_LAYERS):
            whole_states[layer + 1] = executor.run(batch, whole_states[layer], range(layer, layer + 1))
        for position, (depth, state) in enumerate(zip(text.depths, states[sequence], strict=True)):
            expected = whole_states[depth]
            assert expected is not None and torch.equal(state, expected[position])
        assert cache.length_at(sequence, 0) == len(text.token_ids)
        assert_same_lines(stored(executor, sequence), stored(executor, whole))
        end_sequence(executor, sequence)
        kept = cache.length(sequence)
        assert cache.lengths(sequence) == [kept] * N_LAYERS
        rest = text.token_ids[kept:] + more
        on, whole_on = (
            executor.hidden(Batch.of_sequence(each, cache.length(each), rest[cache.length(each) - kept :]))
            for each in (sequence, whole)
        )
        assert torch.equal(on[-len(more) :], whole_on)
        assert_same_lines(stored(executor, sequence), stored(executor, whole))
        cache.close(whole)
    close(executor)


@pytest.mark.few(6)
@ONE_FIXTURE
@given(st.data())
def test_ended_texts_leave_no_ragged_layers(executor: Executor, data: st.DataObject) -> None:
    """What a text holds then are its tokens up to the last one that passed every layer."""
    texts = in_sequences(executor, data.draw(exiting_texts(N_LAYERS, 8)))
    run_exiting(executor, texts)
    for sequence, text in texts.items():
        if data.draw(st.booleans()):  # interrupted before its exit was told
            executor.run(Batch.of_sequence(sequence, len(text.token_ids), [3]), None, range(1))
        end_sequence(executor, sequence)
        n_whole = 1 + max((at for at, depth in enumerate(text.depths) if depth == N_LAYERS), default=-1)
        assert executor.cache.lengths(sequence) == [n_whole] * N_LAYERS
        executor.hidden(Batch.of_sequence(sequence, n_whole, [7, 8]))
    close(executor)


PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "GPU, then CPU": ((r"layers\.[01]\..*", "gpu"), ("layers.*", "cpu"), ("head", "gpu")),
    "CPU, then GPU": ((r"layers\.[01]\..*", "cpu"), ("layers.*", "gpu")),
    "apart": ((r"layers\.[02]\.attention", "gpu"), (".*attention", "cpu"), (".*ffn", "gpu"), ("head", "cpu")),
    "streamed": ((r"layers\.0\..*", "gpu"), (r"layers\.[12]\..*", "stream"), ("layers.*", "cpu")),
}


def plan_of(model: Model, places: str, kv_type: str) -> Plan:
    return planned(model[0], overrides=PLACES[places], context_tokens=CONTEXT_TOKENS, kv_type=kv_type)


@pytest.mark.few(7)
@pytest.mark.parametrize("kv_type", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("places", PLACES)
@ONE_FIXTURE
@given(texts=exiting_texts(N_LAYERS, 10))
def test_a_plan_keeps_what_the_cpu_alone_keeps(llama: Model, places: str, kv_type: str, texts: list[Exiting]) -> None:
    found = []
    for executor in (
        executor_for(llama, "int4", kv_type),
        emulated(*llama, plan_of(llama, places, kv_type)),
    ):
        sequences = in_sequences(executor, texts)
        states = run_exiting(executor, sequences)
        executor.cache.check()
        found.append((states, [stored(executor, sequence) for sequence in sequences]))
        executor.close()
    for (states, lines), (other_states, other_lines) in pairwise(found):
        for sequence, mine in states.items():
            assert torch.equal(torch.stack(mine), torch.stack(other_states[sequence]))
        for one, other in zip(lines, other_lines, strict=True):
            assert [part[0].shape for part in one] == [part[0].shape for part in other]
            assert_same_lines(one, other)
