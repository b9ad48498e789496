"""Tiny random models of Qwen3.5's with an MTP layer, and the same layer computed by transformers' own classes."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.families import random_model, save_checkpoint

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
DENSE = {"layer_types": ["full_attention"] * 3}  # a model without a recurrent state
ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")  # of a layer's parts
CLASSES = {  # transformers' module and prefix of its classes
    "qwen3_5_text": ("qwen3_5", "Qwen3_5"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5Moe"),
    "qwen3_next": ("qwen3_next", "Qwen3Next"),
}


class MtpReference(nn.Module):
    """The MTP layer as published: its parameters have the checkpoint's names without the prefix mtp."""

    def __init__(self, config: Any, seed: int = 5) -> None:
        super().__init__()
        kind, prefix = CLASSES[config.model_type]
        found = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        norm, layer = getattr(found, f"{prefix}RMSNorm"), getattr(found, f"{prefix}DecoderLayer")
        rotary = getattr(found, f"{prefix}RotaryEmbedding", None) or getattr(found, f"{prefix}TextRotaryEmbedding")
        plain = type(config)(**(config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
        plain._attn_implementation = "eager"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(size, eps=eps) for _ in range(3))
        self.layers = nn.ModuleList([layer(plain, 0)])
        self._rotary = rotary(plain)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))

    @torch.no_grad()
    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The next states (n, hidden) from the embeddings of the next tokens and the states, both (n, hidden)."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], 1)
        x, n = self.fc(joined)[None], len(joined)
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        turned = self._rotary(x, torch.arange(n)[None])
        found = self.layers[0](x, position_embeddings=turned, attention_mask=mask)
        return self.norm(found[0] if isinstance(found, tuple) else found)[0]


def with_mtp(model: Any, folder: Path) -> MtpReference:
    """Writes a checkpoint of the model and an MTP layer, which is returned."""
    layer = MtpReference(model.config)
    save_checkpoint(model, folder)
    add_mtp(folder, {f"mtp.{name}": values for name, values in layer.state_dict().items()})
    return layer


def with_single_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with three of each expert instead of two of all experts."""
    found = dict[str, Tensor]()
    for name, values in tensors.items():
        room, _, short = name.rpartition(".")
        if short not in ("gate_up_proj", "down_proj") or not room.endswith("experts"):
            found[name] = values
            continue
        for number, expert in enumerate(values):
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            parts = parts if short == "gate_up_proj" else {"down_proj": expert}
            found |= {f"{room}.{number}.{part}.weight": each.contiguous() for part, each in parts.items()}
    return found


def add_mtp(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    """Adds tensors to a checkpoint, whose config.json says that it has an MTP layer."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mtp_num_hidden_layers": 1} | changes))


def mtp_model(folder: Path, family: str = "qwen3.5", **changes: Any) -> tuple[Any, Any]:
    """A tiny random hybrid, and its MTP layer; changes: of its config.json, such as DENSE."""
    model = random_model(family, **changes)
    return model, with_mtp(model, folder)


def knowing_mtp(folder: Path, tokenizer_from: Path, family: str = "qwen3.5", **changes: Any) -> Path:
    """A model whose tokens depend mostly on the one before them, and an MTP layer that is mostly right about them."""
    model = random_model(family, **changes)
    size = model.config.hidden_size
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith(ENDS):
                values.mul_(0.02)
        layer = MtpReference(model.config)
        layer.fc.weight.copy_(torch.eye(size, 2 * size))
        layer.norm.weight.copy_(model.model.norm.weight)
        layer.pre_fc_norm_embedding.weight.zero_()
        for name, values in layer.layers.named_parameters():
            if name.endswith(ENDS):
                values.mul_(0.02)
    save_checkpoint(model, folder, tokenizer_from)
    add_mtp(folder, {f"mtp.{name}": values for name, values in layer.state_dict().items()})
    return folder


def gguf_mtp(layer: MtpReference, n_layers: int) -> dict[str, Any]:
    """Metadata and tensors of the layer as llama.cpp's converter writes them, for write_gguf."""
    names = {
        "fc": "nextn.eh_proj",
        "pre_fc_norm_embedding": "nextn.enorm",
        "pre_fc_norm_hidden": "nextn.hnorm",
        "norm": "nextn.shared_head_norm",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
    }
    names |= {f"self_attn.{part}": f"attn_{part[0]}{part[1:].removesuffix('_proj')}" for part in PROJECTIONS}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names |= {"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
    names |= {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    tensors = {}
    for name, values in layer.state_dict().items():
        if ".experts." in name:  # of all experts
            short = name.rpartition(".")[2].removesuffix("_proj")
            parts = {"down": values} if short == "down" else dict(zip(("gate", "up"), values.chunk(2, 1), strict=True))
            tensors |= {
                f"blk.{n_layers}.ffn_{part}_exps.weight": each.contiguous().numpy() for part, each in parts.items()
            }
            continue
        module = name.removeprefix("layers.0.").removesuffix(".weight")
        added = float(values.dim() == 1)  # the converter adds what checkpoints leave out of norms
        tensors[f"blk.{n_layers}.{names[module]}.weight"] = (values + added).numpy()
    keys = {"{arch}.block_count": n_layers + 1, "{arch}.nextn_predict_layers": 1}
    return keys | {"factors": tensors}
