"""Models that read more than text: their text part is read, from files of either layout, or refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.checkpoint import Checkpoint
from tests.e2e.test_families import PROMPT, TOLERANCE, executor_of, greedy, reference_greedy
from tests.families import FAMILIES, edit_config, random_model

N_TOKENS = 16


def random_pair(name: str, folder: Path) -> Any:
    """A random model that reads images too, saved."""
    import transformers

    torch.manual_seed(0)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gemma3":
        text = FAMILIES["gemma3"][1] | {
            "final_logit_softcapping": None
        }  # as published; transformers leaves it out here
        vision |= {"image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model"}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=130
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
    elif name == "mistral3":
        text = FAMILIES["mistral"][1] | {"tie_word_embeddings": False, "model_type": "mistral"}
        vision |= {"image_size": 8, "patch_size": 4, "head_dim": 4, "model_type": "pixtral"}
        config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
        model = transformers.Mistral3ForConditionalGeneration(config)
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        text = FAMILIES["qwen2"][1] | {"tie_word_embeddings": False, "rope_parameters": rope}
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    config.architectures = [type(model).__name__]
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl"])
def test_the_text_part_is_read_from_files_of_either_layout(name: str, tmp_path: Path) -> None:
    model = random_pair(name, tmp_path)
    expected_tokens, expected = reference_greedy(model, PROMPT, N_TOKENS)
    for layout in ("language_model.model.", "model.language_model."):
        file = tmp_path / "model.safetensors"
        plain = {
            key.replace("model.language_model.", "").replace("language_model.model.", ""): value
            for key, value in load_file(file).items()
            if "language_model" in key and "lm_head" not in key
        }
        others = {
            key: value for key, value in load_file(file).items() if "language_model" not in key or "lm_head" in key
        }
        save_file(others | {layout + key: value for key, value in plain.items()}, file)
        tokens, steps = greedy(executor_of(tmp_path), [PROMPT], N_TOKENS)
        assert tokens[0] == expected_tokens
        assert (torch.cat(steps) - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("gemma4-e", "Gemma4ForConditionalGeneration"), ("ministral3", "Mistral3ForConditionalGeneration")],
)
def test_newer_text_parts_and_tensors_that_nothing_reads(name: str, architecture: str, tmp_path: Path) -> None:
    """As Gemma 4's E models are published: with keys and values of layers that read those of others."""
    model = random_model(name)
    text = model.config.to_dict()
    config = {"architectures": [architecture], "model_type": architecture.partition("For")[0].lower()}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    tensors = {
        key.replace("model.", "model.language_model.", 1): value.clone()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    tensors["model.vision_tower.patches.weight"] = torch.ones(2)
    if name == "gemma4-e":
        layer = "model.language_model.layers.3.self_attn"
        tensors |= {f"{layer}.{part}.weight": torch.ones(3) for part in ("k_proj", "v_proj", "k_norm")}
        tensors["model.embed_audio.embedding_projection.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    expected_tokens, _ = reference_greedy(model, PROMPT, 4)
    assert greedy(executor_of(tmp_path), [PROMPT], 4)[0][0] == expected_tokens


def test_a_tensor_of_two_names_is_refused(tmp_path: Path) -> None:
    random_pair("gemma3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    [name] = (
        name for name in tensors if name.endswith("norm.weight") and "language_model" in name and "layers" not in name
    )
    others = {
        f"{prefix}norm.weight": tensors[name] + 1 for prefix in ("model.language_model.", "language_model.model.")
    }
    save_file(tensors | others, file)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is in both"):
        Checkpoint(tmp_path, read_spec(tmp_path))


def test_a_tied_model_with_an_untied_text_part_needs_no_head(tmp_path: Path) -> None:
    """Only the first flag counts in transformers."""
    model = random_pair("mistral3", tmp_path)
    expected_tokens, expected = reference_greedy(model, PROMPT, N_TOKENS)
    tokens, steps = greedy(executor_of(tmp_path), [PROMPT], N_TOKENS)
    assert tokens[0] == expected_tokens
    assert (torch.cat(steps) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks tensors: lm_head\.weight"):
        Checkpoint(tmp_path, read_spec(tmp_path))


def test_others_are_refused_in_one_sentence(tmp_path: Path) -> None:
    random_pair("gemma3", tmp_path)
    edit_config(tmp_path, architectures=["LlavaForConditionalGeneration"])
    with pytest.raises(ModelError, match="'LlavaForConditionalGeneration' is a multimodal model that is not supported"):
        read_spec(tmp_path)
    edit_config(tmp_path, architectures=["Mistral3ForConditionalGeneration"])
    with pytest.raises(
        ModelError, match="text part of 'gemma3_text' is not supported, with mistral or ministral3 it is"
    ):
        read_spec(tmp_path)
