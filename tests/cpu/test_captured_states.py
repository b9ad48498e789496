"""Captured hidden states have the bits of a pass that ends there, wherever a plan computes them, and change none."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.captured import cut
from hetero_ee.runtime.executors.executor import Executor
from tests.emulation import emulated, planned, prompt_of
from tests.executor_support import Model, model_of, on_kernels, reference
from tests.stand_in_machine import on_stand_in

CONTEXT_TOKENS, N_LAYERS = 128, 3
CAPTURED = (0, 1, 2)
TOKENS = [1, 17, 30, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64] * 3
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "split": ((r"layers\.0\..*", "gpu"), ("layers.*|embedding", "cpu"), ("head", "gpu")),
    "apart": ((".*attention", "gpu"), (".*ffn", "cpu"), ("head", "cpu")),
    "streamed": ((r"layers\.0\..*", "gpu"), (r"layers\.1\..*", "stream"), ("layers.*", "cpu")),
    "all": (("layers.*|head", "gpu"),),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))


def openers(model: Model) -> dict[str, Callable[[], Executor]]:
    """Each kind of executor, by name."""
    found: dict[str, Callable[[], Executor]] = {
        "reference": lambda: reference(model),
        "kernels": lambda: on_kernels(model),
    }
    for name, places in PLACES.items():
        plan = planned(model[0], overrides=places, context_tokens=CONTEXT_TOKENS)
        plan = replace(plan, prefill_chunk_tokens=20)
        found[f"emulated {name}"] = lambda plan=plan: emulated(*model, plan)  # type: ignore[misc]
        found[f"stand-in {name}"] = lambda plan=plan: on_stand_in(*model, plan)  # type: ignore[misc]
    return found


KINDS = ["reference", "kernels", *(f"{machine} {name}" for machine in ("emulated", "stand-in") for name in PLACES)]


@pytest.fixture(params=KINDS)
def executor(request: pytest.FixtureRequest, model: Model, kernels: Any) -> Iterator[Executor]:
    made = openers(model)[request.param]()
    yield made
    made.close()


def plainly(executor: Executor, batches: list[Batch]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """States before each layer, a pass for each, and after the last."""
    before: list[list[Tensor]] = [[] for _ in CAPTURED]
    after = []
    for batch in batches:
        hidden = executor.run(batch, None, range(0))
        for layer in range(N_LAYERS):
            before[layer].append(hidden.clone())
            hidden = executor.run(batch, hidden, range(layer, layer + 1))
        after.append(hidden)
    return before, after


@pytest.mark.few(4)
@pytest.mark.parametrize("layers", [CAPTURED, (1,), (0, 2)])
def test_states_of_runs_and_prompts(executor: Executor, layers: tuple[int, ...]) -> None:
    sequence = executor.cache.open_new()
    batches = [*prompt_of(executor, sequence, TOKENS), Batch.of_sequence(sequence, len(TOKENS), [3, 4, 5])]
    before, after = plainly(executor, batches)
    executor.cache.truncate(sequence, 0)
    executor.capture(layers)
    seen: list[tuple[Tensor, ...]] = []
    logits = executor.prompt(batches[:-1], lambda batch, normed, *captured: seen.append((normed, *captured)))
    for number, (normed, *captured) in enumerate(seen):
        assert same(normed, executor.final_norm(after[number]))
        assert all(same(x, before[layer][number]) for layer, x in zip(layers, captured, strict=True))
    assert same(logits, executor.to_logits(after[-2][-1:])[0])
    assert same(executor.run(batches[-1], None, range(N_LAYERS)), after[-1])
    assert all(same(x, before[layer][-1]) for layer, x in zip(layers, executor.captured, strict=True))
    executor.cache.truncate(sequence, len(TOKENS))
    hidden = executor.run(batches[-1], None, range(2))
    assert len(executor.captured) == sum(layer < 2 for layer in layers)
    assert same(executor.run(batches[-1], hidden, range(2, N_LAYERS)), after[-1])
    assert len(executor.captured) == sum(layer >= 2 for layer in layers)


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.as_subclass(Tensor), second.as_subclass(Tensor))


@pytest.mark.parametrize("layers", [(2, 1), (1, 1), (-1,), (0, 3)])
def test_layers_that_there_are_not(model: Model, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="can't be captured of a model with 3"):
        reference(model).capture(layers)


def test_layers_in_parts() -> None:
    assert cut(range(2, 8), (0, 2, 5, 8, 9)) == [range(2, 5), range(5, 8)]
    assert cut(range(3, 3), (3,)) == []
