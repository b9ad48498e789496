"""transformers' models written as GGUF files by the gguf package, which has its own names of tensors and types."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CONTROL, NORMAL, UNKNOWN, BYTE = 3, 1, 2, 6
ARCHITECTURES = {"qwen3_5_text": "qwen35", "mistral": "llama", "gemma3_text": "gemma3", "gemma4_text": "gemma4"}
ARCHITECTURES |= {"qwen3_moe": "qwen3moe", "qwen3_5_moe_text": "qwen35moe", "gpt_oss": "gpt-oss"}
ARCHITECTURES |= {"lfm2_moe": "lfm2moe", "nemotron_h": "nemotron_h_moe"}
ARCHITECTURES |= {"granitemoehybrid": "granitehybrid"}
ARCHITECTURES |= {"qwen3_next": "qwen3next", "glm4_moe": "glm4moe"}
ARCHITECTURES |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2")
ARCHITECTURES |= {"olmo3": "olmo2", "ministral3": "mistral3"}  # where model_type is another
TOKENIZER_KEYS = ("tokenizer.ggml.pre",)  # which can be changed beside a tokenizer
INTERLEAVED = ("llama", "granite", "granitehybrid", "smollm3", "mistral3")
GEMMA = ("gemma", "gemma2", "gemma3")
Types = Callable[[str], str]  # of a tensor's name in the file, its type


def write_gguf(model: Any, file: Path, types: Types, **changes: Any) -> dict[str, Tensor]:
    """The file, and the model's weights as it holds them by transformers' names, which the model gets too.

    changes: of metadata, None leaves an entry out; tokenizer: a folder whose tokenizer.json the file describes;
    part_tensors: how many tensors a part has at most, of a file that is to be split.
    """
    import gguf

    config, tokenizer = model.config, changes.pop("tokenizer", None)
    config.allow_global_per_layer_attribute_access = True  # transformers' word for fields of Gemma 4's layers
    is_fused = changes.pop("is_fused", False)  # whether gate and up of all experts are one tensor
    is_old = changes.pop("is_old", False)  # whether modules that newer files split are one tensor
    factors, part_tensors = changes.pop("factors", {}), changes.pop("part_tensors", 0)
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=part_tensors)
    others = {key: value for key, value in changes.items() if key not in TOKENIZER_KEYS}
    for key, value in (_metadata(config, arch) | others).items():
        _add(writer, key.format(arch=arch), value)
    for key, value in (tokenizer_metadata(tokenizer) if tokenizer else {}).items():
        _add(writer, key, changes.get(key, value))
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    held = {}
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        saved = f"{name}.weight" if name.endswith("layer_scalar") else name
        saved = saved.replace("model.", "backbone.", 1) if arch == "nemotron_h_moe" else saved
        saved = f"{name}.weight" if name.endswith(".sinks") else saved.replace("dt_bias", "dt_proj.bias")
        saved = saved.replace("router.weight", "router.layer.weight") if arch == "granitehybrid" else saved
        found = names.get_name(saved, try_suffixes=(".weight", ".bias"))
        if name.endswith((".expert_bias", "correction_bias")):
            found = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        if name.endswith((".mixer.A_log", ".mamba.A_log")):
            writer.add_tensor(found, (-values.exp())[:, None].numpy())
            continue
        if name.endswith((".mixer.D", ".mixer.norm.weight", ".mamba.D", ".mamba.norm.weight")):
            n_groups = getattr(config, "n_groups", None) or config.mamba_n_groups
            n_rows = len(values) if name.endswith("D") else n_groups
            writer.add_tensor(found, values.view(n_rows, -1).numpy())
            continue
        if name.endswith(("router.scale", "per_expert_scale")):
            place = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            found = f"blk.{name.split('.')[2]}.{place}.scale"
        if ".experts." in name:
            held[name] = _experts(writer, name, values, arch, types, is_fused)
            continue
        if not is_old and (split := _split(name, values, config)):
            parts, joined = split
            written = []
            for part, of_part in parts.items():
                full = f"blk.{name.split('.')[2]}.{part}.weight"
                kind = gguf.GGMLQuantizationType[types(full)]
                data = packed(of_part.flatten(0, -2).contiguous().numpy(), kind)
                writer.add_tensor(full, data.reshape(*of_part.shape[:-1], -1), raw_dtype=kind)
                written.append(torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view(of_part.shape))
            held[name] = joined(*written)
            continue
        if ".linear_attn." in name:
            kind = gguf.GGMLQuantizationType[types(found) if values.dim() == 2 else "F32"]
            made, back = _linear_attention(name.rpartition("linear_attn.")[2], values, config, arch)
            data = packed(made.numpy(), kind)
            writer.add_tensor(found, data, raw_dtype=kind)
            held[name] = back(torch.from_numpy(np.array(gguf.quants.dequantize(data, kind)))).view_as(values)
            continue
        values = values.flatten(1) if values.dim() == 3 else values
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        turns = arch in INTERLEAVED and heads is not None
        added = float(arch in (*GEMMA, "qwen35", "qwen35moe", "qwen3next") and name.endswith("norm.weight"))
        is_matrix = values.dim() > 1 and not name.endswith(
            ("conv.conv.weight", "mamba.conv1d.weight", "gate.weight", "router.weight", "router.proj.weight")
        )
        kind = gguf.GGMLQuantizationType[types(found) if is_matrix else "F32"]
        data = packed((_turned(values, heads) if turns else values + added).numpy(), kind)
        writer.add_tensor(found, data, raw_dtype=kind)
        floats = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view_as(values)
        floats = _turned_back(floats, heads) if turns else floats - added
        held[name] = floats.view_as(model.state_dict()[name])
    if arch == "gemma4":  # a quarter of each head rotates in layers that see all positions
        size = max(config.per_layer_config[layer].head_dim for layer in range(config.num_hidden_layers))
        factors |= {"rope_freqs.weight": np.array([1.0] * (size // 8) + [1e30] * (size // 2 - size // 8), np.float32)}
    for name, values in factors.items():
        writer.add_tensor(name, values)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    model.load_state_dict(held, strict=False)
    return held


def packed(values: np.ndarray, kind: Any) -> np.ndarray:
    """Quantized by the package; where it can't, blocks of random bits with scales that suit the values."""
    import gguf

    try:
        return np.asarray(gguf.quants.quantize(values, kind))
    except NotImplementedError:
        return random_blocks(values, kind)


