"""Read Qwen3-Next, Qwen3.5, 3.6 and 3.8: most layers are gated delta layers, every fourth one is a gated attention."""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.decoder import LayerSpec
from hetero_ee.layers.delta import GatedDeltaSpec
from hetero_ee.models.families.family import (
    FULL,
    LINEAR,
    MAX_KERNEL,
    MAX_KEY_DIM,
    SPLIT,
    layer_count,
    read_layer_kinds,
    recurrent_names,
)
from hetero_ee.models.families.llama import NORMED_HEADS
from hetero_ee.models.families.rope_fields import without_mrope
from hetero_ee.models.families.variants import Variant, values
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TILED_FIELD = "hetero_ee_tiled_value_heads"  # added to config.json for files whose value heads are in another order
NEXT, MTP_FIELD = "Qwen3NextForCausalLM", "mtp_num_hidden_layers"
_DELTA = "model.layers.{n}.linear_attn."
TENSOR_NAMES = NORMED_HEADS | {
    "layers.{n}.attention.qkv": tuple(f"model.layers.{{n}}.self_attn.{part}_proj" for part in "qkvq"),
    "layers.{n}.delta.norm": ("model.layers.{n}.input_layernorm",),
    **recurrent_names("delta", _DELTA, input=("in_proj_qkv", "in_proj_z"), gates=("in_proj_b", "in_proj_a")),
    "layers.{n}.mtp.fc": ("model.layers.{n}.eh_proj",),
    "layers.{n}.mtp.embedding_norm": ("model.layers.{n}.enorm",),
    "layers.{n}.mtp.hidden_norm": ("model.layers.{n}.hnorm",),
    "layers.{n}.mtp.head_norm": ("model.layers.{n}.shared_head.norm",),
}
# Of Qwen3-Next, which stores a key head's rows of all parts together, one head after the other.
NEXT_NAMES = {
    "layers.{n}.delta.input": (_DELTA + "in_proj_qkvz",) * 4,
    "layers.{n}.delta.input" + SPLIT: TENSOR_NAMES["layers.{n}.delta.input"],  # of GGUF files
    "layers.{n}.delta.gates": (_DELTA + "in_proj_ba",) * 2,
}
_DENSE = Variant(
    values(head_dim=256, num_key_value_heads=4, max_position_embeddings=32768, partial_rotary_factor=0.25),
    values(ffn_bias=False, qk_norm=True, norm_offset=1.0),
    rotates_part=True,
)


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    if not fields.flag("attn_output_gate", True):
        raise fields.fail("attn_output_gate is false, and attention without an output gate is not supported.")
    every = fields.integer("full_attention_interval", 4)
    default = [LINEAR if (layer + 1) % every else FULL for layer in range(layer_count(fields))]
    kinds = read_layer_kinds(fields, default, (FULL, LINEAR))
    spec = _DENSE(without_mrope(fields), architecture)
    delta = _read_delta(fields, spec)
    plain = spec.layer(0)
    assert isinstance(plain.mixer, AttentionSpec), "no layer is defined separately yet"
    full = LayerSpec(replace(plain.mixer, is_gated=True), plain.ffn)
    own = [full if kind == FULL else LayerSpec(delta, plain.ffn) for kind in kinds]
    return replace(spec, own_layers=tuple(own), mtp=full if _has_mtp(fields, architecture) else None)


def _has_mtp(fields: Fields, architecture: str) -> bool:
    """Return whether there may be an MTP layer that can be used: with the model's embedding and lm_head, not its own.

    Qwen3-Next's checkpoints hold one, but its config.json doesn't mention it.
    """
    n_layers = fields.integer(MTP_FIELD, int(architecture == NEXT), smallest=0)
    return n_layers > 0 and not fields.flag("mtp_use_dedicated_embeddings", False)


def _read_delta(fields: Fields, spec: ModelSpec) -> GatedDeltaSpec:
    n_key_heads, n_value_heads = (
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
    )
    if n_value_heads % n_key_heads:
        raise fields.fail(
            f"linear_num_value_heads {n_value_heads} is not a multiple of linear_num_key_heads {n_key_heads}."
        )
    if spec.activation != "silu":
        raise fields.fail(f"hidden_act is {shown(spec.activation)}, expected silu, as its linear attention needs.")
    return GatedDeltaSpec(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=fields.integer("linear_key_head_dim", 128, largest=MAX_KEY_DIM),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4, smallest=2, largest=MAX_KERNEL),
        norm_eps=spec.norm_eps,
        is_tiled=fields.flag(TILED_FIELD, False),
    )
