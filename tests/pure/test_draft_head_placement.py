"""A draft head on an emulated device: the same drafts, and what the time line says they took."""

import dataclasses
from typing import Any

import pytest
import torch

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.emulated import EmulatedCopier
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import PlacedDraftHead, draft_head_works
from hetero_ee.speculation.sources.draft_head_opening import draft_head_layer
from hetero_ee.speculation.sources.source import Draft
from hetero_ee.weights.weight import DenseWeight
from tests.device_support import EmulatedMachine
from tests.draft_heads import FFN, HEAD_DIM, HIDDEN, KV_HEADS, MODEL, BareTarget, head_weights, random_text
from tests.draft_sources import taken

SPEC = dataclasses.replace(MODEL, n_layers=1, sliding_windows=(None,))
DRAFT_TOKENS = torch.tensor([2, 5, 17])
TOKENS, STATES = random_text(6)
N_DRAFTS = 3


def drafts_of(source: DraftHeadSource) -> list[Draft]:
    source.observe(0, 0, TOKENS, STATES)
    return taken(source, [*TOKENS, 4], N_DRAFTS)


def source_of(devices: EmulatedMachine | None, on_gpu: bool = False, trimmed: bool = False) -> DraftHeadSource:
    head = DenseWeight(BareTarget().head[DRAFT_TOKENS]) if trimmed else None
    layer: Any = draft_head_layer(head_weights(), 64, lm_head=head)
    if devices is not None:
        machine = Machine(devices.cpu, devices.gpu, devices.link, EmulatedCopier())
        layer = PlacedDraftHead(layer, SPEC, lambda: machine, on_gpu=on_gpu)
    return DraftHeadSource(layer, BareTarget(), DRAFT_TOKENS if trimmed else None)


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_draft_takes_the_devices_time_and_changes_no_number(on_gpu: bool, trimmed: bool) -> None:
    devices = EmulatedMachine(spec=SPEC)
    assert drafts_of(source_of(devices, on_gpu, trimmed)) == drafts_of(source_of(None, trimmed=trimmed))
    spans = [(span.lane, span.name) for span in devices.timeline.spans if span.end_s > span.start_s]
    device = "gpu" if on_gpu else "cpu"
    expected = [(device, "draft_head.attention"), (device, "draft_head.ffn")]
    if trimmed:
        expected.append((device, "draft_head.vocabulary"))
    for one in expected:
        assert spans.count(one) == N_DRAFTS, spans
    transfers = [name for lane, name in spans if lane not in ("cpu", "gpu")]
    once = ["draft embedding", *(["draft logits"] if trimmed else [])]
    assert transfers == (once * N_DRAFTS if on_gpu else [])


def test_a_guess_is_one_layers_products_and_fc() -> None:
    batch = Batch.of_sequence(0, 10, [1, 2])
    works = draft_head_works(SPEC, batch)
    layer = (HIDDEN + 2 * KV_HEADS * HEAD_DIM) * HIDDEN + HIDDEN * HIDDEN + 3 * FFN * HIDDEN
    assert sum(batch * columns for work in works for _, batch, columns in work.products) == layer + 2 * HIDDEN * HIDDEN
    assert works[0].attention is not None and works[0].attention.n_positions == 12
    assert all(work.m == 2 for work in works)


def test_without_a_gpu_it_is_the_cpus_work() -> None:
    """As after a GPU was lost."""
    devices = EmulatedMachine(spec=SPEC)
    machine = Machine(devices.cpu, None, None, EmulatedCopier())
    layer: Any = PlacedDraftHead(draft_head_layer(head_weights(), 64), SPEC, lambda: machine, on_gpu=True)
    assert drafts_of(DraftHeadSource(layer, BareTarget(), None)) == drafts_of(source_of(None))
    assert {span.lane for span in devices.timeline.spans} == {"cpu"}
