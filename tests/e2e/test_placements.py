"""A plan's tokens are those of the CPU alone, wherever its parts lie: real numbers on an emulated machine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.devices import host_cache
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.opening import open_on_cpu
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import ModelWeights, load_dense
from hetero_ee_profiles.reference import reference_profile
from tests.e2e.test_cpu_executor import tiled
from tests.emulation import LAPTOP, emulated, planned, prompt_of
from tests.families import FAMILIES, PLACED, random_model, save_checkpoint
from tests.placements import ALL_CPU, CONTEXT_TOKENS, PLACEMENTS, split_at, visiting

N_TOKENS = 64
ROUNDING = 1e-2  # normalised, squared, of int8 activations
N_FEW_TOKENS = 12  # of each family where minutes count
OPENINGS = ["Once upon a time", "The big dog", "There was a red ball in the park. It"]
PROMPTS = ([1, 17, 30, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64], [2], [5, 9, 11] * 9)  # the last goes a prompt's way
Model = tuple[ModelSpec, ModelWeights]


def on_disk(plan: Plan) -> Plan:
    """What the plan has on the CPU is read from the disk."""
    parts = tuple(
        replace(part, decode_placement="disk", prefill_placement="disk") if part.decode_placement == "cpu" else part
        for part in plan.parts
    )
    return replace(plan, parts=(plan.parts[0], *parts[1:]))


def texts(executor: Executor, n_tokens: int = N_FEW_TOKENS) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each prompt, decoded together behind prompts of their own, and every step's logits."""
    sequences = [executor.cache.open_new() for _ in PROMPTS]
    steps = [torch.stack([executor.prompt(prompt_of(executor, s, p)) for s, p in zip(sequences, PROMPTS, strict=True)])]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(n_tokens):
        for mine, logits in zip(tokens, steps[-1], strict=True):
            mine.append(int(logits.argmax()))
        positions = tuple(executor.cache.length(sequence) for sequence in sequences)
        steps.append(executor.logits(Batch(tuple(t[-1] for t in tokens), tuple(sequences), positions), range(3)))
    executor.cache.check()
    for sequence in sequences:
        executor.cache.close(sequence)
    return tokens, torch.stack(steps)


def of_family(name: str, folder: Path, kind: str) -> Model:
    save_checkpoint(random_model(name), folder)
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, spec)
    return spec, load_dense(checkpoint) if kind == "fp32" else tiled(spec, checkpoint, "codebook", "int8")


