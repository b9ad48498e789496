"""Read Granite 4 Hybrid: Mamba-2 in most layers, attention in the others, and experts except in small models.

Source: transformers' GraniteMoeHybrid. Models without experts use the tensors of the shared expert as a plain FFN.
"""

from dataclasses import replace

from hetero_ee.layers.decoder import LayerSpec
from hetero_ee.layers.moe import OF_CHOSEN
from hetero_ee.models.families import experts, llama, nemotron_h, variants
from hetero_ee.models.families.family import SPLIT, layer_count, read_layer_kinds, recurrent_names
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

_SHARED, _MLP = "model.layers.{n}.shared_mlp.", "model.layers.{n}.mlp."
_MAMBA_NAMES = recurrent_names("mamba", "model.layers.{n}.mamba.", input=("in_proj",), skips=("D",))
TENSOR_NAMES = llama.TENSOR_NAMES | experts.GRANITE_NAMES | _MAMBA_NAMES
TENSOR_NAMES |= {"layers.{n}.mamba.norm": ("model.layers.{n}.input_layernorm",)}
for _name in ("layers.{n}.moe.gate_up", "layers.{n}.moe.down"):  # GGUF files have tensors of each expert's modules
    TENSOR_NAMES[_name] += experts.TENSOR_NAMES[_name][1:]
for _kind, _split in {"moe.shared_": _MLP + "shared_expert.", "ffn.": _MLP}.items():
    TENSOR_NAMES[f"layers.{{n}}.{_kind}gate_up"] = (_SHARED + "input_linear",)
    TENSOR_NAMES[f"layers.{{n}}.{_kind}down"] = (_SHARED + "output_linear",)
    # GGUF files split it, and name it differently with and without experts.
    TENSOR_NAMES[f"layers.{{n}}.{_kind}gate_up{SPLIT}"] = (_split + "gate_proj", _split + "up_proj")
    TENSOR_NAMES[f"layers.{{n}}.{_kind}down{SPLIT}"] = (_split + "down_proj",)
# Nemotron-H's names of fields, and those here.
_MAMBA = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
}
_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "mamba_n_heads": 128}
_DEFAULTS |= {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_expand": 2}


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields.refuse_flag("mamba_proj_bias", "a bias of its matrices")
    fields = fields.with_defaults(**_DEFAULTS)
    shared_size, n_experts = fields.integer("shared_intermediate_size"), fields.integer("num_local_experts", smallest=0)
    spec = variants.GRANITE(fields.with_values(intermediate_size=shared_size), architecture)
    rotates = fields.get("position_embedding_type") == "rope"
    spec = replace(spec, rope=spec.rope if rotates else None)
    plain, mamba = spec.layer(0), nemotron_h.read_mamba(_mamba_fields(fields), spec)
    own = (LayerSpec(mamba, plain.ffn) if kind == nemotron_h.MAMBA else plain for kind in _read_kinds(fields))
    spec = replace(spec, own_layers=tuple(own))
    if not n_experts:
        return spec
    fields = fields.with_values(num_experts=n_experts)
    router = experts.read_router(fields, scores=OF_CHOSEN)
    moe = experts.read_experts(fields, spec, router, fields.integer("intermediate_size"))
    return experts.with_experts(spec, replace(moe, shared_size=shared_size))


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    kinds = fields.get("layer_types", fields.get("layers_block_type"))
    if isinstance(kinds, list | tuple):
        fields = fields.with_values(layer_types=[nemotron_h.OLDER.get(str(kind), kind) for kind in kinds])
    known = nemotron_h.MAMBA, nemotron_h.ATTENTION
    return read_layer_kinds(fields, known[:1] * layer_count(fields), known)


def _mamba_fields(fields: Fields) -> Fields:
    if fields.get("mamba_d_head", "auto") == "auto":
        size = fields.integer("mamba_expand") * fields.integer("hidden_size")
        fields = fields.with_values(mamba_d_head=size // fields.integer("mamba_n_heads"))
    return fields.with_values(**{theirs: fields.get(name) for theirs, name in _MAMBA.items()})
