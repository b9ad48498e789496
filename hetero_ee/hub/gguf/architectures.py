"""The supported architectures of GGUF files. To add one, add an entry to ARCHITECTURES.

Source: llama.cpp's converter (conversion/) and graphs (src/models/), and the names of the gguf package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hetero_ee.errors import shown
from hetero_ee.hub.gguf import architecture_fields as fields_of
from hetero_ee.hub.gguf.architecture_fields import Config
from hetero_ee.hub.gguf.architecture_names import (
    AFTER_ATTENTION,
    CAPS,
    DEEPSEEK_FIELDS,
    EXPERTS,
    FUSED,
    GEMMA_4_FIELDS,
    GEMMA_4_NAMES,
    GRANITE_HYBRID_FIELDS,
    GRANITE_HYBRID_NAMES,
    LFM_2_EXPERTS,
    LFM_2_NAMES,
    LINEAR,
    LINEAR_NAMES,
    NEMOTRON_FIELDS,
    NEMOTRON_NAMES,
    QWEN_EXPERTS,
    ROUTED,
    ROUTED_NAMES,
)
from hetero_ee.hub.gguf.header import GgufHeader

# (field of config.json, key in the file) of the norms' epsilon.
RMS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
LAYER = "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Translation of one general.architecture to config.json and the tensors of Hugging Face's checkpoints."""

    hf_class: str
    norm_eps: tuple[str, str] = RMS
    fields: Mapping[str, str] = field(default_factory=dict)  # further fields of config.json -> the file's keys
    more: Callable[[GgufHeader, Config], Config] | None = None  # computes fields that no key holds directly
    names: Mapping[str, str] = field(default_factory=dict)  # modules that are named differently from Llama's
    is_interleaved: bool = False  # adjacent rows of queries and keys rotate together, not the halves of a head
    rotates_part: bool = False  # only a part of a head rotates
    has_rope_factors: bool = False
    is_latent: bool = False  # sizes of keys and values are not those of heads
    differs: tuple[str, ...] = ()  # fields whose keys may differ from layer to layer, which `more` reads
    logarithms: tuple[str, ...] = ()  # ends of names of parameters of which files have -e^x


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Return the translation for the file's architecture. Raises ModelError if the architecture is not supported."""
    name = header.architecture
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise header.failure(
            f"architecture {shown(name or 'none named')} is not supported in GGUF files; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


_NEMOTRON_H = GgufArchitecture(
    "NemotronHForCausalLM",
    ("layer_norm_epsilon", LAYER),
    fields=NEMOTRON_FIELDS,
    more=fields_of.nemotron_h,
    names=NEMOTRON_NAMES,
    rotates_part=True,
    differs=("num_key_value_heads", "intermediate_size"),
    logarithms=(".A_log",),
)
_QWEN_3_5_MOE = GgufArchitecture(
    "Qwen3_5MoeForCausalLM",
    fields=LINEAR | QWEN_EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    more=fields_of.qwen_3_5_moe,
    names=LINEAR_NAMES | FUSED,
    rotates_part=True,
    differs=("intermediate_size",),
    logarithms=(".A_log",),
)
# By general.architecture. Mistral's files use llama.
ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", is_interleaved=True, has_rope_factors=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", has_rope_factors=True),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", has_rope_factors=True),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM",
        fields=LINEAR,
        more=fields_of.qwen_3_5,
        names=LINEAR_NAMES,
        rotates_part=True,
        logarithms=(".A_log",),
    ),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM",
        fields=QWEN_EXPERTS,
        more=fields_of.qwen_3_moe,
        names=FUSED,
        has_rope_factors=True,
        differs=("intermediate_size",),
    ),
    "qwen35moe": _QWEN_3_5_MOE,
    "qwen3next": replace(_QWEN_3_5_MOE, hf_class="Qwen3NextForCausalLM", more=fields_of.qwen_3_next),
    "deepseek2": GgufArchitecture(
        "DeepseekV3ForCausalLM", fields=DEEPSEEK_FIELDS, more=fields_of.deepseek, names=ROUTED_NAMES, is_latent=True
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        fields=ROUTED | {"first_k_dense_replace": "leading_dense_block_count"},
        more=fields_of.glm_4_moe,
        names=AFTER_ATTENTION | ROUTED_NAMES,
        rotates_part=True,
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        fields=EXPERTS,
        more=fields_of.gpt_oss,
        names=AFTER_ATTENTION | {"mlp.router": "ffn_gate_inp"},
        differs=("intermediate_size",),
    ),
    "lfm2": GgufArchitecture(
        "Lfm2ForCausalLM",
        ("norm_eps", RMS[1]),
        fields={"conv_L_cache": "shortconv.l_cache"},
        more=fields_of.lfm_2,
        names=LFM_2_NAMES,
        differs=("num_key_value_heads",),
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        ("norm_eps", RMS[1]),
        fields=QWEN_EXPERTS | {"conv_L_cache": "shortconv.l_cache", "num_dense_layers": "leading_dense_block_count"},
        more=fields_of.lfm_2,
        names=LFM_2_NAMES | LFM_2_EXPERTS,
        differs=("num_key_value_heads",),
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "phi3": GgufArchitecture("Phi3ForCausalLM", rotates_part=True, has_rope_factors=True),
    "gemma": GgufArchitecture("GemmaForCausalLM"),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", fields=CAPS, more=fields_of.gemma_2, names=AFTER_ATTENTION),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", fields=CAPS, more=fields_of.gemma_3, names=AFTER_ATTENTION),
    "gemma4": GgufArchitecture(
        "Gemma4ForCausalLM",
        fields=GEMMA_4_FIELDS,
        more=fields_of.gemma_4,
        names=AFTER_ATTENTION | GEMMA_4_NAMES,
        has_rope_factors=True,
        differs=("num_key_value_heads", "intermediate_size"),
    ),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", more=fields_of.mistral_3, is_interleaved=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", more=fields_of.olmo, names=AFTER_ATTENTION),
    "granite": GgufArchitecture(
        "GraniteForCausalLM", more=fields_of.granite, is_interleaved=True, has_rope_factors=True
    ),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        fields=GRANITE_HYBRID_FIELDS,
        more=fields_of.granite_hybrid,
        names=GRANITE_HYBRID_NAMES,
        is_interleaved=True,
        differs=("num_key_value_heads",),
        logarithms=(".A_log",),
    ),
    "starcoder2": GgufArchitecture("Starcoder2ForCausalLM", ("norm_epsilon", LAYER), more=fields_of.use_bias),
    "stablelm": GgufArchitecture(
        "StableLmForCausalLM", ("layer_norm_eps", LAYER), more=fields_of.stablelm, rotates_part=True
    ),
    "glm4": GgufArchitecture("Glm4ForCausalLM", more=fields_of.glm_4, rotates_part=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", is_interleaved=True),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", more=fields_of.seed_oss, names=AFTER_ATTENTION),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", more=fields_of.use_bias),
}
