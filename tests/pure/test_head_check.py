"""The self-check of draft heads: acceptance on the model's own text, and captured layers that are off by one."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee import Engine
from hetero_ee.config import demo_model_folder
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.draft_head import Dialect
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.captured import captured_layers
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.head_check import FOLDER, HeadCheck, check_head
from hetero_ee.speculation.sources.draft_head_layer import DraftHead
from hetero_ee.speculation.sources.eagle3 import HEAD_ROWS
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import DenseWeight
from tests.draft_heads import HIDDEN, MODEL, VOCAB
from tests.emulation import LAPTOP

N_LAYERS, N_KNOWN, WORD = 9, 12, 5  # tokens from 0 that follow each other, each with the one WORD further
TRAINED_ON = (2, 4, 6)


def after(token_id: int) -> int:
    return (token_id + WORD) % N_KNOWN


def codes(seed: int) -> Tensor:
    """Orthonormal columns, (hidden, known)."""
    return torch.linalg.qr(torch.randn(HIDDEN, N_KNOWN, generator=torch.Generator().manual_seed(seed))).Q


class CyclingModel:
    """A model whose states tell the token after the next, before each layer in a code of its own."""

    prompt_chunk_tokens, pool = 7, None

    def __init__(self) -> None:
        self.spec: ModelSpec = replace(MODEL, n_layers=N_LAYERS, sliding_windows=(None,) * N_LAYERS)
        self.cache = CpuKvCache(1, 1, 1, max_tokens=200, kind="fp32")
        self.weights = ModelWeights({}, {})
        self.capturing: tuple[int, ...] = ()
        self.captured: tuple[Tensor, ...] = ()

    def capture(self, layers: Any) -> None:
        self.capturing = captured_layers(layers, N_LAYERS)

    def hidden(self, batch: Batch) -> Tensor:
        seen = [after(after(token_id)) for token_id in batch.token_ids]
        self.captured = tuple(codes(layer).T[seen] for layer in self.capturing)
        return torch.tensor([[float(after(token_id))] for token_id in batch.token_ids])

    def logits(self, batch: Batch, wanted: list[int]) -> Tensor:
        return torch.eye(VOCAB)[self.hidden(batch)[wanted, 0].long()]

    def prompt(self, chunks: list[Batch]) -> Tensor:
        return self.logits(chunks[-1], [-1])[0]

    def run(self, batch: Batch, hidden: None, layers: range) -> Tensor:
        assert not layers
        return torch.ones(len(batch), HIDDEN)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden.expand(-1, HIDDEN)

    def on_cpu(self, hidden: Tensor) -> Tensor:
        return hidden

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        assert end.vocabulary is not None
        return hidden @ end.vocabulary.rows.dequantize().T


def trained_head(captured: tuple[int, ...]) -> DraftHead:
    """A head that reads those codes before the layers that it was trained on, and sees those before `captured`."""
    out = codes(99)
    matrices = {
        "fc": torch.cat([out @ codes(layer).T for layer in TRAINED_ON], 1),
        "layers.0.attention.qkv": torch.zeros(MODEL.query_size + 2 * MODEL.kv_size, 2 * HIDDEN),
        "layers.0.attention.output": torch.zeros(HIDDEN, MODEL.query_size),
        "layers.0.ffn.gate_up": torch.zeros(2 * MODEL.ffn_size, HIDDEN),
        "layers.0.ffn.down": torch.zeros(HIDDEN, MODEL.ffn_size),
        HEAD_ROWS: out.T.contiguous(),
    }
    vectors = dict.fromkeys(("embedding_norm", "hidden_norm", "head_norm", "layers.0.ffn.norm"), torch.ones(HIDDEN))
    weights = ModelWeights({name: DenseWeight(values) for name, values in matrices.items()}, vectors)
    spec = replace(MODEL, n_layers=1, sliding_windows=(None,))
    return DraftHead(spec, weights, torch.arange(N_KNOWN), Dialect(captured, has_norms=True))


@pytest.mark.parametrize("error", [-1, 0, 1])
def test_layers_off_by_one_are_caught(error: int) -> None:
    captured = tuple(layer - error for layer in TRAINED_ON)
    model: Any = CyclingModel()
    model.capture((3,))
    found = check_head(trained_head(captured), model, [0, after(0)], n_tokens=40)
    assert found.better_offset == error and found.first_drafts[error] == 1.0
    assert model.capturing == (3,)  # as it was
    warning = found.warning("head", captured)
    if error:
        words = "later" if error > 0 else "earlier"
        assert warning is not None and f"one layer {words} 100% would be" in warning and str(list(captured)) in warning
        assert found.acceptance[0] < 0.5
    else:
        assert warning is None and found.acceptance[0] == 1.0 and found.acceptance[1] == 0.0


def test_chance_alone_warns_nobody() -> None:
    """Two shares of 38 drafts each differ by a standard error now and then."""
    shares = {-1: 0.30, 0: 0.55, 1: 0.62}
    found = HeadCheck(38, (0.55,), shares)
    assert found.better_offset == 0 and found.warning("head", TRAINED_ON) is None
    assert HeadCheck(1000, (0.55,), shares).better_offset == 1


def unmeasured_head(folder: Path) -> Path:
    """The demo model's own without what was measured of it."""
    own, folder = demo_model_folder() / "draft_head", folder / "head"
    folder.mkdir()
    config = json.loads((own / "config.json").read_text())
    del config["acceptance"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((own / "model.safetensors").read_bytes())
    return folder


@pytest.mark.sample(0)
def test_an_unmeasured_head_is_checked_when_it_is_first_opened(tmp_path: Path, cache: Path, kernels: Any) -> None:
    head, said = unmeasured_head(tmp_path), list[str]()

    def opened() -> Engine:
        said.clear()
        tell: Any = lambda stage, n_done, n_all: said.append(stage) if not n_all else None  # noqa: E731
        return Engine.from_pretrained(profile=LAPTOP, emulate=True, draft_head=head, gpu_layers=6, progress=tell)

    with opened() as engine:
        assert any("Checked the draft head in head on 6" in each for each in said)
        assert engine.plan is not None and engine.plan.drafts == "sequence"
        assert engine.plan_request is not None and engine.plan_request.statistics.drafts is not None
        first = engine.plan_request.statistics.drafts.acceptance
        assert 0.6 < first[0] < 1 and len(first) == 4 and all(math.isfinite(share) for share in first)
    (kept,) = (cache / FOLDER).iterdir()
    with opened() as engine:
        assert not any("Checked" in each for each in said)
        assert engine.plan_request is not None and engine.plan_request.statistics.drafts is not None
        assert engine.plan_request.statistics.drafts.acceptance == pytest.approx(first)
    kept.write_text('{"acceptance": [2, "x"]}')
    with opened():
        assert any("Checked" in each for each in said)  # what is damaged is made again
