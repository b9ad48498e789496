"""Small awkward models of every supported family, randomly initialised, written as Hugging Face checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 131,  # odd: not a multiple of a tile
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = SIZES | {"intermediate_size": 76, "num_key_value_heads": 2}  # FFN not a multiple of 32
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40}
GEMMA = LLAMA | {
    "head_dim": 10,
    "sliding_window": 7,
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 1.5,  # small enough to matter
    "final_logit_softcapping": 2.0,
}
GEMMA_4 = LLAMA | {  # key heads, head sizes and windows differ from layer to layer
    "head_dim": 10,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 7,
    "final_logit_softcapping": 2.0,
    "hidden_size_per_layer_input": 0,
}
QWEN_3_5 = LLAMA | {
    "head_dim": 24,  # of which 6 features rotate
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 18,  # more than 16 lanes, and not a multiple
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
ROUTED = SIZES | {
    "intermediate_size": 80,
    "num_key_value_heads": 6,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT = ROUTED | {"kv_lora_rank": 48, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 16}
GPT_OSS = SIZES | {
    "num_key_value_heads": 2,
    "intermediate_size": 32,  # unlike the hidden size, so that a matrix read the wrong way round is seen
    "head_dim": 10,
    "sliding_window": 7,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.4,  # small enough to matter
    "rope_parameters": YARN_ROPE | {"rope_theta": 150000.0, "truncate": False},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", LLAMA | {"rope_parameters": LLAMA3_ROPE, "head_dim": 12}),
    "llama-linear-rope": (
        "Llama",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic-rope": (
        "Llama",
        LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-relu": ("Llama", LLAMA | {"hidden_act": "relu"}),
    "llama-gelu": ("Llama", LLAMA | {"hidden_act": "gelu", "hidden_size": 54, "head_dim": 10}),  # rows not aligned
    "mistral": ("Mistral", LLAMA | {"sliding_window": 7}),
    "mistral-full": ("Mistral", LLAMA | {"sliding_window": None}),
    "mistral-yarn": (
        "Mistral",
        LLAMA | {"sliding_window": 7, "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "qwen2": ("Qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", LLAMA | {"rope_parameters": YARN_ROPE | {"beta_fast": 8.0, "truncate": False}}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 20}),
    "qwen3-yarn": ("Qwen3", LLAMA | {"head_dim": 20, "rope_parameters": YARN_ROPE | {"attention_factor": 1.2}}),
    "qwen3.5": ("Qwen3_5", QWEN_3_5),
    "qwen3-moe": ("Qwen3Moe", LLAMA | EXPERTS | {"head_dim": 20, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-next": ("Qwen3Next", QWEN_3_5 | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3.5-moe": ("Qwen3_5Moe", QWEN_3_5 | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "glm4-flash": ("Glm4MoeLite", LATENT | {"q_lora_rank": 20, "v_head_dim": 32, "rope_interleave": True}),
    "deepseek2": (
        "DeepseekV2",
        LATENT
        | GROUPS
        | {"q_lora_rank": None, "routed_scaling_factor": 1.5, "topk_method": "group_limited_greedy"}
        | {"n_shared_experts": 2},
    ),
    "deepseek3": (
        "DeepseekV3",
        LATENT
        | GROUPS
        | {
            "q_lora_rank": 20,
            "rope_interleave": False,
            "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "glm4.5": (
        "Glm4Moe",
        ROUTED | {"num_key_value_heads": 2, "head_dim": 12, "use_qk_norm": True, "attention_bias": True},
    ),
    "nemotron-h": (
        "NemotronH",
        ROUTED
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "num_key_value_heads": 2,
            "head_dim": 10,
            "mamba_num_heads": 6,
            "mamba_head_dim": 18,
            "n_groups": 2,
            "ssm_state_size": 10,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        LLAMA | EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "mixtral": (
        "Mixtral",
        LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 7},
    ),
    "olmoe": ("Olmoe", LLAMA | EXPERTS | {"intermediate_size": 16}),
    "granite-moe": (
        "GraniteMoe",
        LLAMA
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        LLAMA
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_d_head": 16,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        LLAMA | EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "lfm2": ("Lfm2", LLAMA | {"block_multiple_of": 4, "layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3.5-even": ("Qwen3_5", QWEN_3_5 | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "head_dim": 16}),
    "phi3": ("Phi3", LLAMA | {"sliding_window": None}),
    "phi3-partial": (
        "Phi3",
        LLAMA
        | {
            "sliding_window": 11,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-longrope": (
        "Phi3",
        LLAMA
        | {
            "max_position_embeddings": 640,
            "original_max_position_embeddings": 160,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0, 8.0],
                "original_max_position_embeddings": 160,
            },
        },
    ),
    "gemma": ("Gemma", LLAMA | {"head_dim": 10}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
    ),
    "gemma4": ("Gemma4", GEMMA_4),
    "gemma4-e": (
        "Gemma4",
        GEMMA_4
        | {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 131,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        GEMMA_4 | EXPERTS | {"enable_moe_block": True, "top_k_experts": 3, "intermediate_size": 80},
    ),
    "ministral3": (
        "Ministral3",
        LLAMA
        | {
            "head_dim": 12,
            "rope_parameters": YARN_ROPE
            | {
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "olmo2": ("Olmo2", LLAMA | {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        LLAMA
        | {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": YARN_ROPE,
            },
        },
    ),
    "smollm3": ("SmolLM3", LLAMA | {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "SmolLM3",
        LLAMA | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
    ),
    "granite": (
        "Granite",
        LLAMA
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("Starcoder2", LLAMA | {"sliding_window": 9}),
    "stablelm": ("StableLm", LLAMA | {"use_qkv_bias": True, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "glm": ("Glm", LLAMA | {"head_dim": 12}),
    "glm4": ("Glm4", LLAMA | {"head_dim": 12, "attention_bias": False}),
    "seed-oss": ("SeedOss", LLAMA | {"head_dim": 12, "attention_out_bias": True}),
    "helium": ("Helium", LLAMA | {"head_dim": 8}),
    "ernie4.5": ("Ernie4_5", LLAMA | {"head_dim": 12, "use_bias": True}),
    "exaone4": ("Exaone4", LLAMA | {"sliding_window": 7, "sliding_window_pattern": 2}),
    "opt": ("OPT", SIZES | {"ffn_dim": 76, "word_embed_proj_dim": 48}),
}

# Those that compute as no other does: what holds for their kernels, placements and stores holds for all.
_LIKE_ANOTHER = [
    "gemma",
    "gemma4-e",
    "gemma4-moe",
    "olmo2",
    "smollm3",
    "stablelm",
    "glm",
    "seed-oss",
    "helium",
    "ernie4.5",
    "exaone4",
    "deepseek3",
    "glm4.5",
    "qwen2-moe",
    "mixtral",
    "olmoe",
    "granite-moe",
    "granite-hybrid",
]
DISTINCT = sorted(FAMILIES.keys() - _LIKE_ANOTHER)
PLACED = sorted(set(DISTINCT) - {"olmo3", "smollm3-window", "granite", "starcoder2", "glm4"})  # here: to save time


def config_of(name: str, **changes: Any) -> Any:
    """The transformers configuration of a family."""
    import transformers

    prefix, values = FAMILIES[name]
    config_class = (
        f"{prefix}TextConfig" if prefix in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else f"{prefix}Config"
    )
    config = getattr(transformers, config_class)(**(values | changes))
    config.architectures = [f"{prefix}ForCausalLM"]
    return config


def random_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of the family, fp32, biases and norms random too."""
    import transformers

    config = config_of(name, **changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
            parameter.copy_(torch.randn_like(parameter) * 0.15 + float(is_norm))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            if name.endswith(("expert_bias", "correction_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.15)
    return model


def save_checkpoint(model: Any, folder: Path, tokenizer_from: Path | None = None) -> Path:
    """Writes config.json and model.safetensors; with a tokenizer's folder, its files too."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if tokenizer_from is not None:
            (folder / name).write_bytes((tokenizer_from / name).read_bytes())
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of config.json; None removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
