"""Plans with parts on a GPU, run by everything that runs them there but the card: near the CPU's results, exact among
themselves, and without a trace when closed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.ops.arena import MAX_ROWS
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.gpu.segment import GpuResources, GpuSegment
from tests.device_support import held_bytes
from tests.emulation import planned, prompt_of
from tests.executor_support import Model, model_of
from tests.exit_patterns import Exiting, SlowText, run_exiting
from tests.placements import (
    CONTEXT_TOKENS,
    PLACEMENTS,
    PROMPT,
    assert_rows_keep_their_bits,
    assert_same,
    computed_and_stored,
    visiting,
)
from tests.stand_in_machine import on_stand_in, stand_in_gpu, torch_operations

INT8_ACTIVATIONS = 2e-3  # normalised squared error, as for a segment
FAMILIES = ["llama-tied", "qwen2-window", "qwen3", "opt", "phi3-partial"]


def plan_of(model: Model, placement: str, **limits: Any) -> Plan:
    return planned(model[0], overrides=PLACEMENTS[placement], context_tokens=CONTEXT_TOKENS, **limits)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, "int4", tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))


def steps(executor: Executor) -> torch.Tensor:
    """Logits after a prompt, after each of three more tokens, and of three rows at once."""
    sequence = executor.cache.open_new()
    found = [executor.prompt(prompt_of(executor, sequence, PROMPT))]
    for token in (4, 8, 15):
        batch = Batch.of_sequence(sequence, executor.cache.length(sequence), [token])
        found += list(executor.logits(batch, [0]))
    batch = Batch.of_sequence(sequence, executor.cache.length(sequence), [16, 23, 42])
    found += list(executor.logits(batch, [0, 1, 2]))
    executor.cache.check()
    executor.cache.close(sequence)
    return torch.stack(found)


def squared_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().sum() / expected.square().sum())


@pytest.mark.sample(2)
def test_every_placement_is_near_the_cpu(model: Model) -> None:
    expected = steps(ReferenceExecutor(*model, CONTEXT_TOKENS, BatchedTorchOps()))
    plans = {name: plan_of(model, name) for name in PLACEMENTS}
    plans["visiting"] = visiting(plans["head alone on the GPU"])
    for name, plan in plans.items():
        executor = on_stand_in(*model, plan)
        assert squared_error(steps(executor), expected) <= INT8_ACTIVATIONS, name
        executor.close()


@pytest.mark.parametrize("kv_type", ["fp16", "int8"])
@pytest.mark.parametrize("placement", ["split", "streamed", "head alone on the GPU"])
def test_stored_kinds_of_keys_and_values(llama: Model, placement: str, kv_type: str) -> None:
    expected = steps(ReferenceExecutor(*llama, CONTEXT_TOKENS, BatchedTorchOps()))
    for plan in (plan_of(llama, placement, kv_type=kv_type), visiting(plan_of(llama, placement, kv_type=kv_type))):
        executor = on_stand_in(*llama, plan)
        assert squared_error(steps(executor), expected) <= 2 * INT8_ACTIVATIONS
        executor.close()


@pytest.mark.parametrize("kv_type", ["fp32", "fp16", "int8"])
def test_visiting_attentions_compute_and_store_what_resident_ones_do(model: Model, kv_type: str) -> None:
    resident = on_stand_in(*model, plan_of(model, "all on the GPU", kv_type=kv_type))
    visits = on_stand_in(*model, visiting(plan_of(model, "head alone on the GPU", kv_type=kv_type)))
    assert_same(computed_and_stored(visits), computed_and_stored(resident))


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_a_row_has_the_same_bits_whatever_m_is(llama: Model, placement: str) -> None:
    executor = on_stand_in(*llama, plan_of(llama, placement))
    together = assert_rows_keep_their_bits(executor, (0, 3))
    ids = torch.tensor([[5, 130, 5, 0]]).expand(7, 4)
    logits = executor.to_logits(together)
    assert torch.equal(executor.partial_logits(together, ids, DraftEnd()), logits.gather(1, ids))


def test_the_head_takes_more_rows_than_a_launch(llama: Model) -> None:
    executor = on_stand_in(*llama, plan_of(llama, "all on the GPU"))
    hidden = executor.hidden(Batch.of_sequence(executor.cache.open_new(), 0, PROMPT))
    together = executor.to_logits(hidden)
    assert len(together) > MAX_ROWS
    for row in range(len(together)):
        assert torch.equal(executor.to_logits(hidden[row : row + 1])[0], together[row])


def test_logits_stay_what_they_are(llama: Model) -> None:
    """Though they come through buffers that are used again."""
    executor = on_stand_in(*llama, plan_of(llama, "all on the GPU"))
    sequence = executor.cache.open_new()
    kept = []
    for position, token in enumerate(PROMPT[:8]):
        logits = executor.logits(Batch.of_sequence(sequence, position, [token]), [0])
        kept.append((logits, logits.clone()))
    assert all(torch.equal(logits, then) for logits, then in kept)


def test_streamed_weights_are_prepared_once(llama: Model) -> None:
    """For each device buffer that a block comes into; where preparing copies them, each time."""
    prepared: list[Any] = []
    operations = torch_operations()

    def prepare(weight: Any, device: Any) -> Any:
        prepared.append(weight)
        return operations.prepare_int4(weight, device)

    n_matrices = 4 * llama[0].n_layers
    for is_capturable, most in ((True, 2 * n_matrices), (False, 100 * n_matrices)):
        prepared.clear()
        counted = replace(operations, prepare_int4=prepare, is_capturable=is_capturable)
        executor = on_stand_in(*llama, plan_of(llama, "streamed"), stand_in_gpu(operations=counted))
        sequence = executor.cache.open_new()
        counts = []
        for position in range(6):
            executor.hidden(Batch.of_sequence(sequence, position, [4]))
            counts.append(len(prepared))
        executor.close()
        assert counts[-1] <= most
        assert (counts[-1] == counts[2]) == is_capturable


@pytest.mark.parametrize("placement", ["split", "streamed"])
def test_closing_gives_everything_back(llama: Model, placement: str) -> None:
    executor = on_stand_in(*llama, visiting(plan_of(llama, placement)))
    machine = executor.machine
    assert machine.gpu is not None and held_bytes(machine.gpu) and held_bytes(machine.cpu)
    steps(executor)
    executor.cache.open_new()
    executor.close()
    executor.close()
    assert held_bytes(machine.gpu) == held_bytes(machine.cpu) == {}
    gpu_cache: Any = executor._executors[1].cache
    assert gpu_cache.n_bytes == 0


def test_a_block_without_a_norm_takes_its_input_as_it_is(llama: Model) -> None:
    spec, weights = llama
    blocks = [replace(block, has_norm=False) for block in decoder_blocks(spec)[1:3]]
    shape = (1, spec.n_kv_heads, spec.head_dim)
    cache = GpuKvCache(shape, CONTEXT_TOKENS, torch.device("cpu"), kind="fp32", layers=[0])
    segment = GpuSegment(spec, weights, blocks, GpuResources(cache, torch_operations()))
    reference, batch = ReferenceExecutor(*llama, CONTEXT_TOKENS), Batch.of_sequence(0, 0, PROMPT)
    for owner in (segment, reference):
        owner.cache.open(0)
        owner.cache.admit(batch, range(1))
    hidden = reference.embed(batch)
    expected = reference.forward(hidden, batch, blocks)
    assert squared_error(segment.run(hidden, batch), expected) <= INT8_ACTIVATIONS
    assert squared_error(reference.forward(hidden, batch, decoder_blocks(spec)[1:3]), expected) > INT8_ACTIVATIONS


def test_dense_weights_are_refused(tmp_path: Path) -> None:
    model = model_of("llama", "fp32", tmp_path)
    with pytest.raises(TypeError, match="the GPU kernels multiply tiles"):
        on_stand_in(*model, plan_of(model, "split"))


@pytest.mark.few(17)
@pytest.mark.parametrize("placement", ["all on the GPU", "split", "streamed"])
def test_texts_that_exit_are_near_a_slow_reference(model: Model, placement: str) -> None:
    executor = on_stand_in(*model, plan_of(model, placement))
    text = Exiting(PROMPT, [(3, 1, 2, 2, 1, 3)[at % 6] for at in range(len(PROMPT))])
    sequence, slow = executor.cache.open_new(), SlowText(model)
    states = run_exiting(executor, {sequence: text})[sequence]
    for token_id, depth in zip(text.token_ids, text.depths, strict=True):
        slow.add(token_id, depth)
    assert squared_error(torch.stack(states), torch.stack(slow.states)) <= INT8_ACTIVATIONS
    executor.close()


@pytest.mark.parametrize(("family", "mixer"), [("lfm2", "short_conv"), ("nemotron-h", "mamba")])
def test_recurrent_mixers_are_planned_for_the_gpu(family: str, mixer: str, tmp_path: Path) -> None:
    model = model_of(family, "int4", tmp_path)
    plan = planned(model[0], gpu_layers=99, context_tokens=CONTEXT_TOKENS)
    assert {part.decode_placement for part in plan.parts if part.name.endswith(mixer)} == {"gpu"}
    assert {part.decode_placement for part in plan.parts if part.name.endswith(("ffn", "attention"))} == {"gpu"}
    executor = on_stand_in(*model, plan)
    sequence = executor.cache.open_new()
    found = executor.hidden(Batch.of_sequence(sequence, 0, PROMPT)).cpu()
    reference = ReferenceExecutor(*model, CONTEXT_TOKENS, BatchedTorchOps())
    expected = reference.hidden(Batch.of_sequence(reference.cache.open_new(), 0, PROMPT))
    assert (found - expected).square().sum() <= INT8_ACTIVATIONS * expected.square().sum()
    executor.close()
    pins = ((f".*{mixer}", "gpu"), (".*", "cpu"))
    assert {part.name for part in planned(model[0], overrides=pins).parts if part.decode_placement == "gpu"}
