"""Layers that read the keys and values of an earlier layer: on one device with it, wherever that is."""

import pytest
import torch

from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.devices import host_cache
from hetero_ee.planning.parts import model_parts
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from tests.e2e.test_placements import ROUNDING, Model, of_family, on_cpu, texts
from tests.emulation import emulated, planned
from tests.families import config_of
from tests.placements import CONTEXT_TOKENS
from tests.pure.test_gpu_plans import steps
from tests.stand_in_machine import on_stand_in

SPEC = read_spec(config_of("gemma4-e"))  # layer 3 reads those of layer 2, layers 4 and 5 those of layer 1
FULL, NEAR = r"layers\.[145]\.attention", r"layers\.[23]\.attention"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return of_family("gemma4-e", tmp_path_factory.mktemp("shared"), "int4")


def test_only_the_first_of_them_has_bytes_in_a_cache() -> None:
    sizes = [part.kv_bytes(10) for part in model_parts(SPEC, "fp16") if part.label == "attention"]
    assert sizes == [10 * 2 * 2 * 2 * 10, 10 * 2 * 2 * 2 * 16, 10 * 2 * 2 * 2 * 10, 0, 0, 0]


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "pins",
    [((NEAR, "gpu"), (FULL, "cpu")), ((NEAR, "cpu"), (FULL, "stream")), ((r".*\.ffn", "cpu"), (".*attention", "gpu"))],
)
def test_bits_are_those_of_the_cpu_alone(model: Model, pins: tuple[tuple[str, str], ...]) -> None:
    reference = on_cpu(model, "int8")
    expected = texts(reference)
    executor = emulated(*model, planned(model[0], overrides=pins, context_tokens=CONTEXT_TOKENS, kv_type="int8"))
    tokens, steps = texts(executor)
    assert tokens == expected[0] and torch.equal(steps, expected[1])
    executor.close()
    reference.close()


@pytest.mark.sample(0)
@pytest.mark.parametrize("pins", [((".*", "gpu"),), ((NEAR, "gpu"), (FULL, "cpu")), ((".*attention", "stream"),)])
def test_a_gpu_is_near_the_reference(model: Model, pins: tuple[tuple[str, str], ...]) -> None:
    spec = model[0]
    expected = steps(ReferenceExecutor(*model, CONTEXT_TOKENS))
    executor = on_stand_in(*model, planned(spec, overrides=pins, context_tokens=CONTEXT_TOKENS, kv_type="fp32"))
    found = steps(executor)
    assert (found - expected).square().sum() <= ROUNDING * expected.square().sum()
    executor.close()


def test_pins_that_would_divide_them_are_refused() -> None:
    with pytest.raises(UsageError, match=r"layers\.1\.attention and layers\.4\.attention read the same keys"):
        planned(SPEC, overrides=((r"layers\.1\.attention", "gpu"), (r"layers\.4\.attention", "cpu")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("n_layers", range(7))
def test_layers_on_the_gpu_by_number_take_their_readers_along(n_layers: int) -> None:
    plan = planned(SPEC, gpu_layers=n_layers, context_tokens=64)
    on_gpu = [part.decode_placement.on_gpu for part in plan.parts if part.name.endswith("attention")]
    assert on_gpu == [source < n_layers for source in (0, 1, 2, 2, 1, 1)]


def test_a_small_card_gets_all_of_them_or_none() -> None:
    for budget_bytes in (90 * 2**20, 120 * 2**20):
        plan = planned(SPEC, vram_budget_bytes=budget_bytes, context_tokens=2**15)
        placed = {part.layer: part.decode_placement.on_gpu for part in plan.parts if part.name.endswith("attention")}
        assert placed[1] == placed[4] == placed[5] and placed[2] == placed[3]


def test_the_cache_of_a_reader_only_counts_tokens() -> None:
    parts = [part for part in host_cache(SPEC, 64, "fp16").parts if isinstance(part, CpuKvCache)]
    sizes = {part.held_layers: (part.n_kv_heads, part.head_dim) for part in parts}
    assert sizes == {(0, 2): (2, 10), (1,): (2, 16), (3, 4, 5): (0, 0)}
