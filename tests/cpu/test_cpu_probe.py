"""The CPU's probes at tiny shapes: how often, over how many bytes, at which rows and contexts."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime import overhead_probe
from hetero_ee.runtime.overhead_probe import probe_overheads, shallow
from hetero_ee_cpu_ops.team import Team
from hetero_ee_profiles import cpu_probe
from hetero_ee_profiles.cpu_probe import probe_attention, probe_products, probe_read_bytes_per_s
from hetero_ee_profiles.probe_samples import ProductSamples, ProductShape
from tests.families import config_of

LAYER = (ProductShape("int4", 32, 64, 3), ProductShape("int4", 48, 40, 3))
HEAD = ProductShape("int8", 40, 64, 1)
SHAPES = (*LAYER, HEAD)
LAYER_BYTES, HEAD_BYTES = sum(shape.n_bytes for shape in LAYER), HEAD.n_bytes
TICK_S = 0.25


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(1)
    yield made
    made.close()


def ticking() -> Callable[[], float]:
    """A clock that is a tick ahead at each look: what is timed by itself takes one."""
    times = itertools.count()
    return lambda: next(times) * TICK_S


def test_memory_read(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_probe, "READ_BYTES", 2**16)
    assert probe_read_bytes_per_s(team, 4, ticking()) == [2**16 / TICK_S] * 4


def test_bytes_of_a_shape_are_tiles_and_scales() -> None:
    assert LAYER[1].grid == (3, 2) and LAYER[1].n_bytes == 6 * (256 + 32) and HEAD.n_bytes == 3 * 2 * (512 + 32)


def products(team: Team, max_cycle_bytes: int, rows: tuple[int, ...] = (1,)) -> list[ProductSamples]:
    return probe_products(team, SHAPES, rows, 2, max_cycle_bytes, ticking())


def test_every_shape_is_timed_at_every_number_of_rows(team: Team) -> None:
    found = products(team, 2**20, (1, 3))
    assert {(p.shape, p.m) for p in found} == {(shape, m) for shape in SHAPES for m in (1, 3)}
    for p in found:
        assert p.seconds == (TICK_S,) * 2 * p.shape.n_layers  # two rounds beside the one that compiles


@pytest.mark.parametrize(
    "max_bytes, n_kept",
    [(2**20, 3), (2 * LAYER_BYTES + HEAD_BYTES, 2), (2 * LAYER_BYTES + HEAD_BYTES - 1, 1), (1, 1)],
)
def test_a_small_model_is_cycled_whole_and_a_large_one_in_part(team: Team, max_bytes: int, n_kept: int) -> None:
    for p in products(team, max_bytes):
        assert p.cycle_bytes == n_kept * LAYER_BYTES + HEAD_BYTES
        assert len(p.seconds) == 2 * (1 if p.shape is HEAD else n_kept)


def test_attention_is_timed_in_each_layer(team: Team) -> None:
    found = probe_attention(team, (6, 2, 8), 3, [(1, 16), (4, 20)], 2, ticking())
    assert [(a.m, a.context_tokens, a.seconds) for a in found] == [(1, 16, (TICK_S,) * 6), (4, 20, (TICK_S,) * 6)]


def test_attention_takes_turns_over_so_many_bytes_at_most(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_probe, "CACHE_BYTES", 2 * (2 * 2 * 16 * 8 * 4) + 1)  # of two layers and a bit
    assert len(probe_attention(team, (6, 2, 8), 3, [(1, 16)], 1, ticking())[0].seconds) == 2


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_overheads_run_at_every_point(family: str) -> None:
    spec = ModelSpec.from_hf(config_of(family))
    found = probe_overheads(spec, 1, [(1, 16), (4, 16)], 3, ticking())
    assert [(o.m, o.context_tokens, len(o.layer_s), len(o.whole_pass_s)) for o in found] == [
        (1, 16, 3, 3),
        (4, 16, 3, 3),
    ]
    # Both depths take one tick of this clock: nothing is left for a layer, everything for the pass.
    assert all(0 < layer_s < 1e-6 for o in found for layer_s in o.layer_s)
    assert found[0].whole_pass_s == pytest.approx((TICK_S,) * 3)


def test_a_layer_is_the_difference_of_two_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2e-3, 10e-3])
    monkeypatch.setattr(overhead_probe, "timed", lambda run, clock: next(times))
    (found,) = probe_overheads(ModelSpec.from_hf(config_of("llama")), 1, [(1, 16)], 1, ticking())
    assert found.layer_s == pytest.approx([1e-3]) and found.whole_pass_s == pytest.approx([1e-3])


def test_a_model_of_another_depth_keeps_its_widths() -> None:
    spec = ModelSpec.from_hf(config_of("llama"))
    deep = shallow(spec, 9)
    assert (deep.n_layers, len(deep.sliding_windows)) == (9, 9)
    assert (deep.hidden_size, deep.ffn_size, deep.n_kv_heads) == (spec.hidden_size, spec.ffn_size, spec.n_kv_heads)
