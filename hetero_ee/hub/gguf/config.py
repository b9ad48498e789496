"""What a GGUF file says of its model, in the fields of Hugging Face's config.json."""

import struct
from collections.abc import Iterator
from typing import Any

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.hub.gguf.header import GgufHeader, GgufTensor
from hetero_ee.hub.regular_file import reason_of
from hetero_ee_profiles.opened_file import open_regular

# general.architecture -> Hugging Face's class. Mistral's files say llama.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
# Hugging Face's name of a field -> the key behind the architecture's name.
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_NEEDED = (*list(_KEYS)[:4], "max_position_embeddings", "rms_norm_eps")
FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
MAX_FACTORS = 2**16  # in one of these tensors; published ones have up to 64
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Tokens that end a turn, by which llama.cpp stops too, whatever the file names as its end.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<end_of_turn>")


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """config.json. Raises ModelError for what has no place there; values are checked when the config is read."""
    return _Reader(header).config()


def hf_generation_config(header: GgufHeader) -> dict[str, Any]:
    """generation_config.json: the tokens that begin and end a text."""
    prefix, tokens = "tokenizer.ggml", header.metadata.get("tokenizer.ggml.tokens")
    ends = {header.metadata.get(f"{prefix}.{name}_token_id") for name in ("eos", "eot", "eom")}
    if isinstance(tokens, list):
        ends |= {tokens.index(text) for text in TURN_ENDS if text in tokens}  # type: ignore[arg-type]
    ids = sorted(end for end in ends if type(end) is int)
    begin = header.metadata.get(f"{prefix}.bos_token_id")
    return {"eos_token_id": ids} | ({"bos_token_id": begin} if type(begin) is int else {})


class _Reader:
    def __init__(self, header: GgufHeader) -> None:
        self._header, self._name = header, header.metadata.get("general.architecture")
        if not isinstance(self._name, str) or self._name not in ARCHITECTURES:
            raise self._failure(
                f"architecture {shown(self._name or 'none named')} is not supported in GGUF files; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )

    def config(self) -> dict[str, Any]:
        embedding = self._header.tensors.get(EMBEDDING)
        if embedding is None:
            raise self._failure(f"tensor {EMBEDDING} is missing; this file holds no whole model")
        if n_experts := self._get("expert_count"):
            raise self._failure(f"it is a mixture of {shown(n_experts)} experts, which are not supported")
        config = {field: self._even(key) for field, key in _KEYS.items()}
        for field in _NEEDED:
            if config[field] is None:
                raise self._failure(f"{self._name}.{_KEYS[field]} is missing")
        value_size = self._get("attention.value_length")
        if value_size not in (None, self._head_dim(config)):
            raise self._failure(f"heads have values of {shown(value_size)} features, unlike their queries and keys")
        config |= {
            "architectures": [ARCHITECTURES[str(self._name)]],
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": HEAD not in self._header.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._header.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._header.tensors,
            "sliding_window": self._get("attention.sliding_window") or None,
        }
        return {name: value for name, value in (config | self._rope(config)).items() if value is not None}

    def _rope(self, config: dict[str, Any]) -> dict[str, Any]:
        """rope_scaling, of whichever kind, with what it needs; and which share of a head turns."""
        theta, head_dim = self._get("rope.freq_base"), self._head_dim(config)
        n_features = self._get("rope.dimension_count")
        rope: dict[str, Any] = {"rope_theta": 10000.0 if theta is None else theta, "rope_type": "default"}
        if n_features not in (None, head_dim):
            if self._name != "phi3" or type(n_features) is not int or type(head_dim) is not int or head_dim < 1:
                raise self._failure(f"of heads of {shown(head_dim)} features {shown(n_features)} turn, expected all")
            rope["partial_rotary_factor"] = n_features / head_dim
        kind = self._get("rope.scaling.type")
        factor = self._get("rope.scaling.factor") or self._get("rope.scale_linear")
        context_tokens = config["max_position_embeddings"]
        original = self._get("rope.scaling.original_context_length") or context_tokens
        found = set(ROPE_TENSORS) & set(self._header.tensors)
        if FACTORS in found or {LONG_FACTORS, SHORT_FACTORS} <= found:
            is_one = FACTORS in found
            short, long = ([*self._factors(FACTORS if is_one else name)] for name in (SHORT_FACTORS, LONG_FACTORS))
            magnitude = self._get("rope.scaling.attn_factor")
            rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            rope |= {"attention_factor": 1.0 if magnitude is None else magnitude}
            rope |= {"original_max_position_embeddings": context_tokens if is_one else original}
        elif kind == "yarn":
            rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
            rope |= {name: self._get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        elif kind == "linear" or (kind is None and factor not in (None, 0, 1)):
            rope |= {"rope_type": "linear", "factor": factor}
        elif kind not in (None, "none"):
            raise self._failure(f"rope.scaling.type is {shown(kind)}, which is not supported without its factors")
        used = {name: value for name, value in rope.items() if value is not None}
        original = {"original_max_position_embeddings": used.get("original_max_position_embeddings")}
        return {"rope_scaling": used} | original

    def _factors(self, name: str) -> Iterator[float]:
        tensor = self._header.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
            raise self._failure(f"tensor {name} is {tensor.type.name} {list(tensor.shape)}, expected a few F32 factors")
        return (value for (value,) in struct.iter_unpack("<f", self._bytes(tensor)))

    def _bytes(self, tensor: GgufTensor) -> bytes:
        try:
            with open_regular(tensor.file) as opened:
                opened.seek(tensor.start)
                return opened.read(tensor.n_bytes).ljust(tensor.n_bytes, b"\0")
        except OSError as error:
            raise CheckpointError(f"{tensor.file} can't be read ({reason_of(error)}).") from error

    def _head_dim(self, config: dict[str, Any]) -> Any:
        hidden_size, n_heads = config["hidden_size"], config["num_attention_heads"]
        if config["head_dim"] is not None or type(n_heads) is not int or type(hidden_size) is not int or n_heads < 1:
            return config["head_dim"]
        return hidden_size // n_heads

    def _even(self, key: str) -> Any:
        """The value; of a list of one for each layer that which all have."""
        value = self._get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self._failure(f"{self._name}.{key} differs from layer to layer, which is not supported")
            return value[0]
        return value

    def _get(self, key: str) -> Any:
        return self._header.metadata.get(f"{self._name}.{key}")

    def _failure(self, what: str) -> ModelError:
        return ModelError(f"{self._header.file}: {what}.")
