"""Read Gemma 4, whose layers differ in head size, key heads, window, rotary embedding and FFN size.

Layers with experts add them to the FFN, which is their shared expert. All of its parts read one norm of the layer's
input, each with a scale of its own.

Source: transformers' Gemma4TextConfig and Gemma4TextModel.
"""

from collections.abc import Sequence
from dataclasses import replace

from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.decoder import LayerSpec
from hetero_ee.layers.ffn import FfnSpec
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.layers.per_layer import LayerTableSpec, PerLayerSpec
from hetero_ee.models.families import experts
from hetero_ee.models.families.family import FULL, SLIDING, layer_count, read_layer_kinds, read_window, sliding_windows
from hetero_ee.models.families.llama import NORMED_HEADS, post_norms
from hetero_ee.models.families.rope_fields import of_layer_kind
from hetero_ee.models.families.variants import LATER_GEMMA, Variant, gemma_scale, later_gemma_fields, values
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = (
    NORMED_HEADS
    | post_norms("post_attention_layernorm", "post_feedforward_layernorm")
    | {
        "layers.{n}.ffn.norm": ("model.layers.{n}.pre_feedforward_layernorm",),
        "layers.{n}.ffn.layer_scale": ("model.layers.{n}.layer_scalar",),
        # of the E models
        "table.tokens": ("model.embed_tokens_per_layer",),
        "layers.{n}.per_layer.context": ("model.per_layer_model_projection",),
        "table.context_norm": ("model.per_layer_projection_norm",),
        "layers.{n}.per_layer.gate": ("model.layers.{n}.per_layer_input_gate",),
        "layers.{n}.per_layer.output": ("model.layers.{n}.per_layer_projection",),
        "layers.{n}.per_layer.post_norm": ("model.layers.{n}.post_per_layer_input_norm",),
        "layers.{n}.per_layer.layer_scale": ("model.layers.{n}.layer_scalar",),
        # of layers with experts
        "layers.{n}.moe.router": ("model.layers.{n}.router.proj",),
        "layers.{n}.moe.factors": ("model.layers.{n}.router.per_expert_scale",),
        "layers.{n}.moe.router_scale": ("model.layers.{n}.router.scale",),
        "layers.{n}.moe.input_scale": ("model.layers.{n}.pre_feedforward_layernorm_2",),
        "layers.{n}.moe.shared_scale": ("model.layers.{n}.pre_feedforward_layernorm",),
        "layers.{n}.moe.output_norm": ("model.layers.{n}.post_feedforward_layernorm_2",),
        "layers.{n}.moe.shared_norm": ("model.layers.{n}.post_feedforward_layernorm_1",),
        "layers.{n}.moe.gate_up": (
            "model.layers.{n}.experts.gate_up_proj",
            "model.layers.{n}.experts.{e}.gate_proj",
            "model.layers.{n}.experts.{e}.up_proj",
        ),
        "layers.{n}.moe.down": ("model.layers.{n}.experts.down_proj", "model.layers.{n}.experts.{e}.down_proj"),
        "layers.{n}.moe.shared_gate_up": NORMED_HEADS["layers.{n}.ffn.gate_up"],
        "layers.{n}.moe.shared_down": NORMED_HEADS["layers.{n}.ffn.down"],
        "layers.{n}.moe.post_norm": ("model.layers.{n}.post_feedforward_layernorm",),
        "layers.{n}.moe.layer_scale": ("model.layers.{n}.layer_scalar",),
    }
)
EVERY = 6  # every sixth layer sees all positions
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _fields(fields: Fields) -> Fields:
    if fields.get("use_bidirectional_attention") == "all":
        raise fields.fail("use_bidirectional_attention is all, and attention to later tokens is not supported.")
    if fields.get("rope_parameters") is None:
        fields = fields.with_values(rope_parameters=ROPES)
    return later_gemma_fields(fields.with_values(use_bidirectional_attention=None))


