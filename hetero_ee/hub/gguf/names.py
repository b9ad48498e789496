"""Translate tensor names of Hugging Face's checkpoints to those of GGUF files."""

import re
from collections.abc import Container

from hetero_ee.hub.gguf.architectures import GgufArchitecture, architecture_of
from hetero_ee.hub.gguf.header import GgufHeader
from hetero_ee.hub.gguf.tensor_types import stacked_layout
from hetero_ee.models.hf_names import checkpoint_parts
from hetero_ee.models.spec import ModelSpec

# Modules inside and outside of layers; the suffixes .weight and .bias are the same.
_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",  # some architectures use this name for another norm
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "experts.gate_proj": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.sinks": "attn_sinks",
}
_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")  # whose rows are a part of a tensor of all experts
WITHOUT_ENDING = (".layer_scalar", ".sinks", ".experts.gate_up_proj")
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
# Modules whose rows are in another order if an architecture is interleaved.
INTERLEAVED = ("self_attn.q_proj", "self_attn.k_proj")


def gguf_name(hf_name: str, architecture: GgufArchitecture) -> str:
    whole = f"{hf_name}.weight" if hf_name.endswith(WITHOUT_ENDING) else hf_name
    module, _, ending = _OF_AN_EXPERT.sub(".experts.", whole).rpartition(".")
    layer = _LAYER.fullmatch(module)
    if layer is None:
        return f"{_OUTSIDE[module]}.{ending}"
    if (found := architecture.names.get(f"{layer[2]}.{ending}")) is not None:
        return f"blk.{layer[1]}.{found}"
    name = architecture.names.get(layer[2]) or _OF_A_LAYER[layer[2]]
    return f"blk.{layer[1]}.{name}.{ending}"


class PresentNames(Container[str]):
    """Contains Hugging Face's names of the tensors that a GGUF file has."""

    def __init__(self, header: GgufHeader) -> None:
        self._header, self._architecture = header, architecture_of(header)

    def __contains__(self, name: object) -> bool:
        try:
            return gguf_name(str(name), self._architecture) in self._header.tensors
        except KeyError:  # no GGUF file has such a module
            return False


def matrix_layouts(header: GgufHeader, spec: ModelSpec) -> dict[str, str]:
    """Return the layouts of the layers' matrices that are not stored as plain int4, by this engine's names."""
    architecture, layouts = architecture_of(header), {}
    for name, parts in checkpoint_parts(spec, PresentNames(header)).items():
        if name.startswith("layers.") and len(parts[0].stored_shape) == 2:
            found = (header.tensors.get(gguf_name(part.hf_name, architecture)) for part in parts)
            types = [tensor.type for tensor in found if tensor]
            layouts[name] = "int8" if parts[0].n_turned else stacked_layout(types)  # turned rows have other blocks
    return {name: layout for name, layout in layouts.items() if layout != "int4"}
