"""The supported families of dense decoders: a new one is a file here and an entry in FAMILIES."""

from hetero_ee.models.families import llama, mistral, opt, phi3, qwen
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
    "OPTForCausalLM": Family("opt", opt.read_spec, opt.TENSOR_NAMES),
}
