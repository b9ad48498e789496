"""Read gpt-oss: attention with a sink per head and, in every second layer, a window; experts with biases.

Source: transformers' GptOssConfig and GptOssModel.
"""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.layers.moe import OF_CHOSEN
from hetero_ee.layers.ops import CLAMPED_SILU, Activation
from hetero_ee.models.families import experts, llama
from hetero_ee.models.families.family import FULL, SLIDING, layer_count, read_layer_kinds, read_window, sliding_windows
from hetero_ee.models.families.variants import Variant, values
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = (
    llama.TENSOR_NAMES
    | experts.TENSOR_NAMES
    | {
        "layers.{n}.attention.sinks": ("model.layers.{n}.self_attn.sinks",),
        "layers.{n}.moe.router": ("model.layers.{n}.mlp.router",),
    }
)
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SIGMOID_FACTOR = 1.702  # of the activation
_PLAIN = Variant(
    values(
        head_dim=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
    ),
    {},
)


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = fields.with_values(rope_parameters=ROPE)
    fields = fields.with_values(num_experts=fields.get("num_local_experts", fields.get("num_experts", 128)))
    factor, limit = fields.number("swiglu_alpha", SIGMOID_FACTOR), fields.number("swiglu_limit", 7.0)
    name = fields.text("hidden_act", "silu")
    if factor != SIGMOID_FACTOR or name != "silu":
        raise fields.fail(
            f"swiglu_alpha {factor:g} with hidden_act {shown(name)} is not supported, expected 1.702 with silu."
        )
    spec = _PLAIN(fields, architecture)
    kinds = read_layer_kinds(fields, [FULL if layer % 2 else SLIDING for layer in range(layer_count(fields))])
    windows = sliding_windows(kinds, read_window(fields.with_defaults(sliding_window=128)))
    spec = replace(spec, sliding_windows=windows)
    spec = replace(spec, own_layers=spec.changed_layers(has_sinks=True))
    router = experts.read_router(fields.with_defaults(num_experts_per_tok=4), scores=OF_CHOSEN, has_bias=True)
    moe = experts.read_experts(fields, spec, router, fields.integer("intermediate_size"))
    return experts.with_experts(spec, replace(moe, activation=Activation(CLAMPED_SILU, limit, True), bias=True))