@pytest.mark.parametrize("kind", ["fp32", "int4"])
@pytest.mark.parametrize("name", PLACED)
@pytest.mark.sample(4)
def test_every_placement_of_every_family(tmp_path: Path, name: str, kind: str) -> None:
    """Every third placement and one type of keys and values, others for the next family."""
    number = 2 * PLACED.index(name) + (kind == "int4")
    kv_type = list(KV_BYTES)[number // 3 % len(KV_BYTES)]
    assert_family(of_family(name, tmp_path, kind), kv_type, N_FEW_TOKENS, slice(number % 3, None, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", KV_BYTES)
@pytest.mark.parametrize("kind", ["fp32", "int4"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_placement_of_every_family_at_length(tmp_path: Path, name: str, kind: str, kv_type: str) -> None:
    assert_family(of_family(name, tmp_path, kind), kv_type, N_TOKENS)


def on_cpu(model: Model, kv_type: str = KV_TYPE) -> HostExecutor:
    """The CPU alone, with keys and values of this type."""
    spec = model[0]
    cache = host_cache(spec, CONTEXT_TOKENS, kv_type)
    return open_on_cpu(*model, CONTEXT_TOKENS, 1, cache=cache)


def assert_family(model: Model, kv_type: str, n_tokens: int, chosen: slice = slice(None)) -> None:
    """What the CPU alone makes of the prompts comes out of every placement: not the tokens alone, every bit."""
    spec = model[0]
    reference = on_cpu(model, kv_type)
    expected = texts(reference, n_tokens)
    reference.close()
    every = [*PLACEMENTS.values(), *(split_at(layer) for layer in range(2, spec.n_layers)), split_at(1), ALL_CPU]
    plans = [planned(spec, overrides=pins, context_tokens=CONTEXT_TOKENS, kv_type=kv_type) for pins in every]
    for plan in [*plans[:-2], *map(on_disk, plans[-2:])][chosen]:
        executor = emulated(*model, plan)
        tokens, steps = texts(executor, n_tokens)
        executor.close()
        assert tokens == expected[0]
        assert torch.equal(steps, expected[1])


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "phi3-longrope"])
def test_a_stretched_context_turns_the_same_on_every_device(tmp_path: Path, name: str) -> None:
    """Beyond the original context, as of plain torch: halves with other tables would attend elsewhere."""
    spec, weights = model = of_family(name, tmp_path, "int4")
    assert spec.rope is not None
    n_tokens = spec.rope.scaling.original_context_tokens * 5 // 2
    prompt = [(7 * i) % 90 + 3 for i in range(n_tokens * 3 // 4)]
    plan = planned(spec, overrides=split_at(1), context_tokens=n_tokens)
    cache = CpuKvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, n_tokens, kind=KV_TYPE)
    reference = ReferenceExecutor(spec, weights, n_tokens, cache=cache)
    found = []
    for executor in (reference, open_on_cpu(*model, n_tokens, 1), emulated(*model, plan)):
        sequence = executor.cache.open_new()
        found.append(executor.prompt(prompt_of(executor, sequence, prompt)))
        executor.close()
    expected, *others = found
    for logits in others:
        assert (logits - expected).square().sum() <= ROUNDING * expected.square().sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kv_type", KV_BYTES)
def test_every_placement_of_every_type_of_keys_and_values(tmp_path: Path, kv_type: str) -> None:
    assert_family(of_family("llama-tied", tmp_path, "int4"), kv_type, N_FEW_TOKENS)


def test_a_long_prompt_in_many_chunks(tmp_path: Path) -> None:
    """The GPU begins a chunk while the CPU is in the one before; visiting parts come and go."""
    model = of_family("llama-tied", tmp_path, "int4")
    prompt = [(7 * i) % 90 + 3 for i in range(100)]
    reference = on_cpu(model)
    expected = reference.prompt([Batch.of_sequence(reference.cache.open_new(), 0, prompt)])
    for pins in (split_at(1), PLACEMENTS["head alone on the GPU"], PLACEMENTS["streamed"]):
        plan = planned(model[0], overrides=pins, context_tokens=CONTEXT_TOKENS)
        executor = emulated(*model, replace(visiting(plan), prefill_chunk_tokens=23))
        sequence = executor.cache.open_new()
        assert torch.equal(executor.prompt(prompt_of(executor, sequence, prompt)), expected)


def test_rows_may_wait_at_any_layer(tmp_path: Path) -> None:
    """Several rows through the first layers one by one, then all at once through the rest: the bits of one pass."""
    model = of_family("llama-tied", tmp_path, "int4")
    n_layers, ids = model[0].n_layers, [4, 8, 15, 16, 23]
    reference = on_cpu(model)
    expected = reference.logits(Batch.of_sequence(reference.cache.open_new(), 0, ids), range(len(ids)))
    for pins in (split_at(1), split_at(2), PLACEMENTS["streamed"], PLACEMENTS["attention and FFN apart"]):
        executor = emulated(*model, planned(model[0], overrides=pins, context_tokens=CONTEXT_TOKENS))
        sequence = executor.cache.open_new()
        for exit_layer in range(1, n_layers):
            waiting = [
                executor.run(Batch.of_sequence(sequence, position, [token]), None, range(exit_layer))
                for position, token in enumerate(ids)
            ]
            assert executor.cache.length(sequence) == 0 and executor.cache.length_at(sequence, 0) == len(ids)
            batch = Batch.of_sequence(sequence, 0, ids)
            logits = executor.to_logits(executor.run(batch, torch.cat(waiting), range(exit_layer, n_layers)))
            assert torch.equal(logits, expected)
            executor.cache.truncate(sequence, 0)


@pytest.mark.parametrize("quantizer", ["none", "codebook"])
@pytest.mark.parametrize("name", ["demo", "stories260k"])
@pytest.mark.sample(0)
def test_trained_models_at_two_splits(request: pytest.FixtureRequest, name: str, quantizer: str) -> None:
    assert_trained(request.getfixturevalue(name), quantizer, [split_at(2), PLACEMENTS["streamed"]], 24)


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", KV_BYTES)
@pytest.mark.parametrize("quantizer", ["none", "codebook"])
@pytest.mark.parametrize("name", ["demo", "stories260k"])
def test_trained_models_everywhere(request: pytest.FixtureRequest, name: str, quantizer: str, kv_type: str) -> None:
    folder = request.getfixturevalue(name)
    n_layers = read_spec(folder).n_layers
    everywhere = [*PLACEMENTS.values(), *(split_at(layer) for layer in range(2, n_layers))]
    assert_trained(folder, quantizer, everywhere, N_TOKENS, kv_type)


def assert_trained(
    folder: Path, quantizer: str, everywhere: Sequence[Any], n_tokens: int, kv_type: str | None = None
) -> None:
    """Three stories of a trained model, told by the CPU alone (unplanned where no type is given) and everywhere."""
    options: dict[str, Any] = {"quantizer": quantizer, "threads": 1, "context_tokens": 256}
    cpu = {"limits": Limits(gpu_layers=0, kv_type=kv_type), "profile": reference_profile(LAPTOP)} if kv_type else {}
    with Engine.from_pretrained(folder, **options, **cpu) as engine:
        expected = [result.token_ids for result in engine.generate(OPENINGS, max_new_tokens=n_tokens)]
    for pins in everywhere:
        limits = Limits(overrides=pins, kv_type=kv_type)
        with Engine.from_pretrained(
            folder, profile=reference_profile(LAPTOP), limits=limits, emulate=True, **options
        ) as engine:
            found = [result.token_ids for result in engine.generate(OPENINGS, max_new_tokens=n_tokens)]
        assert found == expected