_VARIANT = Variant(
    {**LATER_GEMMA, "vocab_size": 262144, "max_position_embeddings": 131072, "sliding_window": 512},
    values(post_norm=True, qk_norm=True, attention_scale=1.0),
    gemma_scale,
    _fields,
)


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    """Read Gemma 4's text part."""
    n_layers = layer_count(fields)
    kinds = read_layer_kinds(fields, [SLIDING if (layer + 1) % EVERY else FULL for layer in range(n_layers)])
    kinds = (*kinds[:-1], FULL)  # as transformers does, whatever the file says
    prepared = _fields(fields)
    near = _VARIANT(of_layer_kind(prepared, SLIDING, 1e4), architecture)
    full = _VARIANT(_of_full_layers(of_layer_kind(prepared, FULL, 1e6), kinds), architecture)
    windows = sliding_windows(kinds, read_window(fields.with_defaults(sliding_window=512)))
    near, full = (replace(each, sliding_windows=windows) for each in (near, full))
    n_own = n_layers - fields.integer("num_kv_shared_layers", 0, smallest=0)
    if not set(kinds[n_own:]) <= set(kinds[: max(n_own, 0)]):
        raise fields.fail(f"num_kv_shared_layers {n_layers - n_own} leaves no layers of their own to share.")
    equal, wide = fields.flag("attention_k_eq_v", False), fields.flag("use_double_wide_mlp", False)
    table, moe = _table(fields, near), _experts(fields, near)
    layers = []
    for layer, kind in enumerate(kinds):
        is_full, shares = kind == FULL, layer >= n_own
        found = (full if is_full else near).layer(layer)
        assert isinstance(found.mixer, AttentionSpec) and isinstance(found.ffn, FfnSpec)
        source = max(each for each in range(n_own) if kinds[each] == kind) if shares else None
        mixer = replace(found.mixer, value_norm=True, keys_are_values=equal and is_full and not shares, kv_layer=source)
        ffn = replace(found.ffn, size=found.ffn.size * 2) if wide and shares else found.ffn
        per_layer = None if table is None else _per_layer(near, ffn, table)
        both = ffn if moe is None else replace(moe, shared_size=ffn.size)
        layers.append(LayerSpec(mixer, both, per_layer, is_scaled=True))
    cap = fields.number("final_logit_softcapping", 0.0)
    spec = replace(near, own_layers=tuple(layers), layer_table=table, logit_cap=cap)
    return spec if moe is None else replace(spec, ffn_size=moe.active_size)


def _experts(fields: Fields, spec: ModelSpec) -> MoeSpec | None:
    """Return a layer's experts, None for models without any."""
    if not fields.flag("enable_moe_block", False):
        return None
    fields = fields.with_values(num_experts_per_tok=fields.get("top_k_experts"))
    router = experts.read_router(fields, renormalizes=True, has_factors=True)
    moe = experts.read_experts(fields, spec, router, fields.integer("moe_intermediate_size"))
    return replace(moe, shared_size=spec.ffn_size, inner_norm_eps=spec.norm_eps)


def _table(fields: Fields, spec: ModelSpec) -> LayerTableSpec | None:
    """Return the sizes of the per-layer embeddings' table, None if the model has none."""
    default = 0 if fields.text("model_type", "").startswith("gemma4_unified") else 256
    size = fields.integer("hidden_size_per_layer_input", default, smallest=0)
    if not size:
        return None
    n_rows = fields.integer("vocab_size_per_layer_input", 262144)
    if n_rows < spec.vocab_size:
        raise fields.fail(
            f"vocab_size_per_layer_input is {n_rows}, expected a row for each of {spec.vocab_size} tokens."
        )
    return LayerTableSpec(n_rows, spec.n_layers, size)


def _per_layer(spec: ModelSpec, ffn: FfnSpec, table: LayerTableSpec) -> PerLayerSpec:
    activation = replace(ffn.activation, gated=False)
    return PerLayerSpec(table=table, hidden_size=spec.hidden_size, activation=activation, norm_eps=spec.norm_eps)


def _of_full_layers(fields: Fields, kinds: Sequence[str]) -> Fields:
    """Return the fields with the head size and key heads of layers that see all positions.

    transformers 5 lists every layer's own fields in per_layer_config. Older files have fields for these layers.
    """
    own = fields.section("per_layer_config").section(str(kinds.index(FULL)))
    n_kv_heads = fields.get("num_global_key_value_heads") if fields.flag("attention_k_eq_v", False) else None
    return fields.with_values(
        head_dim=own.get("head_dim", fields.get("global_head_dim", 512)),
        num_key_value_heads=own.get("num_key_value_heads", n_kv_heads or fields.get("num_key_value_heads")),
    )
