"""EAGLE-3 heads (arXiv 2503.01840): their config.json and the tensors of their files, in the publishers' dialects.

The head reads the model's states before a few layers, concatenated: g = fc [low; middle; high]. One layer follows. Its
attention reads [norm(embedding); norm(g)], and its output is added to g, or to norm(g). The result replaces g for the
next draft. Its norm, multiplied by the lm_head of a draft vocabulary, gives the logits. EAGLE-3.1 norms the inputs of
fc and starts the next draft with the normed state.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.models.draft_head import NORM_ALL, NORM_EACH, Dialect
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DRAFT_VOCABULARY = "draft_vocab_size"
LAYER_CONFIG = "transformer_layer_config"  # where speculators keep what is the layer's
MAX_CAPTURED = 8
OUTPUT_IDS = ("LlamaForCausalLMEagle3",)  # SpecForge, SGLang: states are counted by the layer that they come out of
INPUT_IDS = ("Eagle3LlamaForCausalLM",)  # AngelSlim, vLLM: by the layer that they go into
NESTED = ("Eagle3Speculator", "Eagle3DraftModel")  # speculators, as INPUT_IDS
PLAIN = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
HEAD_ROWS = "head.rows"  # the matrix of a head's own logits
LAYER = "layers.0."
D2T, LM_HEAD = "d2t", "lm_head.weight"
PREFIXES = {"midlayer.": LAYER}  # prefixes of names, and other publishers' names for them
MODEL_PREFIX = "model."
IGNORED = ("t2d",)  # tensors that only repeat d2t
HIDDEN_NORM = f"{LAYER}hidden_norm.weight"  # a tensor that EAGLE-1 heads lack
NORMS = {"embedding": f"{LAYER}input_layernorm.weight", "hidden": HIDDEN_NORM, "head": "norm.weight"}


def default_layers(n_layers: int) -> tuple[int, ...]:
    """Return the captured layers of heads whose config.json names none."""
    return tuple(sorted({min(2, n_layers - 1), n_layers // 2, max(0, n_layers - 3)}))


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether this config.json is an EAGLE-3 head's. Only the draft vocabulary identifies SafeAILab's heads."""
    return _architecture(config) in (*OUTPUT_IDS, *INPUT_IDS, *NESTED) or DRAFT_VOCABULARY in config


def layer_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the head's layer as the configuration of a Llama model with one layer.

    Raises: ModelError: if a field is invalid.
    """
    if _architecture(config) not in NESTED:
        return dict(config) | PLAIN
    inner = config.get(LAYER_CONFIG)
    if not isinstance(inner, Mapping):
        raise ModelError(f"{where}: {LAYER_CONFIG} is {shown(inner)}, expected the fields of the head's layer.")
    return dict(inner) | PLAIN


def eagle3_of(config: Mapping[str, Any], n_layers: int, where: str) -> Dialect:
    """Return the properties of a head for a model with n_layers. Raises: ModelError: if config.json is invalid."""
    fields = Fields(config, where)
    inner = fields.section("eagle_config")
    ids = fields.get(LAYER_IDS, inner.get(LAYER_IDS))
    if ids is None:
        captured = default_layers(n_layers)
    else:
        captured = _captured(ids, _architecture(config) in OUTPUT_IDS, n_layers, where)
    norm_all = fields.flag("norm_before_fc", inner.flag("norm_before_fc", False))
    norm_each = fields.flag("fc_norm", False)
    if norm_all and norm_each:
        raise ModelError(f"{where}: norm_before_fc and fc_norm are both true, and a head has one of them.")
    fc_norm = NORM_ALL if norm_all else NORM_EACH if norm_each else None
    norm_output, norm_before = fields.flag("norm_output", False), fields.flag("norm_before_residual", False)
    return Dialect(captured, True, norm_output, norm_before, fc_norm)


def draft_vocabulary_size(config: Mapping[str, Any], vocab_size: int, where: str) -> int:
    """Return the number of tokens that the head can draft. Raises: ModelError: if config.json is invalid."""
    return Fields(config, where).integer(DRAFT_VOCABULARY, vocab_size, largest=vocab_size)


def _captured(ids: Any, are_outputs: bool, n_layers: int, where: str) -> tuple[int, ...]:
    are_numbers = isinstance(ids, list) and all(type(number) is int for number in ids)
    layers = [number + are_outputs for number in ids] if are_numbers else []
    ascend = layers == sorted(set(layers)) and 0 < len(layers) <= MAX_CAPTURED
    if not ascend or not 0 <= layers[0] <= layers[-1] < n_layers:
        raise ModelError(
            f"{where}: {LAYER_IDS} is {shown(ids)}, expected an ascending list of up to {MAX_CAPTURED} layers of the "
            f"model's {n_layers}."
        )
    return tuple(layers)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def plain_name(name: str) -> str:
    """Return a tensor's name without the parts that differ between publishers."""
    name = name.removeprefix(MODEL_PREFIX)
    return next((known + name.removeprefix(each) for each, known in PREFIXES.items() if name.startswith(each)), name)


def eagle3_shapes(
    spec: ModelSpec, dialect: Dialect, n_draft_tokens: int, layer: Mapping[str, tuple[int, ...]], *, has_head: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all required tensors by name. `layer` has those of the head's layer as a Llama layer."""
    size, n_seen = spec.hidden_size, len(dialect.captured)
    shapes = dict(layer) | {"fc.weight": (size, n_seen * size)} | dict.fromkeys(NORMS.values(), (size,))
    for part in "qkv":
        name = f"{LAYER}self_attn.{part}_proj.weight"
        shapes[name] = (layer[name][0], 2 * size)
    if dialect.fc_norm == NORM_ALL:
        shapes["input_norm.weight"] = (n_seen * size,)
    if dialect.fc_norm == NORM_EACH:
        shapes |= {f"fc_norm.{number}.weight": (size,) for number in range(n_seen)}
    if n_draft_tokens < spec.vocab_size:
        shapes[D2T] = (n_draft_tokens,)
    if has_head or n_draft_tokens < spec.vocab_size:
        shapes[LM_HEAD] = (n_draft_tokens, size)
    return shapes


def eagle3_vectors(dialect: Dialect, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms by the engine's names. Norms of several states are concatenated like the states."""
    found = {f"{short}_norm": tensors[name] for short, name in NORMS.items()}
    if dialect.fc_norm == NORM_ALL:
        found["fc_norm"] = tensors["input_norm.weight"]
    if dialect.fc_norm == NORM_EACH:
        each = range(len(dialect.captured))
        found |= {f"fc_norm.{number}": tensors[f"fc_norm.{number}.weight"] for number in each}
    return found


def draft_rows(tensors: Mapping[str, Tensor], vocab_size: int, file: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the head's own rows of the lm_head as HEAD_ROWS, and their token ids in ascending order.

    Returns: An empty dictionary and None if the head has no own rows.

    Raises: CheckpointError: if d2t names tokens that the model lacks, or one twice.
    """
    if LM_HEAD not in tensors:
        return {}, None
    rows = tensors[LM_HEAD]
    offsets = tensors.get(D2T, torch.zeros(len(rows), dtype=torch.int64)).long()
    token_ids, order = (torch.arange(len(rows)) + offsets).sort()
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size or not bool((token_ids[1:] > token_ids[:-1]).all()):
        raise CheckpointError(
            f"{file}: {D2T} names tokens from {int(token_ids[0])} to {int(token_ids[-1])}, some of them twice or none "
            f"of the model's {vocab_size}; get the file again."
        )
    return {HEAD_ROWS: rows[order]}, token_ids
