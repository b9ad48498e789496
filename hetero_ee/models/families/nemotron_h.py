"""Read Nemotron-H and Nemotron 3: each layer is one mixer, Mamba-2, attention without rotation, experts or an FFN.

Source: transformers' NemotronHConfig and NemotronHModel. As its decoding and other engines do, and unlike its prefill,
time steps have no lower limit.
"""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.decoder import LayerSpec
from hetero_ee.layers.mamba import MambaSpec
from hetero_ee.layers.moe import SIGMOID
from hetero_ee.layers.ops import MixerSpec
from hetero_ee.models.families import deepseek, llama
from hetero_ee.models.families.family import MAX_KERNEL, MAX_KEY_DIM, recurrent_names
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

MAMBA, ATTENTION, MOE, MLP = KINDS = "linear_attention", "full_attention", "moe", "mlp"
LETTERS = dict(zip("M*E-", KINDS, strict=True))  # in older files
OLDER = {"mamba": MAMBA, "attention": ATTENTION}
_LAYER = "backbone.layers.{n}."
_MIXER = _LAYER + "mixer."
TENSOR_NAMES = {
    "embedding.tokens": ("backbone.embeddings",),
    **{f"layers.{{n}}.{name}.norm": (_LAYER + "norm",) for name in ("mamba", "attention", "moe", "ffn")},
    **recurrent_names("mamba", _MIXER, input=("in_proj",), skips=("D",)),
    "layers.{n}.attention.qkv": tuple(f"{_MIXER}{part}_proj" for part in "qkv"),
    "layers.{n}.attention.output": (_MIXER + "o_proj",),
    "layers.{n}.moe.router": (_MIXER + "gate",),
    "layers.{n}.moe.choice": (_MIXER + "gate.e_score_correction_bias",),
    "layers.{n}.moe.up": (_MIXER + "experts.up_proj", _MIXER + "experts.{e}.up_proj"),
    "layers.{n}.moe.down": (_MIXER + "experts.down_proj", _MIXER + "experts.{e}.down_proj"),
    "layers.{n}.moe.shared_up": (_MIXER + "shared_experts.up_proj",),
    "layers.{n}.moe.shared_down": (_MIXER + "shared_experts.down_proj",),
    "layers.{n}.ffn.up": (_MIXER + "up_proj",),
    "layers.{n}.ffn.down": (_MIXER + "down_proj",),
    "final_norm.norm": ("backbone.norm_f",),
    "head.tokens": ("lm_head",),
}


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    kinds = _read_kinds(fields)
    for flag in ("use_bias", "mamba_proj_bias"):
        fields.refuse_flag(flag, "a bias of its matrices")
    plain = fields.with_defaults(num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    plain = plain.with_values(
        num_hidden_layers=len(kinds),
        hidden_act=fields.text("mlp_hidden_act", "relu2"),
        rms_norm_eps=fields.get("layer_norm_epsilon", fields.get("norm_eps")),
        attention_bias=None,
    )
    spec = replace(llama.read_spec(plain, architecture), gated=False, rope=None)
    usual = spec.layer(0)
    assert isinstance(usual.mixer, AttentionSpec) and usual.ffn is not None, "no layer is defined separately yet"
    mixers: dict[str, MixerSpec] = {ATTENTION: usual.mixer, MLP: usual.ffn}
    if MAMBA in kinds:
        mixers[MAMBA] = read_mamba(fields, spec)
    if MOE in kinds:
        if fields.get("moe_latent_size") is not None:
            raise fields.fail("moe_latent_size is set, and experts of a latent vector are not supported.")
        moe = deepseek.read_moe(fields, spec, scores=SIGMOID, has_choice_bias=True, added=deepseek.ADDED)
        shared = fields.integer("moe_shared_expert_intermediate_size", 7688)
        mixers[MOE] = moe = replace(moe, shared_size=shared * bool(moe.shared_size))
        spec = replace(spec, ffn_size=moe.active_size)
    own = {kind: LayerSpec(mixer, None) for kind, mixer in mixers.items()}
    return replace(spec, own_layers=tuple(own[kind] for kind in kinds))


def _read_kinds(fields: Fields) -> list[str]:
    """Return each layer's kind."""
    pattern = fields.text("hybrid_override_pattern", "")
    kinds = fields.get("layers_block_type", fields.get("layer_types", [LETTERS.get(each, each) for each in pattern]))
    kinds = [OLDER.get(str(kind), kind) for kind in kinds] if isinstance(kinds, list | tuple) else []
    if not kinds or any(kind not in KINDS for kind in kinds):
        name = "hybrid_override_pattern" if pattern else "layers_block_type"
        raise fields.fail(f"{name} is {shown(fields.get(name))}, expected one of {', '.join(KINDS)} for each layer.")
    return kinds


def read_mamba(fields: Fields, spec: ModelSpec) -> MambaSpec:
    n_heads, n_groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if n_heads % n_groups:
        raise fields.fail(f"mamba_num_heads {n_heads} is not a multiple of n_groups {n_groups}.")
    if (name := fields.text("mamba_hidden_act", "silu")) != "silu":
        raise fields.fail(f"mamba_hidden_act is {shown(name)}, expected silu.")
    return MambaSpec(
        n_key_heads=n_groups,
        n_value_heads=n_heads,
        key_dim=fields.integer("ssm_state_size", 128, largest=MAX_KEY_DIM),
        value_dim=fields.integer("mamba_head_dim", 64),
        kernel=fields.integer("conv_kernel", 4, smallest=2, largest=MAX_KERNEL),
        norm_eps=spec.norm_eps,
        is_tiled=False,
        has_conv_bias=fields.flag("use_conv_bias", True),
    )
