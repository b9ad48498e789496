"""Draft heads on disk: config.json and model.safetensors with EAGLE-1's names, checked before anything is used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.hub.config_file import read_config_file, read_spec
from hetero_ee.hub.model_files import SINGLE_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.models.blocks import TensorRole
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.statistics import MAX_ACCEPTANCE_POSITIONS
from hetero_ee.speculation.sources.draft_head_layer import EMBEDDING, FC, DraftHead, layer_blocks
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.safetensors_file import StoredTensor, read_header
from hetero_ee.weights.weight import DenseWeight

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
DRAFT_TOKEN_IDS = "draft_token_ids"  # ours, in config.json: the tokens a head with a trimmed vocabulary drafts
ACCEPTANCE = "acceptance"  # ours too: scripts/measure_draft_head.py prints it
PICKLES = ("pytorch_model.bin", "*.bin", "*.pt", "*.pth")
OWN_EMBEDDING = "embed_tokens.weight"
_LAYER = "layers.0."
_PARTS = {  # rows of a matrix or vector of the layer's blocks, one after the other
    "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "output": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
    "norm": ["post_attention_layernorm"],
}
_IGNORED = (_LAYER + "self_attn.rotary_emb.inv_freq",)  # what the layer's shape implies
_EAGLE_3 = ("d2t", "t2d", "midlayer.self_attn.q_proj.weight")


@dataclass(frozen=True, slots=True)
class DraftHeadFacts:
    """What a head's config.json says, before its weights are read.

    has_embedding: its own, in place of the model's. acceptance: for each position of a draft sequence the measured
    chance that its draft is right where all before it are; empty where nobody measured it.
    """

    spec: ModelSpec  # of the head's layer
    n_draft_tokens: int  # of the vocabulary that it drafts
    has_embedding: bool
    acceptance: tuple[float, ...]


def draft_head_facts(folder: Path, model: ModelSpec) -> DraftHeadFacts:
    """Of the head in `folder`. Raises ModelError for one of another model, or whose config.json makes no sense, and
    CheckpointError for a file of weights that can't be read."""
    config = read_config_file(folder)
    spec = read_spec(config)
    check_head_shape(spec, model, folder)
    found = config.get(ACCEPTANCE, [])
    if not isinstance(found, list) or not all(type(chance) in (int, float) and 0 <= chance <= 1 for chance in found):
        raise ModelError(f"{folder}: {ACCEPTANCE} is {shown(found)}; expected a list of chances from 0 to 1.")
    n_tokens = len(draft_token_ids(config, model, folder) or range(model.vocab_size))
    file = find_file(folder, SINGLE_FILE, CheckpointError)
    has_embedding = file is not None and OWN_EMBEDDING in read_header(file)
    acceptance = tuple(float(chance) for chance in found[:MAX_ACCEPTANCE_POSITIONS])
    return DraftHeadFacts(spec, n_tokens, has_embedding, acceptance)


def read_draft_head(folder: Path, model: ModelSpec) -> DraftHead:
    """The head in `folder`, which has to belong to a model of this shape and vocabulary.

    Raises ModelError for a configuration that doesn't fit, CheckpointError for files that are missing, damaged, pickles
    or hold other tensors than promised.
    """
    config = read_config_file(folder)
    spec = read_spec(config)
    check_head_shape(spec, model, folder)
    token_ids = draft_token_ids(config, model, folder)
    file = find_file(folder, SINGLE_FILE, CheckpointError)
    if file is None:
        raise CheckpointError(f"{folder} holds no {SINGLE_FILE}{_instead(folder)}.")
    header = read_header(file)
    shapes = _shapes(spec, header)
    _check_names(header, shapes, file)
    tensors = _tensors(file, shapes)
    matrices, vectors = {FC: tensors["fc.weight"]}, {}
    if OWN_EMBEDDING in tensors:
        matrices[EMBEDDING] = tensors[OWN_EMBEDDING]
    if "fc.bias" in tensors:
        vectors[f"{FC}_bias"] = tensors["fc.bias"]
    for short, tensor in (item for block in layer_blocks(spec) for item in block.tensors.items()):
        kind = "bias" if short.endswith("_bias") else "weight"
        parts = [tensors[f"{_LAYER}{part}.{kind}"] for part in _PARTS[short.removesuffix("_bias")]]
        (matrices if tensor.role is TensorRole.MATRIX else vectors)[tensor.name] = torch.cat(parts)
    dense = ModelWeights({name: DenseWeight(values) for name, values in matrices.items()}, vectors)
    return DraftHead(spec, dense, None if token_ids is None else torch.tensor(token_ids))


