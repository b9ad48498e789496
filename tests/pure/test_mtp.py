"""MTP layers: read from each layout, computed as transformers' classes compute them, stored with their model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_ee.errors import CheckpointError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.models.draft_head import mtp_names, mtp_spec
from hetero_ee.options.engine import MTP_HEAD
from hetero_ee.planning.planner import shapes_sha256
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation.opening import DraftKnowledge
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.head_source import MTP_ACCEPTANCE, head_facts, read_head
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import as_stored, load_dense
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from hetero_ee_profiles.reference import reference_profile
from tests.draft_sources import taken
from tests.emulation import LAPTOP
from tests.families import edit_config, random_model, save_checkpoint
from tests.gguf_models import write_gguf
from tests.mtp_models import DENSE, MtpReference, add_mtp, gguf_mtp, mtp_model, with_single_experts

N_TOKENS, N_DRAFTS = 14, 4


def opened(folder: Path) -> ReferenceExecutor:
    spec = read_spec(folder)
    weights = load_dense(open_checkpoint(folder, spec))
    return ReferenceExecutor(as_stored(spec, weights), weights, max_tokens=64)


def drafts_of(target: Executor, model: Any, tokens: list[int]) -> tuple[list[int], list[Tensor]]:
    """Drafts after the tokens, and the logits of each."""
    source, found = open_draft_head(MTP_HEAD, target), list[Tensor]()
    with torch.no_grad():
        states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    source.observe(0, 0, tokens[:-1], states)
    drafts = taken(source, tokens, N_DRAFTS, lambda logits, _: found.append(logits) or int(logits.argmax()))
    return [draft.token_id for draft in drafts], found


def expected_drafts(model: Any, layer: Any, tokens: list[int], n_drafts: int) -> tuple[list[int], list[Tensor]]:
    """Drafts after the tokens, and the logits of each: the layer reads true states, then its own."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        states = model.model(torch.tensor([tokens])).last_hidden_state[0][: len(tokens) - 1]
        following, logits = list(tokens[1:]), []
        for _ in range(n_drafts):
            predicted = layer(embedding[following], states)[-1:]
            logits.append(head @ predicted[0])
            states = torch.cat([states, predicted])
            following.append(int(logits[-1].argmax()))
    return following[len(tokens) - 1 :], logits


def random_tokens(n: int = N_TOKENS) -> list[int]:
    return torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(1)).tolist()


def check_drafts(target: Executor, model: Any, layer: Any) -> None:
    """Drafts and their logits are those of transformers' classes, but for keys and values in fp16."""
    expected, logits = expected_drafts(model, layer, random_tokens(), N_DRAFTS)
    drafts, found = drafts_of(target, model, random_tokens())
    assert drafts == expected
    for ours, theirs in zip(found, logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)


WITH_EXPERTS = ("qwen3.5-moe", "qwen3-next")


@pytest.mark.parametrize("changes", [{}, DENSE, *({"family": name} for name in WITH_EXPERTS)], ids=str)
def test_drafts_are_those_of_transformers_classes(tmp_path: Path, changes: dict[str, Any]) -> None:
    model, layer = mtp_model(tmp_path, **changes)
    check_drafts(opened(tmp_path), model, layer)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_may_be_tensors_of_their_own(tmp_path: Path, family: str) -> None:
    model, layer = mtp_model(tmp_path, family)
    edit_config(tmp_path, mtp_num_hidden_layers=None if family == "qwen3-next" else 1)  # whose file lacks it
    file = tmp_path / "model.safetensors"
    save_file(with_single_experts(load_file(file)), file, {"format": "pt"})
    check_drafts(opened(tmp_path), model, layer)


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_a_gguf_file_has_the_same_layer(tmp_path: Path, family: str) -> None:
    pytest.importorskip("gguf")
    model = random_model(family)
    layer = MtpReference(model.config)
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F32", **gguf_mtp(layer, model.config.num_hidden_layers))
    check_drafts(opened(gguf_folder(tmp_path / "m.gguf", configuration_only=True)), model, layer)


