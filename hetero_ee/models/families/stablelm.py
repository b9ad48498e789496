"""StableLM (arXiv 2402.17834): Llama with LayerNorm and a quarter of each head rotating."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields.refuse_flag("use_parallel_residual", "an FFN parallel to the attention (as in stablelm-2-12b)")
    fields.refuse_flag("qk_layernorm", "a LayerNorm per head (as in stablelm-2-12b)")
    fields = fields.with_defaults(
        num_key_value_heads=32, max_position_embeddings=4096, partial_rotary_factor=0.25, hidden_act="silu"
    )
    spec = llama.read_spec(fields, architecture, rotates_part=True)
    return replace(
        spec,
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        qkv_bias=fields.flag("use_qkv_bias", False),
        attention_output_bias=False,
        ffn_bias=False,
    )
