"""A random mixture of experts in llama.cpp's format."""

from pathlib import Path
from typing import Any

import numpy as np

from hetero_ee.layers.moe import MoeSpec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.model_weights import ModelWeights

EMBEDDING, TOKENS = "token_embd.weight", "tokenizer.ggml.tokens"


def write_gguf(
    spec: ModelSpec,
    file: Path,
    *,
    weights: ModelWeights | None = None,
    tokenizer_of: Path | None = None,
    is_mxfp4: bool = False,
) -> None:
    """Write a file of architecture qwen3moe with random Q4_0 blocks.

    A code of 0, which stands for -8, is replaced by 8, for 0: weights have no mean then, with which all tokens would
    choose the same experts in deeper layers. For the same reason embeddings are larger than what layers add to them.

    Args:
        weights: of them the embedding and the routers are written; None draws these, too.
        tokenizer_of: a GGUF file whose tokenizer this one gets.
        is_mxfp4: makes the experts' blocks MXFP4.
    """
    import gguf

    moe = spec.layer(0).ffn
    assert isinstance(moe, MoeSpec)
    n_experts, draw, writer = moe.router.n_experts, np.random.default_rng(0), gguf.GGUFWriter(file, "qwen3moe")
    fields = _tokenizer_fields(tokenizer_of)
    n_tokens = (
        spec.vocab_size if tokenizer_of is None else next(len(each.data) for each in fields if each.name == TOKENS)
    )
    hidden_size, size, types = moe.hidden_size, moe.size, gguf.GGMLQuantizationType
    of_experts = types.MXFP4 if is_mxfp4 else types.Q4_0
    sizes = {
        "block_count": spec.n_layers,
        "context_length": spec.max_context_tokens,
        "embedding_length": hidden_size,
        "feed_forward_length": size,
        "expert_feed_forward_length": size,
        "expert_count": n_experts,
        "expert_used_count": moe.router.n_active,
        "attention.head_count": spec.n_heads,
        "attention.head_count_kv": spec.n_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "vocab_size": n_tokens,
    }
    for name, value in sizes.items():
        writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    if tokenizer_of is None:
        writer.add_tokenizer_model("no_vocab")
    for field in fields:
        writer.add_key_value(field.name, field.contents(), *field.types[:2])

    def matrix(name: str, *shape: int, kind: Any = types.Q4_0) -> None:
        """Write random codes, each block's after its scale: fp16, or the exponent of 2^(e - 127) for MXFP4."""
        is_float = kind == types.Q4_0
        blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18 if is_float else 17), np.uint8)
        for half in (15, 240) if is_float else ():
            np.add(blocks, half & 136, out=blocks, where=blocks & half == 0)
        scale = (
            np.float16(1.0 if name == EMBEDDING else 0.2 * shape[-1] ** -0.5).tobytes() if is_float else bytes([119])
        )
        blocks[..., : len(scale)] = np.frombuffer(scale, np.uint8)
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def vector(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.ones(shape, np.float32))

    if weights is None:
        matrix(EMBEDDING, n_tokens, hidden_size)
    else:
        writer.add_tensor(EMBEDDING, weights.matrices["embedding.tokens"].dequantize()[:n_tokens].numpy())
    matrix("output.weight", n_tokens, hidden_size)
    vector("output_norm.weight", hidden_size)
    for number in range(spec.n_layers):
        layer = f"blk.{number}."
        for name in ("attn_norm", "ffn_norm"):
            vector(f"{layer}{name}.weight", hidden_size)
        for name in ("attn_q_norm", "attn_k_norm"):
            vector(f"{layer}{name}.weight", spec.head_dim)
        for name in "qkv":
            matrix(f"{layer}attn_{name}.weight", spec.query_size, hidden_size)
        matrix(layer + "attn_output.weight", hidden_size, spec.query_size)
        router = draw.standard_normal((n_experts, hidden_size), np.float32) * np.float32(hidden_size**-0.5)
        if weights is not None:
            router = weights.vectors[f"layers.{number}.moe.router"].numpy()
        writer.add_tensor(layer + "ffn_gate_inp.weight", router)
        shapes = {"gate": (size, hidden_size), "up": (size, hidden_size), "down": (hidden_size, size)}
        for name, shape in shapes.items():
            matrix(f"{layer}ffn_{name}_exps.weight", n_experts, *shape, kind=of_experts)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def _tokenizer_fields(file: Path | None) -> list[Any]:
    import gguf

    fields = [] if file is None else gguf.GGUFReader(file).fields.values()
    return [each for each in fields if each.name.startswith("tokenizer.")]
