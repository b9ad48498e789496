"""Read Llama (arXiv 2302.13971), from which most other families differ in only a few places."""

from dataclasses import replace

from hetero_ee.models.families.family import activation, even_head_dim, layer_count
from hetero_ee.models.families.rope_fields import own_context, read_rope
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = {
    "embedding.tokens": ("model.embed_tokens",),
    "layers.{n}.attention.norm": ("model.layers.{n}.input_layernorm",),
    "layers.{n}.attention.qkv": tuple(f"model.layers.{{n}}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{n}.attention.output": ("model.layers.{n}.self_attn.o_proj",),
    "layers.{n}.ffn.norm": ("model.layers.{n}.post_attention_layernorm",),
    "layers.{n}.ffn.gate_up": ("model.layers.{n}.mlp.gate_proj", "model.layers.{n}.mlp.up_proj"),
    "layers.{n}.ffn.down": ("model.layers.{n}.mlp.down_proj",),
    "final_norm.norm": ("model.norm",),
    "head.tokens": ("lm_head",),
}
NORMED_HEADS = TENSOR_NAMES | {
    "layers.{n}.attention.query_norm": ("model.layers.{n}.self_attn.q_norm",),
    "layers.{n}.attention.key_norm": ("model.layers.{n}.self_attn.k_norm",),
}
# Further names of families, where they differ from Llama's.
QKV = {"layers.{n}.attention.qkv": ("model.layers.{n}.self_attn.qkv_proj",)}
GATE_UP = {"layers.{n}.ffn.gate_up": ("model.layers.{n}.mlp.gate_up_proj",)}
TWO_MATRICES = {
    "layers.{n}.ffn.up": ("model.layers.{n}.mlp.c_fc",),
    "layers.{n}.ffn.down": ("model.layers.{n}.mlp.c_proj",),
}


def post_norms(attention: str, ffn: str) -> dict[str, tuple[str, ...]]:
    """Map this engine's norms after attention and FFN to the checkpoint's modules with the given names."""
    return {
        "layers.{n}.attention.post_norm": (f"model.layers.{{n}}.{attention}",),
        "layers.{n}.ffn.post_norm": (f"model.layers.{{n}}.{ffn}",),
    }


def read_spec(fields: Fields, architecture: str, *, rotates_part: bool = False, interleaved: bool = False) -> ModelSpec:
    """Read the fields of config.json as Llama's. See read_rope for `rotates_part` and RopeSpec for `interleaved`."""
    hidden_size, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    n_layers = layer_count(fields)
    head_dim = even_head_dim(fields) if fields.get("head_dim") is None else fields.integer("head_dim")
    # A null means one key head per query head, whatever the class's default.
    is_null = fields.is_null("num_key_value_heads")
    n_kv_heads = n_heads if is_null else fields.integer("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise fields.fail(f"num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}.")
    context_tokens = fields.integer("max_position_embeddings", 2048)
    activation_name, threshold = activation(fields, "hidden_act", "silu")
    rope = read_rope(fields, head_dim, context_tokens, rotates_part=rotates_part)
    rope = replace(rope, interleaved=interleaved)
    attention_bias = fields.flag("attention_bias", False)
    return ModelSpec(
        architecture=architecture,
        n_layers=n_layers,
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_context_tokens=own_context(rope, context_tokens),
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=activation_name,
        activation_threshold=threshold,
        gated=True,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        ffn_bias=fields.flag("mlp_bias", False),
        rope=rope,
        sliding_windows=(None,) * n_layers,
        tied_head=fields.flag("tie_word_embeddings", False),
    )
