"""Read DeepSeek-V2 and V3, GLM-4.7-Flash and GLM-4.5: routed and shared experts, in all but GLM-4.5 latent attention.

Source: transformers' DeepseekV2, DeepseekV3, Glm4MoeLite and Glm4Moe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.layers.decoder import LayerSpec
from hetero_ee.layers.latent_attention import LatentAttentionSpec
from hetero_ee.layers.moe import SIGMOID, SOFTMAX, MoeSpec
from hetero_ee.models.families import experts, llama
from hetero_ee.models.families.family import SPLIT
from hetero_ee.models.families.rope_fields import read_score_factor
from hetero_ee.models.families.variants import Variant, values
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

_ATTENTION, _MLP = "model.layers.{n}.self_attn.", "model.layers.{n}.mlp."
MAX_FEATURES, MAX_HEADS = 512, 128  # features of each part of a head, and heads that share a key
MAX_GROUPS = 64  # of experts
ADDED = 1e-20  # to the sum of a token's weights
MOE_NAMES = experts.TENSOR_NAMES | {
    "layers.{n}.moe.choice": (_MLP + "gate.e_score_correction_bias",),
    "layers.{n}.moe.shared_gate_up": (_MLP + "shared_experts.gate_proj", _MLP + "shared_experts.up_proj"),
    "layers.{n}.moe.shared_down": (_MLP + "shared_experts.down_proj",),
}
LATENT_NAMES = {
    "layers.{n}.attention.query": (_ATTENTION + "q_proj",),
    "layers.{n}.attention.query_down": (_ATTENTION + "q_a_proj",),
    "layers.{n}.attention.query_norm": (_ATTENTION + "q_a_layernorm",),
    "layers.{n}.attention.query_up": (_ATTENTION + "q_b_proj",),
    "layers.{n}.attention.key": (_ATTENTION + "kv_a_proj_with_mqa",),
    "layers.{n}.attention.kv_down": (_ATTENTION + "kv_a_proj_with_mqa",),
    "layers.{n}.attention.kv_norm": (_ATTENTION + "kv_a_layernorm",),
    "layers.{n}.attention.key_up": (_ATTENTION + "kv_b_proj",),
    "layers.{n}.attention.value_up": (_ATTENTION + "kv_b_proj",),
    "layers.{n}.attention.key_up" + SPLIT: (_ATTENTION + "k_b_proj",),  # of GGUF files, by head and transposed
    "layers.{n}.attention.value_up" + SPLIT: (_ATTENTION + "v_b_proj",),
}
TENSOR_NAMES = llama.TENSOR_NAMES | MOE_NAMES | LATENT_NAMES


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """A family whose FFNs are routed and shared experts, except in the first layers."""

    defaults: Mapping[str, Any]  # of fields that config.json lacks
    router: Mapping[str, Any]  # fields of RouterSpec
    attention: Variant | None = None  # reads attention that is not latent

    def __call__(self, fields: Fields, architecture: str) -> ModelSpec:
        fields = fields.with_defaults(**self.defaults)
        spec = (self.attention or _read_latent)(fields, architecture)
        whole = experts.with_experts(spec, read_moe(fields, spec, **self.router), _dense_layers(fields, spec))
        return replace(whole, n_unused_layers=fields.integer("num_nextn_predict_layers", 0, smallest=0))


def read_moe(fields: Fields, spec: ModelSpec, **router: Any) -> MoeSpec:
    """Read a layer's routed and shared experts. `router` has further fields of RouterSpec."""
    fields = fields.with_values(num_experts=fields.get("n_routed_experts"))
    n_groups, n_chosen = fields.integer("n_group", 1, largest=MAX_GROUPS), fields.integer("topk_group", 1)
    if n_groups > 1 and fields.text("topk_method", "") != "greedy":
        n_experts, n_active = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
        group_size, rest = divmod(n_experts, n_groups)
        if rest or group_size < 2 or n_chosen > n_groups or n_chosen * group_size < n_active:
            groups = f"n_group is {n_groups} and topk_group {n_chosen}"
            raise fields.fail(f"{groups}, which do not fit {n_experts} experts, {n_active} per token.")
        if n_chosen < n_groups:
            router["groups"] = n_groups, n_chosen, 2 if router["scores"] == SIGMOID else 1
    size, scale = fields.integer("moe_intermediate_size"), fields.number("routed_scaling_factor", 1.0)
    router["renormalizes"] = router["scores"] == SIGMOID and fields.flag("norm_topk_prob", True)
    moe = experts.read_experts(fields, spec, experts.read_router(fields, scale=scale, **router), size)
    return replace(moe, shared_size=size * fields.integer("n_shared_experts", 1, smallest=0))