def test_a_stores_layer_is_quantized_with_the_model_and_counted(tmp_path: Path) -> None:
    model, _ = mtp_model(tmp_path / "hf")
    spec, quantization = read_spec(tmp_path / "hf"), Quantization.of_model(tmp_path / "hf", None)
    weights = open_store(convert(tmp_path / "hf", spec, tmp_path / "store", quantization), spec)
    target = ReferenceExecutor(as_stored(spec, weights), weights, max_tokens=64)
    head = read_head(MTP_HEAD, target)
    assert head.weights.matrices.keys() == {
        "fc",
        *(f"layers.0.{each}" for each in ("attention.qkv", "attention.output", "ffn.gate_up", "ffn.down")),
    }
    assert all(weight.layout == "int4" for weight in head.weights.matrices.values())
    mine = [target.weights.matrices[name] for name in mtp_names(target.spec).values() if name in weights.matrices]
    assert {id(weight) for weight in mine} == {id(weight) for weight in head.weights.matrices.values()}
    costs = HeadCosts(head_facts(MTP_HEAD, target.spec), target.spec, reference_profile(LAPTOP), 1)
    shared = costs.memory_bytes(64, on_gpu=False) - head.weights.n_bytes
    kv_bytes, state_bytes = 2 * 2 * 64 * head.spec.kv_size, 4 * 256 * spec.hidden_size
    assert shared == kv_bytes + state_bytes
    drafts, _ = drafts_of(target, model, random_tokens())
    assert len(drafts) == N_DRAFTS


def test_names_of_other_prefixes_and_layers_are_read_or_ignored(tmp_path: Path) -> None:
    model, layer = mtp_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {"mtp.layers.1.input_layernorm.weight": torch.ones(48)}
    save_file(
        {name.replace("mtp.", "model.mtp."): values for name, values in tensors.items()} | further,
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    check_drafts(opened(tmp_path), model, layer)


def test_a_checkpoint_that_holds_none_has_none_whatever_its_configuration_says(tmp_path: Path) -> None:
    save_checkpoint(random_model("qwen3.5"), tmp_path)
    add_mtp(tmp_path, {})
    target = opened(tmp_path)
    assert read_spec(tmp_path).mtp is not None and target.spec.mtp is None
    assert DraftKnowledge.found(None, None, tmp_path, target.spec, print).draft_head is None
    with pytest.raises(UsageError, match="no MTP layer; leave it out, or name"):
        DraftKnowledge.found(None, MTP_HEAD, tmp_path, target.spec, print)


def test_a_checkpoint_that_says_nothing_of_it_ignores_it(tmp_path: Path) -> None:
    mtp_model(tmp_path)
    edit_config(tmp_path, mtp_num_hidden_layers=None)
    assert opened(tmp_path).spec.mtp is None
    edit_config(tmp_path, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)
    assert opened(tmp_path).spec.mtp is None


def test_an_incomplete_layer_is_refused(tmp_path: Path) -> None:
    mtp_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mtp.pre_fc_norm_hidden.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.3.hnorm.weight"):
        opened(tmp_path)


def test_words_choose_it_or_no_head(tmp_path: Path) -> None:
    mtp_model(tmp_path)
    spec = opened(tmp_path).spec

    def request(name: str | None) -> PlanRequest:
        return PlanRequest.of({"draft_head": name, "profile": "auto"})

    def found(name: str | None) -> DraftKnowledge:
        return DraftKnowledge.found(None, request(name).draft_head, tmp_path, spec, print)

    assert found(None) == DraftKnowledge(draft_head=MTP_HEAD)
    assert found("mtp") == found("draft-mtp") == DraftKnowledge(draft_head=MTP_HEAD, is_asked=True)
    assert found("none") == DraftKnowledge()
    assert not request("none").needs_plan and request("mtp").needs_plan
    rates = found(None).statistics(spec, reference_profile(LAPTOP), 1).drafts
    assert rates is not None and rates.acceptance == MTP_ACCEPTANCE and rates.source == "the model's MTP layer"


def test_the_layer_is_a_model_of_one_layer(tmp_path: Path) -> None:
    mtp_model(tmp_path)
    spec = opened(tmp_path).spec
    head = mtp_spec(spec)
    assert head.n_layers == 1 and head.mtp is None and head.layer(0) == spec.mtp == spec.layer(1)
    assert shapes_sha256(spec) == shapes_sha256(replace(spec, mtp=None))  # so that plans are of either
    layouts = ("layers.3.mtp.fc", "int8"), ("layers.3.ffn.down", "int6")
    assert mtp_spec(replace(spec, matrix_layouts=layouts)).matrix_layouts == (
        ("fc", "int8"),
        ("layers.0.ffn.down", "int6"),
    )
