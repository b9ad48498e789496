"""The supported families of decoders. To add one, add an entry to FAMILIES, and only what differs from Llama."""

from hetero_ee.models.families import (
    deepseek,
    experts,
    gemma4,
    gpt_oss,
    granite_hybrid,
    lfm2,
    llama,
    nemotron_h,
    opt,
    qwen3_5,
    variants,
)
from hetero_ee.models.families.family import Family
from hetero_ee.models.families.llama import GATE_UP, NORMED_HEADS, QKV, TENSOR_NAMES, TWO_MATRICES, post_norms

AFTER = post_norms("post_attention_layernorm", "post_feedforward_layernorm")
OLMO = NORMED_HEADS | AFTER
GEMMA_NORMS = AFTER | {"layers.{n}.ffn.norm": ("model.layers.{n}.pre_feedforward_layernorm",)}
GEMMA_3 = NORMED_HEADS | GEMMA_NORMS
QWEN_3_5_MOE = qwen3_5.TENSOR_NAMES | experts.TENSOR_NAMES
QWEN_3_NEXT = QWEN_3_5_MOE | qwen3_5.NEXT_NAMES
READ_QWEN_3_5_MOE = experts.reader(qwen3_5.read_spec, renormalizes=True, shared=512)
GLM, GLM_4_NORMS = TENSOR_NAMES | GATE_UP, post_norms("post_self_attn_layernorm", "post_mlp_layernorm")

# By Hugging Face's class name, as config.json's `architectures` has it.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", llama.read_spec, TENSOR_NAMES),
    # ProSparse (arXiv 2402.13516): Llama whose gate is ReLU with a threshold of its own (FATReLU).
    "SparseLlamaForCausalLM": Family("sparsellama", llama.read_spec, TENSOR_NAMES),
    "MistralForCausalLM": Family("mistral", variants.MISTRAL, TENSOR_NAMES),
    "Qwen2ForCausalLM": Family("qwen2", variants.QWEN_2, TENSOR_NAMES),
    "Qwen3ForCausalLM": Family("qwen3", variants.QWEN_3, NORMED_HEADS),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", qwen3_5.read_spec, qwen3_5.TENSOR_NAMES),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", experts.QWEN_3, NORMED_HEADS | experts.TENSOR_NAMES),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", READ_QWEN_3_5_MOE, QWEN_3_5_MOE),
    "Qwen3NextForCausalLM": Family("qwen3_next", experts.reader(qwen3_5.read_spec, shared=512), QWEN_3_NEXT),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", experts.QWEN_2, TENSOR_NAMES | experts.TENSOR_NAMES),
    "MixtralForCausalLM": Family("mixtral", experts.MIXTRAL, TENSOR_NAMES | experts.MIXTRAL_NAMES),
    "OlmoeForCausalLM": Family("olmoe", experts.OLMOE, NORMED_HEADS | experts.TENSOR_NAMES),
    "GraniteMoeForCausalLM": Family("granitemoe", experts.GRANITE, TENSOR_NAMES | experts.GRANITE_NAMES),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", granite_hybrid.read_spec, granite_hybrid.TENSOR_NAMES),
    "Phi3ForCausalLM": Family("phi3", variants.PHI_3, TENSOR_NAMES | QKV | GATE_UP),
    "GemmaForCausalLM": Family("gemma", variants.GEMMA, TENSOR_NAMES),
    "Gemma2ForCausalLM": Family("gemma2", variants.GEMMA_2, TENSOR_NAMES | GEMMA_NORMS),
    "Gemma3ForCausalLM": Family("gemma3_text", variants.read_gemma_3, GEMMA_3),
    "Gemma4ForCausalLM": Family("gemma4_text", gemma4.read_spec, gemma4.TENSOR_NAMES),
    "Gemma4UnifiedForCausalLM": Family("gemma4_unified_text", gemma4.read_spec, gemma4.TENSOR_NAMES),
    "Ministral3ForCausalLM": Family("ministral3", variants.MINISTRAL_3, TENSOR_NAMES),
    "Olmo2ForCausalLM": Family("olmo2", variants.OLMO_2, OLMO),
    "Olmo3ForCausalLM": Family("olmo3", variants.read_olmo_3, OLMO),
    "SmolLM3ForCausalLM": Family("smollm3", variants.SMOLLM_3, TENSOR_NAMES),
    "GraniteForCausalLM": Family("granite", variants.GRANITE, TENSOR_NAMES),
    "Starcoder2ForCausalLM": Family("starcoder2", variants.STARCODER_2, TENSOR_NAMES | TWO_MATRICES),
    "StableLmForCausalLM": Family("stablelm", variants.STABLELM, TENSOR_NAMES),
    "GlmForCausalLM": Family("glm", variants.GLM, GLM),
    "Glm4ForCausalLM": Family("glm4", variants.GLM_4, GLM | GLM_4_NORMS),
    "Glm4MoeForCausalLM": Family("glm4_moe", deepseek.GLM_4_5, NORMED_HEADS | deepseek.MOE_NAMES),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", deepseek.GLM_4_7_FLASH, deepseek.TENSOR_NAMES),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", deepseek.V2, deepseek.TENSOR_NAMES),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", deepseek.V3, deepseek.TENSOR_NAMES),
    "SeedOssForCausalLM": Family("seed_oss", variants.SEED_OSS, TENSOR_NAMES),
    "HeliumForCausalLM": Family("helium", variants.HELIUM, TENSOR_NAMES),
    "Ernie4_5ForCausalLM": Family("ernie4_5", variants.ERNIE, TENSOR_NAMES),
    "Exaone4ForCausalLM": Family("exaone4", variants.EXAONE_4, OLMO),
    "Gemma3ForConditionalGeneration": Family("gemma3", variants.read_gemma_3, GEMMA_3, ("gemma3_text",)),
    "Gemma4ForConditionalGeneration": Family("gemma4", gemma4.read_spec, gemma4.TENSOR_NAMES, ("gemma4_text",)),
    "Gemma4UnifiedForConditionalGeneration": Family(
        "gemma4_unified", gemma4.read_spec, gemma4.TENSOR_NAMES, ("gemma4_unified_text",)
    ),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3", variants.read_mistral_3, TENSOR_NAMES, ("mistral", "ministral3")
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl", variants.read_qwen_2_5_vl, TENSOR_NAMES, ("qwen2_5_vl_text",)
    ),
    "Qwen3_5ForConditionalGeneration": Family("qwen3_5", qwen3_5.read_spec, qwen3_5.TENSOR_NAMES, ("qwen3_5_text",)),
    "Qwen3_5MoeForConditionalGeneration": Family("qwen3_5_moe", READ_QWEN_3_5_MOE, QWEN_3_5_MOE, ("qwen3_5_moe_text",)),
    "GptOssForCausalLM": Family("gpt_oss", gpt_oss.read_spec, gpt_oss.TENSOR_NAMES, pairs_experts=True),
    "Lfm2ForCausalLM": Family("lfm2", lfm2.read_spec, lfm2.TENSOR_NAMES),
    "Lfm2MoeForCausalLM": Family("lfm2_moe", lfm2.read_moe_spec, lfm2.MOE_NAMES),
    "NemotronHForCausalLM": Family(
        "nemotron_h", nemotron_h.read_spec, nemotron_h.TENSOR_NAMES, decoder_prefix="backbone."
    ),
    "OPTForCausalLM": Family("opt", opt.read_spec, opt.TENSOR_NAMES),
}
