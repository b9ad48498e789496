"""Read OPT (arXiv 2205.01068): learned positions, LayerNorm, biases, an FFN of two matrices."""

from hetero_ee.models.families.family import activation, even_head_dim, layer_count
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = {
    "embedding.tokens": ("model.decoder.embed_tokens",),
    "embedding.positions": ("model.decoder.embed_positions",),
    "layers.{n}.attention.norm": ("model.decoder.layers.{n}.self_attn_layer_norm",),
    "layers.{n}.attention.qkv": tuple(f"model.decoder.layers.{{n}}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{n}.attention.output": ("model.decoder.layers.{n}.self_attn.out_proj",),
    "layers.{n}.ffn.norm": ("model.decoder.layers.{n}.final_layer_norm",),
    "layers.{n}.ffn.up": ("model.decoder.layers.{n}.fc1",),
    "layers.{n}.ffn.down": ("model.decoder.layers.{n}.fc2",),
    "final_norm.norm": ("model.decoder.final_layer_norm",),
    "head.tokens": ("lm_head",),
}


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    hidden_size, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    embedding_size = fields.integer("word_embed_proj_dim", hidden_size)
    if not fields.flag("do_layer_norm_before", True) or embedding_size != hidden_size:
        raise fields.fail("OPT with norms after the blocks or projected embeddings (opt-350m) is not supported.")
    n_layers = layer_count(fields)
    activation_name, threshold = activation(fields, "activation_function", "relu")
    bias = fields.flag("enable_bias", True)
    return ModelSpec(
        architecture=architecture,
        n_layers=n_layers,
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=even_head_dim(fields),
        ffn_size=fields.integer("ffn_dim"),
        vocab_size=fields.integer("vocab_size"),
        max_context_tokens=fields.integer("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,  # torch's default for LayerNorm
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        final_norm=not fields.flag("_remove_final_layer_norm", False),
        activation=activation_name,
        activation_threshold=threshold,
        gated=False,
        qkv_bias=bias,
        attention_output_bias=bias,
        ffn_bias=bias,
        learned_position_offset=2,
        sliding_windows=(None,) * n_layers,
        tied_head=fields.flag("tie_word_embeddings", True),
        context_is_fixed=True,
    )
