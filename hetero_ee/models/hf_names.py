"""Where a Hugging Face checkpoint keeps each tensor: our name -> the file's tensors, stacked row after row."""

from dataclasses import dataclass, replace

from hetero_ee.models.blocks import TensorSpec, all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint, whole, and the shape it must have."""

    hf_name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of one family's modules; `{n}` stands for the layer. Several names are stacked, row after row."""

    embedding: str
    head: str
    final_norm: str
    attention_norm: str
    qkv: tuple[str, ...]
    output: str
    ffn_norm: str
    ffn_input: tuple[str, ...]
    down: str
    positions: str = ""


_LLAMA_LAYER = "model.layers.{n}."
_LLAMA = _Names(
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    attention_norm=_LLAMA_LAYER + "input_layernorm",
    qkv=tuple(_LLAMA_LAYER + f"self_attn.{part}_proj" for part in "qkv"),
    output=_LLAMA_LAYER + "self_attn.o_proj",
    ffn_norm=_LLAMA_LAYER + "post_attention_layernorm",
    ffn_input=(_LLAMA_LAYER + "mlp.gate_proj", _LLAMA_LAYER + "mlp.up_proj"),
    down=_LLAMA_LAYER + "mlp.down_proj",
)
_OPT_LAYER = "model.decoder.layers.{n}."
_FAMILIES = {
    "llama": _LLAMA,
    "phi3": replace(_LLAMA, qkv=(_LLAMA_LAYER + "self_attn.qkv_proj",), ffn_input=(_LLAMA_LAYER + "mlp.gate_up_proj",)),
    "opt": _Names(
        embedding="model.decoder.embed_tokens",
        head="lm_head",
        final_norm="model.decoder.final_layer_norm",
        attention_norm=_OPT_LAYER + "self_attn_layer_norm",
        qkv=tuple(_OPT_LAYER + f"self_attn.{part}_proj" for part in "qkv"),
        output=_OPT_LAYER + "self_attn.out_proj",
        ffn_norm=_OPT_LAYER + "final_layer_norm",
        ffn_input=(_OPT_LAYER + "fc1",),
        down=_OPT_LAYER + "fc2",
        positions="model.decoder.embed_positions",
    ),
}
# Buffers that old checkpoints carry and the model never needed: computed from the configuration instead.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def checkpoint_parts(spec: ModelSpec) -> dict[str, list[Part]]:
    """For every tensor of the model, the checkpoint's tensors it is stacked from. Source: transformers' modules."""
    names = _FAMILIES[spec.family]
    return {tensor.name: _parts(spec, names, tensor) for tensor in all_tensors(decoder_blocks(spec))}


def redundant_names(spec: ModelSpec) -> set[str]:
    """Tensors a checkpoint may hold beyond the needed ones: a tied head saved twice."""
    return {_FAMILIES[spec.family].head + ".weight"} if spec.tied_head else set()


def _parts(spec: ModelSpec, names: _Names, tensor: TensorSpec) -> list[Part]:
    """Finds the family's module names of one tensor and splits its rows among them."""
    suffix = ".bias" if tensor.name.endswith("_bias") else ".weight"
    plain = tensor.name.removesuffix("_bias")
    modules = _outer_modules(names).get(plain)
    if modules is None:
        _, layer, room, short = plain.split(".")
        modules = tuple(module.format(n=layer) for module in _layer_modules(names)[f"{room}.{short}"])
    sizes = _row_counts(spec, plain, len(modules), tensor.shape[0])
    return [Part(module + suffix, (rows, *tensor.shape[1:])) for module, rows in zip(modules, sizes, strict=True)]


def _outer_modules(names: _Names) -> dict[str, tuple[str, ...]]:
    return {
        "embedding.tokens": (names.embedding,),
        "embedding.positions": (names.positions,),
        "final_norm.norm": (names.final_norm,),
        "head.tokens": (names.head,),
    }


def _layer_modules(names: _Names) -> dict[str, tuple[str, ...]]:
    return {
        "attention.norm": (names.attention_norm,),
        "attention.qkv": names.qkv,
        "attention.query_norm": (_LLAMA_LAYER + "self_attn.q_norm",),
        "attention.key_norm": (_LLAMA_LAYER + "self_attn.k_norm",),
        "attention.output": (names.output,),
        "ffn.norm": (names.ffn_norm,),
        "ffn.gate_up": names.ffn_input,
        "ffn.up": names.ffn_input,
        "ffn.down": (names.down,),
    }


def _row_counts(spec: ModelSpec, name: str, n_modules: int, n_rows: int) -> list[int]:
    if n_modules == 3:
        return [spec.query_size, spec.kv_size, spec.kv_size]
    return [n_rows // n_modules] * n_modules
