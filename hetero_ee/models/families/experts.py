"""Read the fields of configurations with mixtures of experts."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.layers.moe import OF_CHOSEN, SOFTMAX, MoeSpec, RouterSpec
from hetero_ee.layers.ops import Activation
from hetero_ee.models.families import variants
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TILE_ROWS = 16  # rows of a tile, which must belong to one expert
MAX_EXPERTS, MAX_ACTIVE = 4096, 64  # of a layer, and of one token
ReadSpec = Callable[[Fields, str], ModelSpec]
_MLP, _SPARSE = "model.layers.{n}.mlp.", "model.layers.{n}.block_sparse_moe."
# Of experts' matrices: the tensor of all experts, and the modules of each.
TENSOR_NAMES = {
    "layers.{n}.moe.norm": ("model.layers.{n}.post_attention_layernorm",),
    "layers.{n}.moe.router": (_MLP + "gate",),
    "layers.{n}.moe.gate_up": (
        _MLP + "experts.gate_up_proj",
        _MLP + "experts.{e}.gate_proj",
        _MLP + "experts.{e}.up_proj",
    ),
    "layers.{n}.moe.down": (_MLP + "experts.down_proj", _MLP + "experts.{e}.down_proj"),
    "layers.{n}.moe.shared_gate_up": (_MLP + "shared_expert.gate_proj", _MLP + "shared_expert.up_proj"),
    "layers.{n}.moe.shared_down": (_MLP + "shared_expert.down_proj",),
    "layers.{n}.moe.shared_gate": (_MLP + "shared_expert_gate",),
}


MIXTRAL_NAMES = TENSOR_NAMES | {  # there is no tensor of all experts
    "layers.{n}.moe.router": (_SPARSE + "gate",),
    "layers.{n}.moe.gate_up": ("", _SPARSE + "experts.{e}.w1", _SPARSE + "experts.{e}.w3"),
    "layers.{n}.moe.down": ("", _SPARSE + "experts.{e}.w2"),
}
GRANITE_NAMES = TENSOR_NAMES | {  # only GGUF files have tensors of each
    "layers.{n}.moe.router": (_SPARSE + "router.layer",),
    "layers.{n}.moe.gate_up": (_SPARSE + "input_linear.weight",),
    "layers.{n}.moe.down": (_SPARSE + "output_linear.weight",),
}


def reader(
    read_dense: ReadSpec,
    *,
    size: str = "moe_intermediate_size",
    scores: str = SOFTMAX,
    renormalizes: bool | None = None,
    shared: int | None = None,
) -> ReadSpec:
    """Return a family's reader, which replaces the FFNs of a dense family by experts.

    Args:
        read_dense: reads the dense family.
        size: field with an expert's number of neurons.
        scores: see RouterSpec.
        renormalizes: see RouterSpec; None to read it from norm_topk_prob.
        shared: default size of a gated expert that every token uses; None for families without one.
    """

    def read(fields: Fields, architecture: str) -> ModelSpec:
        fields = _with_sizes(fields)
        spec = read_dense(fields, architecture)
        is_normed = fields.flag("norm_topk_prob", False) if renormalizes is None else renormalizes
        router = read_router(fields, scores=scores, renormalizes=is_normed)
        moe = read_experts(fields, spec, router, fields.integer(size))
        if shared is not None:
            shared_size = fields.integer("shared_expert_intermediate_size", shared)
            moe = replace(moe, shared_size=shared_size, shared_is_gated=True)
        return with_experts(spec, moe, _dense_layers(fields, spec))

    return read


def _with_sizes(fields: Fields) -> Fields:
    """Add num_experts, which some files call num_local_experts, and the size of dense FFNs, if they are missing."""
    n_experts = fields.get("num_experts", fields.get("num_local_experts"))
    dense = fields.get("intermediate_size", fields.get("moe_intermediate_size"))
    return fields.with_values(num_experts=n_experts, intermediate_size=dense)


def read_experts(fields: Fields, spec: ModelSpec, router: RouterSpec, size: int) -> MoeSpec:
    """Return a layer's experts of `size` neurons, with the activation of the model's FFNs.

    Raises:
        ModelError: if a size is not a multiple of TILE_ROWS.
    """
    for name, found in (("hidden_size", spec.hidden_size), ("an expert's size", size)):
        if found % TILE_ROWS:
            raise fields.fail(f"{name} is {found}, expected a multiple of {TILE_ROWS} in a model with experts.")
    activation = Activation(spec.activation, spec.activation_threshold, spec.gated)
    return MoeSpec(router=router, hidden_size=spec.hidden_size, size=size, activation=activation)


def read_router(fields: Fields, **more: Any) -> RouterSpec:
    """Read the number of experts and of experts per token. `more` has further fields of RouterSpec."""
    n_experts = fields.integer("num_experts", largest=MAX_EXPERTS)
    n_active = fields.integer("num_experts_per_tok", largest=min(n_experts, MAX_ACTIVE))
    return RouterSpec(n_experts=n_experts, n_active=n_active, **more)


def with_experts(spec: ModelSpec, moe: MoeSpec, dense_layers: Collection[int] = ()) -> ModelSpec:
    """Return the model with experts instead of FFNs, except in `dense_layers`. Its MTP layer has experts, too."""
    layers = (
        own if layer in dense_layers else replace(own, ffn=moe)
        for layer, own in enumerate(map(spec.layer, range(spec.n_layers)))
    )
    mtp = spec.mtp and replace(spec.mtp, ffn=moe)
    return replace(spec, own_layers=tuple(layers), ffn_size=moe.active_size, mtp=mtp)


def read_qwen_2_attention(fields: Fields, architecture: str) -> ModelSpec:
    """Read the fields of Qwen2-MoE (arXiv 2407.10671) that dense models have, too."""
    fields.refuse_flag("use_sliding_window", "a window of some layers")
    spec = variants.QWEN_2(fields, architecture)
    return replace(spec, qkv_bias=fields.flag("qkv_bias", True))


def read_olmoe_attention(fields: Fields, architecture: str) -> ModelSpec:
    """Read the fields of OLMoE (arXiv 2409.02060) that dense models have, too."""
    if fields.get("clip_qkv") is not None:
        raise fields.fail(f"clip_qkv is {shown(fields.get('clip_qkv'))}, and clipped queries are not supported.")
    return variants.OLMOE(fields, architecture)


def _dense_layers(fields: Fields, spec: ModelSpec) -> set[int]:
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list | tuple):
        raise fields.fail(f"mlp_only_layers is {shown(dense)}, expected a list of layers.")
    return {layer for layer in range(spec.n_layers) if layer in dense or (layer + 1) % step}


# Mixtral: arXiv 2401.04088
QWEN_2 = reader(read_qwen_2_attention, shared=5632)
QWEN_3 = reader(variants.QWEN_3)
MIXTRAL = reader(variants.MIXTRAL, size="intermediate_size", renormalizes=True)
OLMOE = reader(read_olmoe_attention, size="intermediate_size")
GRANITE = reader(variants.GRANITE, size="intermediate_size", scores=OF_CHOSEN, renormalizes=False)
