"""Read LFM2: most layers are gated short convolutions, the others attentions with norms of queries and keys."""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.layers.decoder import LayerSpec
from hetero_ee.layers.moe import SIGMOID
from hetero_ee.layers.short_conv import ShortConvSpec
from hetero_ee.models.families import experts, llama
from hetero_ee.models.families.family import FULL, MAX_KERNEL, layer_count, read_layer_kinds
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

CONV = "conv"
ADDED = 1e-6  # to the sum of a token's weights; source: transformers' Lfm2MoeTopKRouter
_LAYER = "model.layers.{n}."
TENSOR_NAMES = llama.TENSOR_NAMES | {
    "layers.{n}.attention.norm": (_LAYER + "operator_norm",),
    "layers.{n}.attention.query_norm": (_LAYER + "self_attn.q_layernorm",),
    "layers.{n}.attention.key_norm": (_LAYER + "self_attn.k_layernorm",),
    "layers.{n}.attention.output": (_LAYER + "self_attn.out_proj",),
    "layers.{n}.short_conv.norm": (_LAYER + "operator_norm",),
    "layers.{n}.short_conv.input": (_LAYER + "conv.in_proj",),
    "layers.{n}.short_conv.conv": (_LAYER + "conv.conv",),
    "layers.{n}.short_conv.output": (_LAYER + "conv.out_proj",),
    "layers.{n}.ffn.norm": (_LAYER + "ffn_norm",),
    "layers.{n}.ffn.gate_up": (_LAYER + "feed_forward.w1", _LAYER + "feed_forward.w3"),
    "layers.{n}.ffn.down": (_LAYER + "feed_forward.w2",),
    "final_norm.norm": ("model.embedding_norm",),
}


_EXPERT = _LAYER + "feed_forward.experts.{e}."
MOE_NAMES = TENSOR_NAMES | {
    "layers.{n}.moe.norm": (_LAYER + "ffn_norm",),
    "layers.{n}.moe.router": (_LAYER + "feed_forward.gate",),
    "layers.{n}.moe.choice": (_LAYER + "feed_forward.expert_bias",),
    "layers.{n}.moe.gate_up": (_LAYER + "feed_forward.experts.gate_up_proj", _EXPERT + "w1", _EXPERT + "w3"),
    "layers.{n}.moe.down": (_LAYER + "feed_forward.experts.down_proj", _EXPERT + "w2"),
}


def read_moe_spec(fields: Fields, architecture: str) -> ModelSpec:
    """Read LFM2 with experts, in all layers but the first ones."""
    spec = read_spec(fields.with_values(block_auto_adjust_ff_dim=False), architecture)
    router = experts.read_router(
        fields,
        scores=SIGMOID,
        has_choice_bias=fields.flag("use_expert_bias", True),
        renormalizes=fields.flag("norm_topk_prob", True),
        added=ADDED,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    moe = experts.read_experts(fields, spec, router, fields.integer("moe_intermediate_size", 1792))
    return experts.with_experts(spec, moe, range(fields.integer("num_dense_layers", 2, smallest=0)))


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields.refuse_flag("conv_bias", "a bias of its convolutions")
    whole = fields.with_defaults(num_key_value_heads=8, max_position_embeddings=128000, rope_theta=1e6)
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    values = whole.with_values(intermediate_size=_ffn_size(fields), tie_word_embeddings=tied)
    spec = replace(llama.read_spec(values, architecture), norm_eps=fields.number("norm_eps", 1e-5), qk_norm=True)
    layers = range(layer_count(fields))
    attending = fields.get("full_attn_idxs", list(layers))
    if not isinstance(attending, list | tuple):
        raise fields.fail(f"full_attn_idxs is {shown(attending)}, expected a list of layers.")
    default = [FULL if layer in attending else CONV for layer in layers]
    kernel = fields.integer("conv_L_cache", 3, smallest=2, largest=MAX_KERNEL)
    conv = ShortConvSpec(n_channels=spec.hidden_size, kernel=kernel)
    kinds = read_layer_kinds(fields, default, (FULL, CONV))
    own = (LayerSpec(conv, spec.layer(layer).ffn) if kind == CONV else None for layer, kind in enumerate(kinds))
    return replace(spec, own_layers=tuple(own))


def _ffn_size(fields: Fields) -> int:
    """Return the FFN's size, which most files give before an adjustment: two thirds, times a factor, rounded up."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple
