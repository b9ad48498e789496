"""The supported families of dense decoders: to add one, add a file here and an entry to FAMILIES."""

from hetero_ee.models.families import (
    ernie,
    exaone,
    gemma,
    glm,
    granite,
    helium,
    llama,
    mistral,
    olmo,
    opt,
    phi3,
    qwen,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from hetero_ee.models.families.family import Family

# By Hugging Face's class name, as config.json's `architectures` has it.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", llama.read_spec, llama.TENSOR_NAMES),
    # ProSparse (arXiv 2402.13516): Llama whose gate is ReLU with a threshold of its own (FATReLU).
    "SparseLlamaForCausalLM": Family("sparsellama", llama.read_spec, llama.TENSOR_NAMES),
    "MistralForCausalLM": Family("mistral", mistral.read_spec, llama.TENSOR_NAMES),
    "Qwen2ForCausalLM": Family("qwen2", qwen.read_spec_2, llama.TENSOR_NAMES),
    "Qwen3ForCausalLM": Family("qwen3", qwen.read_spec_3, qwen.TENSOR_NAMES_3),
    "Phi3ForCausalLM": Family("phi3", phi3.read_spec, phi3.TENSOR_NAMES),
    "GemmaForCausalLM": Family("gemma", gemma.read_spec, llama.TENSOR_NAMES),
    "Gemma2ForCausalLM": Family("gemma2", gemma.read_spec_2, gemma.TENSOR_NAMES_2),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.read_spec_3, gemma.TENSOR_NAMES_3),
    "Olmo2ForCausalLM": Family("olmo2", olmo.read_spec_2, olmo.TENSOR_NAMES),
    "Olmo3ForCausalLM": Family("olmo3", olmo.read_spec_3, olmo.TENSOR_NAMES),
    "SmolLM3ForCausalLM": Family("smollm3", smollm3.read_spec, llama.TENSOR_NAMES),
    "GraniteForCausalLM": Family("granite", granite.read_spec, llama.TENSOR_NAMES),
    "Starcoder2ForCausalLM": Family("starcoder2", starcoder2.read_spec, starcoder2.TENSOR_NAMES),
    "StableLmForCausalLM": Family("stablelm", stablelm.read_spec, llama.TENSOR_NAMES),
    "GlmForCausalLM": Family("glm", glm.read_spec, glm.TENSOR_NAMES),
    "Glm4ForCausalLM": Family("glm4", glm.read_spec_4, glm.TENSOR_NAMES_4),
    "SeedOssForCausalLM": Family("seed_oss", seed_oss.read_spec, llama.TENSOR_NAMES),
    "HeliumForCausalLM": Family("helium", helium.read_spec, llama.TENSOR_NAMES),
    "Ernie4_5ForCausalLM": Family("ernie4_5", ernie.read_spec, llama.TENSOR_NAMES),
    "Exaone4ForCausalLM": Family("exaone4", exaone.read_spec, olmo.TENSOR_NAMES),
    "Gemma3ForConditionalGeneration": Family("gemma3", gemma.read_spec_3, gemma.TENSOR_NAMES_3, "gemma3_text"),
    "Mistral3ForConditionalGeneration": Family("mistral3", mistral.read_spec, llama.TENSOR_NAMES, "mistral"),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl", qwen.read_spec_2_5_vl, llama.TENSOR_NAMES, "qwen2_5_vl_text"
    ),
    "OPTForCausalLM": Family("opt", opt.read_spec, opt.TENSOR_NAMES),
}