def random_blocks(values: np.ndarray, kind: Any) -> np.ndarray:
    import gguf

    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_rows, n_columns = values.shape
    blocks = np.random.default_rng(n_rows).integers(0, 256, (n_rows, n_columns // n_weights, n_bytes), np.uint8)
    size = float(np.abs(values).mean())
    scales = {  # (first byte, value) of each fp16 scale of a block, so that weights have about the values' size
        "IQ4_NL": [(0, size / 50)],
        "IQ4_XS": [(0, size / 800)],
        "Q4_K": [(0, size / 120), (2, size / 60)],
        "Q5_K": [(0, size / 240), (2, size / 60)],
        "Q6_K": [(208, size / 1000)],
        "Q3_K": [(108, size / 40)],
    }[kind.name]
    for first, value in scales:
        factor = np.random.default_rng(n_columns).uniform(0.5, 1.5, blocks.shape[:2]) * value
        blocks[..., first : first + 2] = factor.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Of the tokenizer.json in `folder`: byte-level BPE, or sentencepiece's with scores in place of merges."""
    from transformers import AutoTokenizer

    saved = json.loads((folder / "tokenizer.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = saved["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in saved["added_tokens"]}
    is_pieces = saved["model"]["byte_fallback"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in saved["model"]["merges"]]
    kinds = [CONTROL if token in special else NORMAL for token in tokens]
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"] = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    if not is_pieces:
        adds_begin = bool(saved["post_processor"] and len(saved["post_processor"].get("single", [])) > 1)
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
        return metadata | {
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.add_bos_token": adds_begin,
        }
    rank = {"".join(merge): float(number) for number, merge in reversed(list(enumerate(merges)))}
    for index, token in enumerate(tokens):
        if token == "<unk>":
            kinds[index] = UNKNOWN
        elif token.startswith("<0x"):
            kinds[index] = BYTE
    scores = [-float(rank.get(token, len(merges))) for token in tokens]
    return metadata | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}


def _metadata(config: Any, arch: str) -> Mapping[str, Any]:
    """As llama.cpp's converter has them: of each class what it writes, and nothing else."""
    found = {
        "general.name": "a random model",
        "{arch}.block_count": config.num_hidden_layers,
        "{arch}.context_length": config.max_position_embeddings,
        "{arch}.embedding_length": config.hidden_size,
        "{arch}.feed_forward_length": getattr(config, "intermediate_size", None),
        "{arch}.attention.head_count": config.num_attention_heads,
        "{arch}.attention.head_count_kv": config.num_key_value_heads,
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    full = rope.get("full_attention", rope)
    if arch in ("starcoder2", "stablelm"):
        eps = config.norm_epsilon if arch == "starcoder2" else config.layer_norm_eps
        found["{arch}.attention.layer_norm_epsilon"] = float(eps)
    else:
        field = {"lfm2": "norm_eps", "lfm2moe": "norm_eps", "nemotron_h_moe": "layer_norm_epsilon"}
        eps = getattr(config, field.get(arch, "rms_norm_eps"))
        found["{arch}.attention.layer_norm_rms_epsilon"] = float(eps)
    if arch not in ("stablelm", "gemma", "gemma2"):
        found["{arch}.rope.freq_base"] = float(full["rope_theta"])
    if arch in ("stablelm", "glm4"):
        found["{arch}.rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    elif arch in INTERLEAVED:
        found["{arch}.rope.dimension_count"] = head_dim
    if arch in ("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss", "glm4", "seed_oss", "ernie4_5", *GEMMA):
        found["{arch}.attention.key_length"] = found["{arch}.attention.value_length"] = head_dim
    if full["rope_type"] == "linear" and arch in GEMMA:
        found |= {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": float(full["factor"])}
    return found | _metadata_of_one(config, arch)


def _metadata_of_one(config: Any, arch: str) -> Mapping[str, Any]:
    """Those that only one architecture has, or two."""
    if arch == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        window = {"{arch}.attention.sliding_window": config.sliding_window}
        return {f"{{arch}}.{name}": float(getattr(config, name)) for name in caps} | window
    if arch == "gemma3":
        cap = {"{arch}.final_logit_softcapping": float(config.final_logit_softcapping)}
        return cap | {"{arch}.attention.sliding_window": config.sliding_window}
    if arch == "gemma4":
        return _metadata_of_gemma_4(config)
    if arch == "mistral3":
        rope = config.rope_parameters
        scaling = {"type": "yarn", "factor": float(rope["factor"])}
        scaling |= {"original_context_length": rope["original_max_position_embeddings"], "yarn_log_multiplier": 1.0}
        keys = {f"{{arch}}.rope.scaling.{key}": value for key, value in scaling.items()}
        return keys | {"{arch}.attention.temperature_scale": float(rope["llama_4_scaling_beta"])}
    if config.model_type == "olmo3":
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        windows = {"{arch}.attention.sliding_window": config.sliding_window}
        return windows | {"{arch}.attention.sliding_window_pattern": pattern}
    if arch == "nemotron_h_moe":
        return _metadata_of_nemotron(config)
    if arch in ("lfm2", "lfm2moe"):
        n_kv_heads = config.num_key_value_heads
        experts = {} if arch == "lfm2" else _metadata_of_experts(config, config.moe_intermediate_size)
        if experts:
            experts |= {"{arch}.leading_dense_block_count": config.num_dense_layers, "{arch}.expert_gating_func": 2}
        return experts | {
            "{arch}.shortconv.l_cache": config.conv_L_cache,
            "{arch}.attention.head_count_kv": [0 if kind == "conv" else n_kv_heads for kind in config.layer_types],
        }
    if arch == "qwen3moe":
        return _metadata_of_experts(config, config.moe_intermediate_size)
    if arch == "gpt-oss":
        rope = config.rope_parameters
        return _metadata_of_experts(config, config.intermediate_size) | {
            "{arch}.attention.sliding_window": config.sliding_window,
            "{arch}.rope.scaling.type": "yarn",
            "{arch}.rope.scaling.factor": float(rope["factor"]),
            "{arch}.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if arch in ("deepseek2", "glm4moe"):
        return _metadata_of_routed(config, arch)
    if arch in ("qwen35", "qwen35moe", "qwen3next"):
        experts = {} if arch == "qwen35" else _metadata_of_experts(config, config.moe_intermediate_size)
        if experts:
            experts["{arch}.expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
        return experts | {
            "{arch}.attention.key_length": config.head_dim,
            "{arch}.attention.value_length": config.head_dim,
            "{arch}.rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
            "{arch}.rope.dimension_sections": None if arch == "qwen3next" else [1, 1, 1, 0],
            "{arch}.full_attention_interval": 2,
            "{arch}.ssm.conv_kernel": config.linear_conv_kernel_dim,
            "{arch}.ssm.state_size": config.linear_key_head_dim,
            "{arch}.ssm.group_count": config.linear_num_key_heads,
            "{arch}.ssm.time_step_rank": config.linear_num_value_heads,
            "{arch}.ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        }
    if arch in ("granite", "granitehybrid"):
        return (_metadata_of_granite_hybrid(config) if arch == "granitehybrid" else {}) | {
            "{arch}.attention.scale": float(config.attention_multiplier),
            "{arch}.embedding_scale": float(config.embedding_multiplier),
            "{arch}.residual_scale": float(config.residual_multiplier),
            "{arch}.logit_scale": float(config.logits_scaling),
        }
    return {"{arch}.use_parallel_residual": True} if arch == "stablelm" else {}


def _metadata_of_experts(config: Any, size: int) -> dict[str, Any]:
    return {
        "{arch}.expert_count": config.num_experts,
        "{arch}.expert_used_count": getattr(config, "num_experts_per_tok", None) or config.top_k_experts,
        "{arch}.expert_feed_forward_length": size,
    }


def _experts(writer: Any, name: str, values: Tensor, arch: str, types: Types, is_fused: bool) -> Tensor:
    """Writes a tensor of all experts as llama.cpp's converter does; returns the values that it has then."""
    import gguf

    is_paired, is_bias, layer = arch == "gpt-oss", name.endswith("_bias"), name.split(".")[2]
    rows = values if is_bias or not is_paired else values.transpose(1, 2)
    ending = "bias" if is_bias else "weight"
    if "down" in name:
        parts = {"ffn_down_exps": rows}
    elif name.endswith(".up_proj"):
        parts = {"ffn_up_exps": rows}
    elif is_fused:
        parts = {"ffn_gate_up_exps": rows}
    else:
        gate, up = (rows[:, ::2], rows[:, 1::2]) if is_paired else rows.chunk(2, 1)
        parts = {"ffn_gate_exps": gate, "ffn_up_exps": up}
    held = []
    for part, of_part in parts.items():
        kind = gguf.GGMLQuantizationType["F32" if is_bias else types(f"blk.{layer}.{part}.weight")]
        flat = of_part.contiguous() if is_bias else of_part.reshape(-1, of_part.shape[-1])
        data = packed(flat.numpy(), kind)
        writer.add_tensor(f"blk.{layer}.{part}.{ending}", data.reshape(*of_part.shape[:-1], -1), raw_dtype=kind)
        held.append(torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view(of_part.shape))
    found = torch.stack(held, 2).flatten(1, 2) if len(held) == 2 and is_paired else torch.cat(held, 1)
    return found if is_bias or not is_paired else found.transpose(1, 2).contiguous()


def _metadata_of_routed(config: Any, arch: str) -> dict[str, Any]:
    """Of DeepSeek's and GLM's experts, and of latent attention in files with attn_k_b."""
    has_bias = config.model_type != "deepseek_v2"
    found = {
        "{arch}.leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "{arch}.expert_count": config.n_routed_experts,
        "{arch}.expert_used_count": config.num_experts_per_tok,
        "{arch}.expert_shared_count": config.n_shared_experts,
        "{arch}.expert_feed_forward_length": config.moe_intermediate_size,
        "{arch}.expert_weights_scale": float(config.routed_scaling_factor),
        "{arch}.expert_weights_norm": bool(config.norm_topk_prob) if has_bias else None,
        "{arch}.expert_gating_func": 2 if has_bias else 1,
        "{arch}.expert_group_count": config.n_group,
        "{arch}.expert_group_used_count": config.topk_group,
    }
    if arch == "glm4moe":
        turning = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        return (
            found
            | {"{arch}.rope.dimension_count": turning, "{arch}.attention.key_length": config.head_dim}
            | {"{arch}.attention.value_length": config.head_dim}
        )
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        found |= {
            "{arch}.rope.scaling.type": "yarn",
            "{arch}.rope.scaling.factor": float(rope["factor"]),
            "{arch}.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "{arch}.rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return found | {
        "{arch}.attention.head_count_kv": 1,
        "{arch}.attention.q_lora_rank": config.q_lora_rank,
        "{arch}.attention.kv_lora_rank": config.kv_lora_rank,
        "{arch}.attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "{arch}.attention.value_length": config.kv_lora_rank,
        "{arch}.attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "{arch}.attention.value_length_mla": config.v_head_dim,
        "{arch}.rope.dimension_count": config.qk_rope_head_dim,
    }


def _metadata_of_granite_hybrid(config: Any) -> dict[str, Any]:
    n_kv_heads, kinds = config.num_key_value_heads, config.layer_types
    return {
        "{arch}.attention.head_count_kv": [n_kv_heads if kind == "full_attention" else 0 for kind in kinds],
        "{arch}.expert_count": config.num_local_experts or None,
        "{arch}.expert_used_count": config.num_experts_per_tok if config.num_local_experts else None,
        "{arch}.expert_shared_feed_forward_length": config.shared_intermediate_size,
        "{arch}.ssm.conv_kernel": config.mamba_d_conv,
        "{arch}.ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "{arch}.ssm.state_size": config.mamba_d_state,
        "{arch}.ssm.time_step_rank": config.mamba_n_heads,
        "{arch}.ssm.group_count": config.mamba_n_groups,
        "{arch}.rope.scaling.finetuned": False,
    }


def _metadata_of_nemotron(config: Any) -> Mapping[str, Any]:
    sizes = {"moe": config.moe_intermediate_size, "mlp": config.intermediate_size}
    kinds, n_kv_heads = config.layers_block_type, config.num_key_value_heads
    return {
        "{arch}.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "{arch}.attention.head_count_kv": [n_kv_heads if kind == "full_attention" else 0 for kind in kinds],
        "{arch}.feed_forward_length": [sizes.get(kind, 0) for kind in kinds],
        "{arch}.attention.key_length": config.head_dim,
        "{arch}.attention.value_length": config.head_dim,
        "{arch}.expert_count": config.n_routed_experts,
        "{arch}.expert_used_count": config.num_experts_per_tok,
        "{arch}.expert_shared_count": config.n_shared_experts,
        "{arch}.expert_feed_forward_length": config.moe_intermediate_size,
        "{arch}.expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "{arch}.expert_weights_norm": config.norm_topk_prob,
        "{arch}.expert_weights_scale": float(config.routed_scaling_factor),
        "{arch}.ssm.conv_kernel": config.conv_kernel,
        "{arch}.ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "{arch}.ssm.state_size": config.ssm_state_size,
        "{arch}.ssm.time_step_rank": config.mamba_num_heads,
        "{arch}.ssm.group_count": config.n_groups,
    }


def _metadata_of_gemma_4(config: Any) -> Mapping[str, Any]:
    near = [kind == "sliding_attention" for kind in config.layer_types]
    own = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    n_shared = config.num_kv_shared_layers
    wide = [config.use_double_wide_mlp and layer >= len(near) - n_shared for layer in range(len(near))]
    size = max(each.head_dim for each in own)
    has_experts = config.enable_moe_block
    experts = _metadata_of_experts(config, config.moe_intermediate_size) if has_experts else {}
    return experts | {
        "{arch}.attention.sliding_window": config.sliding_window,
        "{arch}.attention.sliding_window_pattern": near,
        "{arch}.attention.shared_kv_layers": n_shared,
        "{arch}.attention.head_count_kv": [each.num_key_value_heads for each in own],
        "{arch}.feed_forward_length": [config.intermediate_size * (2 if each else 1) for each in wide],
        "{arch}.attention.key_length": size,
        "{arch}.attention.value_length": size,
        "{arch}.attention.key_length_swa": config.head_dim,
        "{arch}.attention.value_length_swa": config.head_dim,
        "{arch}.rope.dimension_count": size,
        "{arch}.rope.dimension_count_swa": config.head_dim,
        "{arch}.rope.freq_base_swa": 10000.0,
        "{arch}.embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "{arch}.final_logit_softcapping": float(config.final_logit_softcapping),
    }


def _split(name: str, values: Tensor, config: Any) -> tuple[dict[str, Tensor], Callable[..., Tensor]] | None:
    """A module's rows in the tensors of newer files, and the way back; None for modules that no file splits."""
    if name.endswith("kv_b_proj.weight"):
        n_plain, n_heads = config.qk_nope_head_dim, config.num_attention_heads
        by_head = values.view(n_heads, -1, values.shape[1])
        parts = {"attn_k_b": by_head[:, :n_plain].transpose(1, 2), "attn_v_b": by_head[:, n_plain:]}
        return parts, lambda key, value: torch.cat([key.transpose(1, 2), value], 1).flatten(0, 1)
    if "shared_mlp." in name:
        ending = "_shexp" if config.num_local_experts else ""
        if name.endswith("output_linear.weight"):
            return {f"ffn_down{ending}": values}, lambda down: down
        gate, up = values.chunk(2)
        return {f"ffn_gate{ending}": gate, f"ffn_up{ending}": up}, lambda *both: torch.cat(both)
    if name.endswith("in_proj_qkvz.weight"):
        n_keys, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        value_size = config.linear_num_value_heads // n_keys * config.linear_value_head_dim
        sizes = [key_dim, key_dim, value_size, value_size]
        index = torch.arange(len(values)).view(n_keys, -1).split(sizes, 1)
        order = torch.cat([each.flatten() for each in index])
        n_first = n_keys * (2 * key_dim + value_size)
        parts = {"attn_qkv": values[order[:n_first]], "attn_gate": values[order[n_first:]]}
        return parts, lambda first, gate: torch.cat([first, gate])[order.argsort()]
    return None


def _linear_attention(name: str, values: Tensor, config: Any, arch: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A tensor as llama.cpp's converter writes it, and the way back. Qwen3.5's value heads are tiled over key heads."""
    if arch == "qwen3next":
        return (
            (-values.exp(), lambda x: (-x).log())
            if name == "A_log"
            else (values.flatten(1) if values.dim() > 1 else values, lambda x: x)
        )
    n_keys, n_values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = torch.arange(n_values).view(n_keys, -1).T.flatten()
    features = (heads[:, None] * config.linear_value_head_dim + torch.arange(config.linear_value_head_dim)).flatten()
    first = 2 * n_keys * config.linear_key_head_dim
    orders = {
        "in_proj_qkv.weight": torch.cat([torch.arange(first), first + features]),
        "conv1d.weight": torch.cat([torch.arange(first), first + features]),
        "in_proj_z.weight": features,
        "norm.weight": torch.arange(config.linear_value_head_dim),
        "out_proj.weight": features,
    }
    order = orders.get(name, heads)
    inverse = order.argsort()
    if name == "out_proj.weight":
        return values[:, order].contiguous(), lambda x: x[:, inverse]
    if name == "A_log":
        return -values[order].exp(), lambda x: (-x).log()[inverse]
    return values[order].flatten(1) if values.dim() > 1 else values[order], lambda x: x[inverse]


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _turned(values: Tensor, n_heads: int) -> Tensor:
    """As llama.cpp's converter writes rows of queries and keys."""
    halves = values.reshape(n_heads, 2, len(values) // n_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape).contiguous()


def _turned_back(values: Tensor, n_heads: int) -> Tensor:
    pairs = values.reshape(n_heads, len(values) // n_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape).contiguous()
