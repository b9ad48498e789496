"""Tensors of an EAGLE-3 head: names and shapes in its file, and their names in the engine."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.speculation.sources.draft_head_layer import HEAD_ROWS
from hetero_ee.speculation.sources.eagle3 import NORM_ALL, NORM_EACH, Eagle3

LAYER = "layers.0."
D2T, LM_HEAD = "d2t", "lm_head.weight"
PREFIXES = {"midlayer.": LAYER}  # of names, and what the same layer is called elsewhere
MODEL_PREFIX = "model."
IGNORED = ("t2d",)  # what d2t says too
HIDDEN_NORM = f"{LAYER}hidden_norm.weight"  # that no head of EAGLE-1 has
NORMS = {"embedding": f"{LAYER}input_layernorm.weight", "hidden": HIDDEN_NORM, "head": "norm.weight"}


def plain_name(name: str) -> str:
    """Return a tensor's name without the parts that differ between publishers."""
    name = name.removeprefix(MODEL_PREFIX)
    return next((known + name.removeprefix(each) for each, known in PREFIXES.items() if name.startswith(each)), name)


def eagle3_shapes(
    spec: ModelSpec, eagle3: Eagle3, n_draft_tokens: int, layer: Mapping[str, tuple[int, ...]], *, has_head: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all required tensors by name. `layer`: shapes of a layer whose attention reads states of
    this size."""
    size, n_seen = spec.hidden_size, len(eagle3.captured)
    shapes = dict(layer) | {"fc.weight": (size, n_seen * size)} | dict.fromkeys(NORMS.values(), (size,))
    for part in "qkv":
        name = f"{LAYER}self_attn.{part}_proj.weight"
        shapes[name] = (layer[name][0], 2 * size)
    if eagle3.fc_norm == NORM_ALL:
        shapes["input_norm.weight"] = (n_seen * size,)
    if eagle3.fc_norm == NORM_EACH:
        shapes |= {f"fc_norm.{number}.weight": (size,) for number in range(n_seen)}
    if n_draft_tokens < spec.vocab_size:
        shapes[D2T] = (n_draft_tokens,)
    if has_head or n_draft_tokens < spec.vocab_size:
        shapes[LM_HEAD] = (n_draft_tokens, size)
    return shapes


def eagle3_vectors(eagle3: Eagle3, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms by the engine's names. Norms of several states are concatenated, as the states are."""
    found = {f"{short}_norm": tensors[name] for short, name in NORMS.items()}
    if eagle3.fc_norm == NORM_ALL:
        found["fc_norm"] = tensors["input_norm.weight"]
    if eagle3.fc_norm == NORM_EACH:
        each = range(len(eagle3.captured))
        found |= {f"fc_norm.{number}": tensors[f"fc_norm.{number}.weight"] for number in each}
    return found


def draft_rows(tensors: Mapping[str, Tensor], vocab_size: int, file: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the head's own rows as HEAD_ROWS and their tokens, ascending; nothing if it has none.

    Raises:
        CheckpointError: if d2t names tokens that the model lacks, or one twice.
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
