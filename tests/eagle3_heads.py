"""Tiny EAGLE-3 heads with random weights, in each dialect of those who publish them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.sources.eagle3 import LAYER_IDS
from tests.draft_heads import CONFIG, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MODEL, VOCAB

N_DRAFT_TOKENS = 20


@dataclass(frozen=True)
class Dialect:
    """config: what is in it beside a layer's fields. captured: of a model with three layers."""

    config: dict[str, Any]
    captured: tuple[int, ...] = (0, 1, 2)
    layer: str = "midlayer."
    prefix: str = ""
    nested: bool = False
    n_draft_tokens: int = N_DRAFT_TOKENS
    has_head: bool = True
    more: tuple[str, ...] = ("t2d",)
    flags: dict[str, bool] = field(default_factory=dict)


DIALECTS = {
    "SafeAILab": Dialect({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": N_DRAFT_TOKENS}),
    "SpecForge": Dialect(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": N_DRAFT_TOKENS,
            "eagle_config": {LAYER_IDS: [0, 1], "use_aux_hidden_state": True},
        },
        captured=(1, 2),
        more=("t2d", "embed_tokens.weight", "fc.bias"),
    ),
    "AngelSlim": Dialect(
        {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": None},
        n_draft_tokens=VOCAB,
        has_head=False,
        more=(),
    ),
    "speculators": Dialect(
        {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": N_DRAFT_TOKENS,
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": {}},
            LAYER_IDS: [0, 2],
        },
        captured=(0, 2),
        layer="layers.0.",
        nested=True,
        flags={"norm_before_residual": True, "norm_before_fc": True},
    ),
    "EAGLE-3.1": Dialect(
        {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VOCAB, LAYER_IDS: [0, 1, 2]},
        layer="layers.0.",
        prefix="model.",
        n_draft_tokens=VOCAB,
        more=(),
        flags={"fc_norm": True, "norm_output": True},
    ),
}


def eagle3_config(dialect: Dialect, model: ModelSpec = MODEL, **changes: Any) -> dict[str, Any]:
    """config.json."""
    sizes = {"vocab_size": model.vocab_size, "intermediate_size": model.ffn_size}
    inner, outer = CONFIG | sizes, dialect.config | dialect.flags | changes
    if outer.get("draft_vocab_size") == VOCAB:
        outer["draft_vocab_size"] = model.vocab_size
    return {"transformer_layer_config": inner} | outer if dialect.nested else inner | outer


def draft_ids(n_tokens: int, seed: int = 3) -> Tensor:
    """The tokens of a draft vocabulary, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(VOCAB, generator=generator)[:n_tokens].sort().values


def eagle3_tensors(dialect: Dialect, seed: int = 0, model: ModelSpec = MODEL) -> dict[str, Tensor]:
    """By plain names, as the engine calls them, without the dialect's. model: of the heads' sizes here."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def scale(n: int = HIDDEN) -> Tensor:
        return 1 + 0.3 * random(n) * n**0.5

    layer, n_seen, vocab = "layers.0.", len(dialect.captured), model.vocab_size
    n = vocab if dialect.n_draft_tokens == VOCAB else dialect.n_draft_tokens
    tensors = {
        "fc.weight": random(HIDDEN, n_seen * HIDDEN),
        f"{layer}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": random(model.ffn_size, HIDDEN),
        f"{layer}mlp.up_proj.weight": random(model.ffn_size, HIDDEN),
        f"{layer}mlp.down_proj.weight": random(HIDDEN, model.ffn_size),
        "norm.weight": scale(),
    }
    tensors |= {f"{layer}{name}.weight": scale() for name in ("input_layernorm", "hidden_norm")}
    tensors[f"{layer}post_attention_layernorm.weight"] = scale()
    if dialect.has_head:
        tensors["lm_head.weight"] = random(n, HIDDEN)
    if n < vocab:
        tensors["d2t"] = draft_ids(n) - torch.arange(n)
    if dialect.flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = scale(n_seen * HIDDEN)
    if dialect.flags.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": scale() for number in range(n_seen)}
    others = {
        "fc.bias": random(HIDDEN),
        "t2d": torch.zeros(vocab, dtype=torch.bool),
        "embed_tokens.weight": random(vocab, HIDDEN),
    }
    return tensors | {name: others[name] for name in dialect.more}


def save_eagle3(
    folder: Path, dialect: Dialect, tensors: dict[str, Tensor] | None = None, model: ModelSpec = MODEL, **changes: Any
) -> Path:
    """A folder as it is published. tensors: by plain names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(eagle3_config(dialect, model, **changes)))
    plain = eagle3_tensors(dialect, 0, model) if tensors is None else tensors
    named = {dialect.prefix + name.replace("layers.0.", dialect.layer): values for name, values in plain.items()}
    save_file(named, folder / "model.safetensors")
    return folder
