"""EAGLE-3 heads (arXiv 2503.01840) as config.json describes them, in the dialects of their publishers.

The head sees the model's states before a few of its layers, concatenated: g = fc [low; middle; high]. One layer follows
whose attention reads [norm(embedding); norm(g)] and is added to g, or to its norm. The result replaces g for the next
draft; its norm, times a head of a draft vocabulary, gives the logits. EAGLE-3.1 norms the inputs of fc and starts the
next
draft with the normed state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_ee.errors import ModelError, shown
from hetero_ee.models.fields import Fields

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DRAFT_VOCABULARY = "draft_vocab_size"
LAYER_CONFIG = "transformer_layer_config"  # where speculators keep what is the layer's
NORM_EACH, NORM_ALL = "each", "all"  # captured states normed one by one, or as the one vector that fc sees
MAX_CAPTURED = 8
OUTPUT_IDS = ("LlamaForCausalLMEagle3",)  # SpecForge, SGLang: states are counted by the layer that they come out of
INPUT_IDS = ("Eagle3LlamaForCausalLM",)  # AngelSlim, vLLM: by the layer that they go into
NESTED = ("Eagle3Speculator", "Eagle3DraftModel")  # speculators, as INPUT_IDS
PLAIN = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@dataclass(frozen=True, slots=True)
class Eagle3:
    """Properties of an EAGLE-3 head. captured: layers of the model before which it sees states, ascending."""

    captured: tuple[int, ...]
    norm_before_residual: bool = False  # the attention is added to the normed g
    fc_norm: str | None = None  # NORM_EACH, NORM_ALL
    norm_output: bool = False  # the next draft begins with the normed state


def default_layers(n_layers: int) -> tuple[int, ...]:
    """Return the captured layers if config.json names none."""
    return tuple(sorted({min(2, n_layers - 1), n_layers // 2, max(0, n_layers - 3)}))


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether this config.json is an EAGLE-3 head's. Only their draft vocabulary reveals SafeAILab's."""
    return _architecture(config) in (*OUTPUT_IDS, *INPUT_IDS, *NESTED) or DRAFT_VOCABULARY in config


def layer_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of the head's layer as those of a Llama model with one layer.

    Raises:
        ModelError: if they are invalid.
    """
    if _architecture(config) not in NESTED:
        return dict(config) | PLAIN
    inner = config.get(LAYER_CONFIG)
    if not isinstance(inner, Mapping):
        raise ModelError(f"{where}: {LAYER_CONFIG} is {shown(inner)}, expected the fields of the head's layer.")
    return dict(inner) | PLAIN


def eagle3_of(config: Mapping[str, Any], n_layers: int, where: str) -> Eagle3:
    """Return the properties of a head for a model with n_layers.

    Raises:
        ModelError: if config.json is invalid.
    """
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
    return Eagle3(captured, fields.flag("norm_before_residual", False), fc_norm, fields.flag("norm_output", False))


def draft_vocabulary_size(config: Mapping[str, Any], vocab_size: int, where: str) -> int:
    """Return how many of the model's tokens the head drafts.

    Raises:
        ModelError: if config.json is invalid.
    """
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
