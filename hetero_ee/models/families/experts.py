"""Read the fields of configurations with mixtures of experts."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.layers.moe import MoeSpec, RouterSpec
from hetero_ee.layers.ops import Activation
from hetero_ee.models.families import variants
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TILE_ROWS = 16  # rows of a tile, which must belong to one expert
MAX_EXPERTS = 4096
_MLP = "model.layers.{n}.mlp."
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


def with_sizes(fields: Fields) -> Fields:
    """Return the fields with num_experts, which some files call otherwise, and a size for dense FFNs if there are none.

    Raises:
        ModelError: if a size is impossible.
    """
    n_experts = fields.get("num_experts", fields.get("num_local_experts"))
    dense = fields.get("intermediate_size", fields.integer("moe_intermediate_size"))
    return fields.with_values(num_experts=n_experts, intermediate_size=dense)


def read_experts(fields: Fields, spec: ModelSpec, router: RouterSpec, size: int) -> MoeSpec:
    """Return a layer's experts of `size` neurons, with the activation of the model's FFNs.

    Raises:
        ModelError: for sizes that are not whole tiles.
    """
    for name, found in (("hidden_size", spec.hidden_size), ("an expert's size", size)):
        if found % TILE_ROWS:
            raise fields.fail(f"{name} is {found}, expected a multiple of {TILE_ROWS}, which experts need.")
    activation = Activation(spec.activation, spec.activation_threshold, spec.gated)
    return MoeSpec(router=router, hidden_size=spec.hidden_size, size=size, activation=activation)


def read_router(fields: Fields, **more: Any) -> RouterSpec:
    """Read how many experts there are and how many a token uses. `more` has further fields of RouterSpec."""
    n_experts = fields.integer("num_experts", largest=MAX_EXPERTS)
    n_active = fields.integer("num_experts_per_tok", largest=n_experts)
    return RouterSpec(n_experts=n_experts, n_active=n_active, **more)


def with_experts(spec: ModelSpec, moe: MoeSpec, dense_layers: Collection[int] = ()) -> ModelSpec:
    """Return the model with experts instead of FFNs, except in `dense_layers`."""
    layers = (
        own if layer in dense_layers else replace(own, ffn=moe)
        for layer, own in enumerate(map(spec.layer, range(spec.n_layers)))
    )
    return replace(spec, own_layers=tuple(layers), ffn_size=moe.active_size)


def read_qwen_3(fields: Fields, architecture: str) -> ModelSpec:
    """Read Qwen3-MoE (arXiv 2505.09388), in which some layers may be dense."""
    fields = with_sizes(fields)
    spec = variants.QWEN_3(fields, architecture)
    router = read_router(fields, renormalizes=fields.flag("norm_topk_prob", False))
    moe = read_experts(fields, spec, router, fields.integer("moe_intermediate_size"))
    return with_experts(spec, moe, _dense_layers(fields, spec))


def _dense_layers(fields: Fields, spec: ModelSpec) -> set[int]:
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list | tuple):
        raise fields.fail(f"mlp_only_layers is {shown(dense)}, expected a list of layers.")
    return {layer for layer in range(spec.n_layers) if layer in dense or (layer + 1) % step}
