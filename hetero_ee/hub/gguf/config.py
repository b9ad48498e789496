"""Translate a GGUF file's metadata to the fields of Hugging Face's config.json."""

import struct
from collections.abc import Iterator
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.hub.gguf.architecture_fields import DEFAULT_THETA, THETA, WINDOW, head_share, predicting_layers
from hetero_ee.hub.gguf.architectures import architecture_of
from hetero_ee.hub.gguf.header import GgufHeader, tensor_bytes

# Hugging Face's field -> the key that follows the architecture's name.
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
_NEEDED = (*list(_KEYS)[:4], "max_position_embeddings")
FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
MAX_FACTORS = 2**16  # per tensor; published ones have up to 64
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Tokens that end a turn; llama.cpp stops at them, too, whatever the file names as its end.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<end_of_turn>")
# Of gpt-oss, which writes <|end|> between its thoughts and its answer.
HARMONY_ENDS = ("<|return|>", "<|call|>")


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """Translate the header to the fields of config.json. Most values are checked only when the config is read.

    Raises: ModelError: if config.json can't express the model, or the engine does not support it.
    """
    return _Reader(header).config()


def hf_generation_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of generation_config.json: the tokens that begin and end a sequence."""
    prefix, tokens = "tokenizer.ggml", header.metadata.get("tokenizer.ggml.tokens")
    ends = [header.metadata.get(f"{prefix}.{name}_token_id") for name in ("eos", "eot", "eom")]
    if isinstance(tokens, list):
        texts: list[Any] = tokens
        is_harmony = all(text in texts for text in HARMONY_ENDS)
        ends += [texts.index(text) for text in (HARMONY_ENDS if is_harmony else TURN_ENDS) if text in texts]
        ends = [end for end in ends if not is_harmony or type(end) is not int or texts[end : end + 1] != ["<|end|>"]]
    ids = sorted({end for end in ends if type(end) is int})
    begin = header.metadata.get(f"{prefix}.bos_token_id")
    return {"eos_token_id": ids} | ({"bos_token_id": begin} if type(begin) is int else {})


class _Reader:
    def __init__(self, header: GgufHeader) -> None:
        self._header, self._architecture = header, architecture_of(header)

    def config(self) -> dict[str, Any]:
        header, architecture, tensors = self._header, self._architecture, self._header.tensors
        if EMBEDDING not in tensors:
            raise header.failure(f"tensor {EMBEDDING} is missing, so this file does not hold a whole model")
        if (n_experts := header.get("expert_count")) and "num_experts" not in architecture.fields:
            raise header.failure(f"it is a mixture of {shown(n_experts)} experts, which are not supported")
        config = {
            field: (header.needed if field in _NEEDED else header.even)(key)
            for field, key in _KEYS.items()
            if field not in architecture.differs
        } | dict.fromkeys(architecture.differs)
        config |= {field: header.even(key) for field, key in architecture.fields.items()}
        eps_field, eps_key = architecture.norm_eps
        config[eps_field] = header.needed(eps_key)
        if config["head_dim"] is None:
            config["head_dim"] = head_share(config)
        if config["num_key_value_heads"] is None:
            config["num_key_value_heads"] = config["num_attention_heads"]
        if type(config["num_hidden_layers"]) is int:
            config["num_hidden_layers"] -= predicting_layers(header)
        value_size = header.get("attention.value_length")
        if value_size not in (None, config["head_dim"]) and not architecture.is_latent:
            raise header.failure(f"value heads have {shown(value_size)} features, unlike queries and keys")
        config |= {
            "architectures": [architecture.hf_class],
            "vocab_size": tensors[EMBEDDING].shape[0],
            "tie_word_embeddings": HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "sliding_window": header.get(WINDOW) or None,
        }
        config |= self._rope(config)
        config |= architecture.more(header, config) if architecture.more else {}
        return {name: value for name, value in config.items() if value is not None}

    def _rope(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the rotary scaling, with the share of a head that rotates, as the field rope_scaling."""
        header, head_dim = self._header, config["head_dim"]
        theta = header.get(THETA)
        n_features = header.get("rope.dimension_count")
        rope: dict[str, Any] = {"rope_theta": DEFAULT_THETA if theta is None else theta, "rope_type": "default"}
        if n_features not in (None, head_dim):
            rotates_part = self._architecture.rotates_part
            if not rotates_part or type(n_features) is not int or type(head_dim) is not int or head_dim < 1:
                raise header.failure(f"{shown(n_features)} of a head's {shown(head_dim)} features rotate, expected all")
            rope["partial_rotary_factor"] = n_features / head_dim
        kind = header.get("rope.scaling.type")
        factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear")
        context_tokens = config["max_position_embeddings"]
        original = header.get("rope.scaling.original_context_length") or context_tokens
        found = set(ROPE_TENSORS) & set(self._header.tensors)
        if found and not self._architecture.has_rope_factors:
            raise header.failure(f"it has rotary factors in {min(found)}, which its architecture does not support")
        if FACTORS in found or {LONG_FACTORS, SHORT_FACTORS} <= found:
            is_one = FACTORS in found
            short, long = ([*self._factors(FACTORS if is_one else name)] for name in (SHORT_FACTORS, LONG_FACTORS))
            magnitude = header.get("rope.scaling.attn_factor")
            rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            rope |= {"attention_factor": 1.0 if magnitude is None else magnitude}
            rope |= {"original_max_position_embeddings": context_tokens if is_one else original}
        elif kind == "yarn":
            rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
            rope |= {name: header.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        elif kind == "linear" or (kind is None and factor not in (None, 0, 1)):
            rope |= {"rope_type": "linear", "factor": factor}
        elif kind not in (None, "none"):
            raise header.failure(f"rope.scaling.type is {shown(kind)}, which needs factors that the file lacks")
        used = {name: value for name, value in rope.items() if value is not None}
        original = {"original_max_position_embeddings": used.get("original_max_position_embeddings")}
        return {"rope_scaling": used} | original

    def _factors(self, name: str) -> Iterator[float]:
        tensor = self._header.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
            raise self._header.failure(
                f"tensor {name} is {tensor.type.name} {list(tensor.shape)}, expected a few F32 factors"
            )
        return (value for (value,) in struct.iter_unpack("<f", tensor_bytes(tensor)))