def _dense_layers(fields: Fields, spec: ModelSpec) -> set[int]:
    n_first = fields.integer("first_k_dense_replace", 0, smallest=0)
    kinds = fields.get("mlp_layer_types", ["dense" if layer < n_first else "sparse" for layer in range(spec.n_layers)])
    known = isinstance(kinds, list | tuple) and all(kind in ("dense", "sparse") for kind in kinds)
    if not known or len(kinds) != spec.n_layers:
        raise fields.fail(f"mlp_layer_types is {shown(kinds)}, expected dense or sparse for {spec.n_layers} layers.")
    return {layer for layer, kind in enumerate(kinds) if kind == "dense"}


def _read_latent(fields: Fields, architecture: str) -> ModelSpec:
    fields.refuse_flag("attention_bias", "a bias of latent attention")
    n_turning = fields.integer("qk_rope_head_dim", 64, largest=MAX_FEATURES)
    plain = fields.with_values(head_dim=n_turning, num_key_value_heads=fields.get("num_attention_heads"))
    spec = llama.read_spec(plain, architecture, interleaved=fields.flag("rope_interleave", True))
    n_plain = fields.integer("qk_nope_head_dim", 128, largest=MAX_FEATURES)
    kv_rank = fields.integer("kv_lora_rank", 512, largest=MAX_FEATURES)
    value_dim = fields.integer("v_head_dim", 128)
    if kv_rank % experts.TILE_ROWS or value_dim % experts.TILE_ROWS:
        raise fields.fail(
            f"kv_lora_rank is {kv_rank} and v_head_dim {value_dim}, expected multiples of {experts.TILE_ROWS}."
        )
    if spec.n_heads > MAX_HEADS:
        raise fields.fail(f"num_attention_heads is {spec.n_heads}, and latent attention has at most {MAX_HEADS} heads.")
    attention = LatentAttentionSpec(
        n_heads=spec.n_heads,
        n_kv_heads=1,
        head_dim=n_turning + kv_rank,
        window=None,
        rope=spec.rope,
        scale=(n_plain + n_turning) ** -0.5 * read_score_factor(fields),
        cap=0.0,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        qk_norm_whole=False,
        norm_eps=LATENT_EPS,
        query_rank=None if fields.is_null("q_lora_rank") else fields.integer("q_lora_rank", 1536, smallest=0) or None,
        kv_rank=kv_rank,
        plain_dim=n_plain,
        value_dim=value_dim,
    )
    own = (LayerSpec(attention, spec.layer(0).ffn),) * spec.n_layers
    return replace(spec, n_kv_heads=1, head_dim=kv_rank, own_layers=own)  # about the sizes of a cached key


LATENT_EPS = 1e-6  # of the latent vectors' norms, whatever rms_norm_eps is
V2 = DeepSeek(values(n_shared_experts=2, topk_method="greedy"), values(scores=SOFTMAX))
_V3_ROUTER = values(scores=SIGMOID, has_choice_bias=True, added=ADDED)
V3 = DeepSeek(values(routed_scaling_factor=2.5, n_group=8, topk_group=4, first_k_dense_replace=3), _V3_ROUTER)
GLM_4_7_FLASH = DeepSeek(
    values(
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
        rms_norm_eps=1e-5,
        max_position_embeddings=202752,
    ),
    _V3_ROUTER,
)
GLM_4_5 = DeepSeek(
    values(first_k_dense_replace=1),
    _V3_ROUTER,
    Variant(
        values(
            num_key_value_heads=8,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
        ),
        values(attention_output_bias=False, ffn_bias=False),
        lambda fields, spec: {"qk_norm": fields.flag("use_qk_norm", False)},
        rotates_part=True,
    ),
)
