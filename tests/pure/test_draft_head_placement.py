"""A draft head on an emulated device: the same drafts, and what the time line says they took."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_ee.errors import DeviceMemoryError
from hetero_ee.kv.batch import Batch
from hetero_ee.layers.rope import RopeScaling
from hetero_ee.models.draft_head import EAGLE_1
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.emulated import EmulatedCopier
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadWorks
from hetero_ee.speculation.sources.draft_head_opening import DraftHeadOpener
from hetero_ee.speculation.sources.source import Draft
from tests.device_support import EmulatedMachine
from tests.draft_heads import (
    FFN,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    MODEL,
    BareTarget,
    draft_head_layer,
    head_source,
    head_weights,
    random_text,
)
from tests.draft_sources import greedy, sampling, taken

SPEC = dataclasses.replace(MODEL, n_layers=1, sliding_windows=(None,))
TOKENS, STATES = random_text(6)
N_DRAFTS = 3


def drafts_of(source: DraftHeadSource, states: torch.Tensor = STATES) -> list[Draft]:
    source.observe(0, 0, TOKENS, states)
    return taken(source, [*TOKENS, 4], N_DRAFTS)


def source_of(devices: EmulatedMachine | None, on_gpu: bool = False) -> DraftHeadSource:
    machine = None if devices is None else Machine(devices.cpu, devices.gpu, devices.link, EmulatedCopier())
    layer = draft_head_layer(head_weights(), 64, machine=machine, on_gpu=on_gpu)
    return head_source(layer, BareTarget())


@pytest.mark.parametrize("states_on_gpu", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_draft_takes_the_devices_time_and_changes_no_number(on_gpu: bool, states_on_gpu: bool) -> None:
    devices = EmulatedMachine(spec=SPEC)
    states = EmulatedCopier().to_gpu(STATES) if states_on_gpu else STATES
    assert drafts_of(source_of(devices, on_gpu), states) == drafts_of(source_of(None))
    spans = [(span.lane, span.name) for span in devices.timeline.spans if span.end_s > span.start_s]
    device = "gpu" if on_gpu else "cpu"
    expected = [(device, "draft_head.attention"), (device, "draft_head.ffn")]
    for one in expected:
        assert spans.count(one) == N_DRAFTS, spans
    transfers = [(lane, name) for lane, name in spans if lane not in ("cpu", "gpu")]
    crossing = [("rows_to_gpu" if on_gpu else "rows_to_cpu", "verified states")] if on_gpu != states_on_gpu else []
    assert transfers == crossing + [("rows_to_gpu", "draft embedding")] * (N_DRAFTS if on_gpu else 0)


def test_a_guess_is_one_layers_products_and_fc() -> None:
    batch = Batch.of_sequence(0, 10, [1, 2])
    works = DraftHeadWorks(SPEC, EAGLE_1).guess(batch)
    layer = (HIDDEN + 2 * KV_HEADS * HEAD_DIM) * HIDDEN + HIDDEN * HIDDEN + 3 * FFN * HIDDEN
    assert sum(batch * columns for work in works for _, batch, columns in work.products) == layer + 2 * HIDDEN * HIDDEN
    assert works[0].state is not None and works[0].context_tokens == 12
    assert all(work.m == 2 for work in works)


def test_another_layer_begins_with_nothing() -> None:
    """As after another plan was opened: drafts go on with what is observed from then on."""
    layers = [draft_head_layer(head_weights(), 64) for _ in range(2)]
    now: list[Any] = layers[:1]
    source = DraftHeadSource(lambda: now[0], BareTarget())
    expected = drafts_of(source)
    drafting = source.drafts(0, [*TOKENS, 4], sampling(source, greedy))
    assert next(drafting) == expected[0]
    now[0] = layers[1]
    assert list(drafting) == [] and taken(source, [*TOKENS, 4], N_DRAFTS) == []
    source.truncate(0, 2)
    source.close(0)
    assert drafts_of(source) == expected


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_it_turns_alike_everywhere_while_the_context_grows(kind: str) -> None:
    """By the longest one, which is beyond the head's original one; that of now is not."""
    assert SPEC.rope is not None
    factors = [(each,) * (SPEC.rope.n_features // 2) for each in (1.0, 2.0)]
    rope = dataclasses.replace(SPEC.rope, scaling=RopeScaling(kind, 4.0, 1.0, 4.0, 100, *factors))
    opened_with: list[ModelSpec] = []

    def open_beside(spec: ModelSpec, *_: object) -> None:
        opened_with.append(spec)
        raise DeviceMemoryError("no room.")

    target: Any = BareTarget()
    target.cache.max_tokens, target.most_tokens, target.pool = 64, 1000, None
    gpu = SimpleNamespace(machine=SimpleNamespace(open_beside=open_beside), plan=SimpleNamespace(draft_device="gpu"))
    for running in (None, lambda: gpu):
        spec: Any = dataclasses.replace(SPEC, rope=rope)
        opener = DraftHeadOpener(spec, head_weights().weights, target, running, lambda text: None)  # type: ignore[arg-type]
        layer: Any = opener()
        opened_with += [] if layer is None else [layer._executor.spec]
    expected = rope.inverse_frequencies(1000)
    assert len(opened_with) == 2 and rope.inverse_frequencies(64) != expected
    for each in opened_with:
        assert each.rope is not None and each.rope.inverse_frequencies(64) == expected
