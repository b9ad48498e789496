"""The CPU's figures within their seconds: models of all sizes, and machines that are slow, by a clock of their own."""

from dataclasses import replace
from typing import Any

import pytest

from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling import cpu as cpu_profiling
from hetero_ee.profiling.cpu import measured_cpu, probed_model
from hetero_ee.profiling.preset import (
    FULL,
    LEAST_PASSES,
    LEAST_TOKENS,
    QUICK,
    USUAL_PASSES,
    Preset,
    attention_points,
    product_shapes,
)
from hetero_ee_profiles.hardware import DeviceTimes
from tests.cpu.test_pass_probe import ORIGIN, spec_of
from tests.stand_in_cpu import WorkClock

BYTES_PER_S, ROWS_AT_ONCE = 4e10, 8  # two cores of a server; rows that cost no more than one
HEAD_POSITION_S = 3e-8  # of attention: one head at one position, for one row
# Bytes of the layers and the head that a quick profile reads in a pass, and heads: 1B, 7B, 13B and 70B.
SHAPES = {"1b": (2.5e8, 22 * 8), "7b": (1.7e8, 32), "13b": (2.4e8, 40), "70b": (5e8, 64)}


class MachineClock(WorkClock):
    """A large model's passes, computed by a small one. slowness: of the machine."""

    def __init__(self, patch: pytest.MonkeyPatch, spec: ModelSpec, shape: str, slowness: float) -> None:
        n_bytes, n_heads = SHAPES[shape]
        small_bytes = sum(each.n_bytes * each.n_layers for each in product_shapes(spec))
        self._byte_s = slowness * n_bytes / BYTES_PER_S / small_bytes
        self._position_s = slowness * n_heads * HEAD_POSITION_S / spec.n_layers
        super().__init__(patch)

    def product_s(self, n_bytes: int, m: int) -> float:
        return n_bytes * self._byte_s * max(1.0, m / ROWS_AT_ONCE)

    def _attention_s(self, places: Any, window: int | None) -> float:
        return self._position_s / 1e-7 * super()._attention_s(places, window)


def measured(patch: pytest.MonkeyPatch, shape: str, slowness: float, of: Preset) -> tuple[DeviceTimes, float]:
    """What is found, and the seconds that it took."""
    patch.setattr(cpu_profiling, "_read_bytes_per_s", lambda *arguments: [1e9])
    spec = spec_of("llama", 1)
    clock = MachineClock(patch, spec, shape, slowness)
    points = attention_points(of)
    model = probed_model(spec, product_shapes(spec), of.cycle_bytes, max(tokens for _, tokens in points))
    return measured_cpu(model, points, 2, 2**30, of, of.cpu_budget_s, ORIGIN, clock), clock.now_s


def counts(found: DeviceTimes) -> list[int]:
    return [each.time.count for each in found.attentions]


def is_least(found: DeviceTimes) -> bool:
    """Whether nothing more could have been given up."""
    rows = max(each.m for each in found.attentions)
    behind = [each for each in found.attentions if each.m > MAX_DECODE_TOKENS and each.context_tokens > each.m]
    return rows == LEAST_TOKENS and not behind and set(counts(found)) == {LEAST_PASSES}


@pytest.mark.parametrize("slowness", [1, 3, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quick_profile_keeps_to_its_seconds(monkeypatch: pytest.MonkeyPatch, shape: str, slowness: int) -> None:
    found, seconds = measured(monkeypatch, shape, slowness, QUICK)
    assert seconds <= QUICK.cpu_budget_s or is_least(found)
    beyond = (("1b", 10), ("13b", 10), ("70b", 10))  # at most 4.4 seconds: nothing is left to give up
    assert is_least(found) == ((shape, slowness) in beyond)
    assert all(each.time.p20 <= each.time.value <= each.time.p80 for each in found.attentions)


@pytest.mark.parametrize("shape, slowness", [("7b", 1), ("70b", 10)])
def test_a_full_profile_keeps_to_its_seconds(monkeypatch: pytest.MonkeyPatch, shape: str, slowness: int) -> None:
    found, seconds = measured(monkeypatch, shape, slowness, FULL)
    assert seconds <= FULL.cpu_budget_s
    assert slowness > 1 or (max(each.m for each in found.attentions) == 512 and min(counts(found)) >= USUAL_PASSES)


def test_what_a_slower_machine_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats of decoding last."""
    found = []
    for slowness in (1, 2, 4, 8, 16):
        with monkeypatch.context() as patch:
            found.append(measured(patch, "7b", slowness, QUICK)[0])
    most_rows = [max(each.m for each in times.attentions) for times in found]
    assert most_rows == sorted(most_rows, reverse=True) and (most_rows[0], most_rows[-1]) == (128, LEAST_TOKENS)
    decoding = [times.attentions[0].time.count for times in found]
    assert decoding == sorted(decoding, reverse=True)
    for rows, n_passes in zip(most_rows, decoding, strict=True):
        assert n_passes >= USUAL_PASSES or rows == LEAST_TOKENS


def test_a_head_of_many_tokens_is_cut() -> None:
    spec = replace(spec_of("llama"), vocab_size=2**20)
    shapes = product_shapes(spec)
    model = probed_model(spec, shapes, 2**27, 16)
    assert 2**24 < model.weights.n_bytes < 1.1 * (2**25 + sum(each.n_bytes * each.n_layers for each in shapes[:-1]))
    assert model.spec.n_layers == spec.n_layers
    assert probed_model(replace(spec, vocab_size=100), shapes, 2**27, 16).spec.vocab_size == 100


def test_chunks_pass_no_more_layers_than_a_cache_can_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("llama")
    shapes = product_shapes(spec)
    assert probed_model(spec, shapes, 2**30, 16).n_chunk_layers == spec.n_layers
    layers_bytes = sum(each.n_bytes * each.n_layers for each in shapes[:-1])
    monkeypatch.setattr(cpu_profiling, "CHUNK_BYTES", shapes[-1].n_bytes + 0.7 * layers_bytes)
    assert probed_model(spec, shapes, 2**30, 16).n_chunk_layers == 2
