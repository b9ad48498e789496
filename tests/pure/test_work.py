"""What blocks do, in numbers, and how long that takes; it must be what the planner expects, reckoned another way."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.costs.block_cost import BlockCost
from hetero_ee.costs.product import Product
from hetero_ee.costs.work import Overhead, Work
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.layers.state import KvState
from hetero_ee.models.blocks import BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.costs import Costs
from hetero_ee.runtime.work import BlockWorks, joined_name
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import derived_profile
from tests.device_support import SPEC, round_profile, work
from tests.shipped import DATA_SHEETS

BLOCKS = decoder_blocks(SPEC)
KV_BYTES = {"fp32": 2 * 32 * 4, "fp16": 2 * 32 * 2, "int8": 2 * (32 + 4 * 4)}  # of one position, 4 heads of 8


def works_of(batch: Batch, spec: ModelSpec = SPEC) -> list[Work]:
    return BlockWorks(spec, decoder_blocks(spec), "fp32").through(decoder_blocks(spec), batch)


def seconds(work: Work, profile: HardwareProfile, on_gpu: bool = False) -> float:
    times = profile.gpu if on_gpu else profile.cpu_with(0)
    assert times is not None
    return work.seconds(times, profile.disk_read_bytes_per_s.value, SPEC)


def test_the_blocks_of_a_pass() -> None:
    works = works_of(Batch.of_sequence(0, 20, [1, 2, 3]))
    assert [each.name for each in works] == [block.name for block in BLOCKS]
    assert {each.m for each in works} == {3}
    embedding, attention, ffn, *_, final_norm, head = works
    assert embedding == Work("embedding", 3, context_tokens=23, kv_type="fp32") and final_norm.products == ()
    assert attention.products == (("int4", 96, 32), ("int4", 32, 32))
    assert attention.state == KvState(4, 4, 8, None) and attention.kv_type == "fp32" and attention.context_tokens == 23
    assert attention.overhead is Overhead.HALF_LAYER
    assert ffn.products == (("int4", 128, 32), ("int4", 32, 64))
    assert ffn.state is None and ffn.overhead is Overhead.HALF_LAYER
    assert head.products == (("int8", 48, 32),) and head.overhead is Overhead.PASS


def test_each_term_of_activations_costs_products_as_much_as_a_token() -> None:
    costs = [BlockCost.of(replace(SPEC, activation_terms=n_terms), BLOCKS[1]) for n_terms in (1, 2)]
    for on_gpu in (False, True):
        times = round_profile().gpu if on_gpu else round_profile().cpu_with(0)
        assert costs[1].work("", 3).products_s(times) == costs[0].work("", 6).products_s(times)
        assert costs[1].work("", 3).overhead_s(times, SPEC) == costs[0].work("", 3).overhead_s(times, SPEC)


def positions_read(work: Work) -> int:
    assert isinstance(work.state, KvState)
    return work.state.positions_read(work.m, work.context_tokens)


@pytest.mark.parametrize(
    ("window", "first", "m", "read"),
    [
        (None, 0, 1, 1),
        (None, 40, 2, 42),
        (8, 3, 1, 4),  # the window is not full
        (8, 40, 1, 8),
        (8, 40, 4, 11),  # the first row sees 8, each other one more
        (8, 0, 20, 20),
    ],
)
def test_positions_that_attention_reads(window: int | None, first: int, m: int, read: int) -> None:
    spec = replace(SPEC, sliding_windows=(window,) * SPEC.n_layers)
    found = works_of(Batch.of_sequence(0, first, [0] * m), spec)[1]
    assert positions_read(found) == read


@pytest.mark.parametrize("window", [None, 1, 5, 8, 20, 64])
@pytest.mark.parametrize(("first", "m"), [(0, 1), (0, 20), (3, 20), (40, 20), (100, 1), (7, 64)])
def test_positions_that_a_token_sees_on_average(window: int | None, first: int, m: int) -> None:
    seen = [min(position + 1, window or position + 1) for position in range(first, first + m)]
    assert KvState(4, 4, 8, window).mean_positions(m, first + m) == pytest.approx(sum(seen) / m)


def test_of_several_sequences_the_longest_counts() -> None:
    batch = Batch.joined([Batch.of_sequence(0, 9, [1]), Batch.of_sequence(1, 30, [1]), Batch.of_sequence(2, 0, [1])])
    assert positions_read(works_of(batch)[1]) == 31
    begun = works_of(Batch.joined([Batch.of_sequence(i, 0, [1]) for i in range(5)]))[1]
    assert positions_read(begun) == 5  # each row reads itself


def test_seconds_by_hand() -> None:
    """On the CPU: 4 a tile of 16 x 32, 0.5 for half a layer, attention 1 + 16 / 8."""
    attention, ffn, head = (works_of(Batch.of_sequence(0, 15, [1]))[i] for i in (1, 2, -1))
    profile = round_profile()
    assert seconds(attention, profile) == (6 + 2) * 4 + 0.5 + 3
    assert seconds(ffn, profile) == (8 + 4) * 4 + 0.5
    assert seconds(head, profile) == 3 * 8 + 2
    assert seconds(ffn, profile, on_gpu=True) == seconds(ffn, profile) / 4


@pytest.mark.parametrize("timed", KV_BYTES)
@pytest.mark.parametrize("kept", KV_BYTES)
def test_few_rows_read_keys_and_values_as_they_are_kept(timed: str, kept: str) -> None:
    profile = round_profile(timed)
    attention = Work("a", 1, state=KvState(4, 4, 8, None), kv_type=kept)
    few, many = replace(attention, context_tokens=8), replace(attention, m=17, context_tokens=24)
    assert seconds(few, profile) == 2 * KV_BYTES[kept] / KV_BYTES[timed]
    assert seconds(many, profile) == pytest.approx(17 * (33 + 8 / 8) / 33)


def test_a_layout_without_times_is_refused() -> None:
    with pytest.raises(KeyError):
        seconds(Work("a", 1, (Product("fp32", 16, 32),)), round_profile())


def test_names_of_several_works() -> None:
    works = [work("a"), work("b"), work("c")]
    assert [joined_name(works[:n]) for n in range(4)] == ["other work", "a", "a to b", "a to c"]


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("kv_type", KV_BYTES)
@given(
    n_rows=st.integers(1, 64),
    first=st.integers(0, 4000),
    place=st.sampled_from(["cpu", "gpu", "disk"]),
    sheet=st.sampled_from(DATA_SHEETS),
)
@settings(deadline=None, max_examples=30)
def test_the_planner_expects_the_same(
    window: int | None, kv_type: str, n_rows: int, first: int, place: str, sheet: Any
) -> None:
    """Two ways to the same metrics: the planner's by parts, the emulated device's by works."""
    spec = read_spec(
        {
            "model_type": "mistral",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
            "sliding_window": window,
            "max_position_embeddings": 8192,
        }
    )
    profile = derived_profile(sheet, "2026-01-01")
    costs, parts = Costs(spec, profile), {part.name: part for part in model_parts(spec, kv_type)}
    times = profile.gpu if place == "gpu" else profile.cpu_with(0)
    assert times is not None
    blocks = [block for block in decoder_blocks(spec) if block.kind is not BlockKind.FINAL_NORM]
    if place == "disk":  # the planner counts the final norm with the head
        blocks = [block for block in blocks if block.layer is not None]
    batch = Batch.of_sequence(0, first, [1] * n_rows)
    works = BlockWorks(spec, blocks, kv_type).through(blocks, batch, from_disk=place == "disk")
    for each in works:
        expected = costs.part_s(parts[each.name], Placement(place), n_rows, first + n_rows)
        found = each.seconds(times, profile.disk_read_bytes_per_s.value, spec)
        assert found == pytest.approx(expected, rel=1e-12), each.name


def test_one_block_by_itself() -> None:
    assert BlockCost.of(SPEC, BLOCKS[-1]).work("head", 5).products == (("int8", 48, 32),)