def check_head_shape(spec: ModelSpec, model: ModelSpec, folder: Path) -> None:
    """Raises ModelError where the head in `folder` is of another model, or no layer that a head can have."""
    for name, found, expected in (
        ("a vocabulary of", spec.vocab_size, model.vocab_size),
        ("a hidden size of", spec.hidden_size, model.hidden_size),
    ):
        if found != expected:
            raise ModelError(
                f"the draft head {folder} has {name} {found}, the model {expected}; get a head made for this model."
            )
    if spec.n_layers != 1:
        raise ModelError(f"{folder}: num_hidden_layers is {spec.n_layers}, a draft head has 1.")
    plain = spec.norm == "rms" and spec.norm_affine and spec.gated and spec.rope is not None
    if not plain or spec.qk_norm or spec.ffn_bias or spec.attention_output_bias:
        raise ModelError(f"{folder}: {spec.architecture} with these settings is no layer that a draft head can have.")


def draft_token_ids(config: Mapping[str, Any], model: ModelSpec, folder: Path) -> list[int] | None:
    """The tokens that the head in `folder` drafts, ascending; None for all. Raises ModelError."""
    found = config.get(DRAFT_TOKEN_IDS)
    if found is None:
        return None
    is_list = isinstance(found, list) and len(found) > 0 and all(type(token_id) is int for token_id in found)
    if not is_list or not 0 <= found[0] <= found[-1] < model.vocab_size or not all(a < b for a, b in pairwise(found)):
        raise ModelError(
            f"{folder}: {DRAFT_TOKEN_IDS} is {shown(found)}; expected an ascending list of tokens from 0 to "
            f"{model.vocab_size - 1}, each once."
        )
    return list(found)


def _instead(folder: Path) -> str:
    pickles = sorted({file.name for pattern in PICKLES for file in folder.glob(pattern)})
    if not pickles:
        return ", the draft head's weights"
    return (
        f", but {shown(pickles[0])}, a pickle, which can run code when opened and is never read; "
        "scripts/convert_draft_head.py makes a safetensors file of it"
    )


def _shapes(spec: ModelSpec, header: dict[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Every tensor that has to be there; of the optional ones those that are."""
    size, queries, keys = spec.hidden_size, spec.query_size, spec.kv_size
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, size),
        "self_attn.k_proj.weight": (keys, size),
        "self_attn.v_proj.weight": (keys, size),
        "self_attn.o_proj.weight": (size, queries),
        "mlp.gate_proj.weight": (spec.ffn_size, size),
        "mlp.up_proj.weight": (spec.ffn_size, size),
        "mlp.down_proj.weight": (size, spec.ffn_size),
        "post_attention_layernorm.weight": (size,),
    }
    if spec.qkv_bias:
        layer |= {f"self_attn.{part}_proj.bias": (n,) for part, n in (("q", queries), ("k", keys), ("v", keys))}
    optional: dict[str, tuple[int, ...]] = {"fc.bias": (size,), OWN_EMBEDDING: (spec.vocab_size, size)}
    shapes = {"fc.weight": (size, 2 * size)} | {_LAYER + name: shape for name, shape in layer.items()}
    return shapes | {name: shape for name, shape in optional.items() if name in header}


def _check_names(header: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]], file: Path) -> None:
    missing, extra = shapes.keys() - header.keys(), header.keys() - shapes.keys() - set(_IGNORED)
    if any(name in extra for name in _EAGLE_3):
        raise CheckpointError(f"{file} holds an EAGLE-3 head; heads of EAGLE-1 are supported.")
    if missing:
        raise CheckpointError(f"{file} lacks tensor {min(missing)} of a draft head; get the file again.")
    if extra:
        raise CheckpointError(f"{file} holds tensor {shown(min(extra))}, which an EAGLE-1 draft head does not have.")
    for name, shape in shapes.items():
        if header[name].shape != shape:
            raise CheckpointError(
                f"{file}: tensor {name} is {list(header[name].shape)}, its config.json says {list(shape)}."
            )
        if header[name].dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has type {header[name].dtype}, not {' or '.join(FLOAT_TYPES)}."
            )


def _tensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    get = _opened(file)
    tensors = {name: get(name) for name in shapes}
    for name, values in tensors.items():
        tensors[name] = values = values.float()
        if not torch.isfinite(values).all():
            raise CheckpointError(f"{file}: tensor {name} holds values that are no numbers; the head is damaged.")
    return tensors


def _opened(file: Path) -> Callable[[str], Tensor]:
    from safetensors import safe_open

    try:
        opened: Any = safe_open(file, framework="pt")
    except Exception as error:  # safetensors raises its own errors, OSError and torch's for a damaged file
        raise CheckpointError(f"{file} can't be read ({shown(str(error))}); get the file again.") from error

    def get(name: str) -> Tensor:
        tensor: Tensor = opened.get_tensor(name)
        return tensor

    return get
