"""Mixtures of experts: checkpoints with one tensor of all experts or tensors of each, routers, impossible fields."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.layers.moe import OF_CHOSEN, SIGMOID, SOFTMAX, RouterSpec
from hetero_ee.layers.ops import Router
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.weights.checkpoint import Checkpoint
from tests.families import config_of, edit_config, random_model, save_checkpoint

FAMILIES = ("qwen3-moe", "qwen3.5-moe")
FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
OF_EACH = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj)\.weight")


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with one tensor of all experts."""
    found = {name: tensor for name, tensor in tensors.items() if not OF_EACH.fullmatch(name)}
    matches = [match for match in map(OF_EACH.fullmatch, tensors) if match]
    for prefix in {match[1] for match in matches}:
        n_experts = 1 + max(int(match[2]) for match in matches if match[1] == prefix)
        parts = {
            part: torch.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(n_experts)])
            for part in ("gate", "up", "down")
        }
        found[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        found[f"{prefix}.down_proj"] = parts["down"]
    return found


def of_each(tensors: dict[str, torch.Tensor], which: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The same weights with tensors of each expert for the matrices `which`."""
    found = {}
    for name, tensor in tensors.items():
        match = FUSED.fullmatch(name)
        if match is None or match[2] not in which:
            found[name] = tensor
            continue
        parts = ("down_proj",) if match[2] == "down_proj" else ("gate_proj", "up_proj")
        for e, rows in enumerate(tensor):
            pieces = zip(parts, rows.chunk(len(parts)), strict=True)
            found |= {f"{match[1]}.{e}.{part}.weight": piece.contiguous() for part, piece in pieces}
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_read_from_one_tensor_or_from_one_of_each(name: str, tmp_path: Path) -> None:
    save_checkpoint(random_model(name), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = fused(load_file(file))
    assert any(map(FUSED.fullmatch, whole))
    found = []
    for which in ((), ("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")):
        save_file(of_each(whole, which), file)
        checkpoint = Checkpoint(tmp_path, read_spec(tmp_path))
        found.append({each.name: checkpoint.tensor(each.name) for each in checkpoint.tensors()})
    for each in found[1:]:
        assert each.keys() == found[0].keys()
        assert all(torch.equal(tensor, each[name].view_as(tensor)) for name, tensor in found[0].items())


@pytest.mark.parametrize("form", ["one", "each"])
def test_the_text_part_of_a_model_that_reads_images_is_read(form: str, tmp_path: Path) -> None:
    save_checkpoint(random_model("qwen3.5-moe"), tmp_path)
    plain, file = read_spec(tmp_path), tmp_path / "model.safetensors"
    tensors = fused(load_file(file)) if form == "one" else of_each(load_file(file), ("gate_up_proj", "down_proj"))
    expected = Checkpoint(tmp_path, plain).tensor("layers.2.moe.gate_up")
    save_file({name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}, file)
    names = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    edit_config(tmp_path, **names)
    spec = read_spec(tmp_path)
    assert spec.own_layers == plain.own_layers
    assert torch.equal(Checkpoint(tmp_path, spec).tensor("layers.2.moe.gate_up").view_as(expected), expected)


def test_a_checkpoint_without_its_experts_is_refused(tmp_path: Path) -> None:
    save_checkpoint(random_model("granite-moe"), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if "input_linear" not in name}, file)
    with pytest.raises(CheckpointError, match=r"lacks tensors: .*0.block_sparse_moe.input_linear"):
        Checkpoint(tmp_path, read_spec(tmp_path))


def route(logits: list[float], n_active: int, **more: object) -> tuple[list[int], list[float]]:
    """The choice of a router with these logits."""
    bias = more.pop("bias", None)
    spec = RouterSpec(n_experts=len(logits), n_active=n_active, **more)  # type: ignore[arg-type]
    choice_bias = None if bias is None else torch.tensor(bias)
    routes = TorchOps().route(torch.ones(1, 1), Router(spec, torch.tensor(logits)[:, None], None, choice_bias))
    chosen, weights = routes[0].chunk(2)
    return chosen.int().tolist(), weights.tolist()


def test_the_lower_of_two_experts_with_equal_scores_is_chosen() -> None:
    assert route([1.0, 2.0, 1.0, 1.0, 2.0, 1.0], 4)[0] == [4, 2, 1, 0]


def test_routers_weight_experts_as_their_families_do() -> None:
    logits = [0.5, -1.0, 2.0, 1.5]
    softmax = torch.softmax(torch.tensor(logits), 0)
    assert route(logits, 2) == ([3, 2], pytest.approx(softmax[[3, 2]].tolist()))
    of_two = torch.softmax(torch.tensor([1.5, 2.0]), 0).tolist()
    assert route(logits, 2, scores=OF_CHOSEN) == ([3, 2], pytest.approx(of_two))
    assert route(logits, 2, scores=SOFTMAX, renormalizes=True) == ([3, 2], pytest.approx(of_two))
    sigmoid = torch.sigmoid(torch.tensor(logits))
    chosen = route(logits, 2, scores=SIGMOID, renormalizes=True, scale=2.5, has_choice_bias=True, bias=[0, 9, 0, 0.0])
    weights = sigmoid[[2, 1]] / sigmoid[[2, 1]].sum() * 2.5
    assert chosen == ([2, 1], pytest.approx(weights.tolist()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group is 3 and topk_group 2, which do not fit 8 experts, 3 per token"),
        ({"topk_group": 5}, "n_group is 4 and topk_group 5, which do not fit"),
        ({"n_group": 3, "topk_group": 3}, "n_group is 3 and topk_group 3, which do not fit"),
        ({"n_group": 8}, "n_group is 8 and topk_group 2, which do not fit"),
        ({"topk_group": 1}, "n_group is 4 and topk_group 1, which do not fit"),
        ({"n_group": 65}, "n_group is 65"),
        ({"topk_group": 0}, "topk_group is 0"),
    ],
)
def test_impossible_groups_of_experts_are_refused(changes: dict[str, object], message: str) -> None:
    config = config_of("deepseek3").to_dict() | changes
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_hf(config, "config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_intermediate_size": 24}, "an expert's size is 24, expected a multiple of 16"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok is 8, expected a whole number from 1 to 7"),
        (
            {"num_experts_per_tok": 65, "num_experts": 128},
            "num_experts_per_tok is 65, expected a whole number from 1 to 64",
        ),
        ({"num_experts": 0, "num_local_experts": None}, "num_experts is 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_impossible_fields_are_refused_by_name(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    save_checkpoint(random_model("qwen3-moe"), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)
