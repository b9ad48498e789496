"""Draft heads on disk: a config.json and a model.safetensors with EAGLE's tensor names, checked before use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, ModelError, UsageError, shown
from hetero_ee.hub.config_file import read_config_file, read_spec
from hetero_ee.hub.model_files import SINGLE_FILE
from hetero_ee.hub.regular_file import find_file
from hetero_ee.layers.tensors import TensorRole
from hetero_ee.models.draft_head import EAGLE_1, FC, Dialect, layer_blocks
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import NO_HEAD, RUN_OPTIONS
from hetero_ee.planning.statistics import MAX_ACCEPTANCE_POSITIONS
from hetero_ee.speculation.sources.draft_head_layer import EMBEDDING, DraftHead
from hetero_ee.speculation.sources.eagle3 import (
    D2T,
    DRAFT_VOCABULARY,
    HIDDEN_NORM,
    IGNORED,
    LAYER,
    LM_HEAD,
    draft_rows,
    draft_vocabulary_size,
    eagle3_of,
    eagle3_shapes,
    eagle3_vectors,
    is_eagle3,
    layer_config,
    plain_name,
)
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.safetensors_file import StoredTensor, read_header
from hetero_ee.weights.weight import DenseWeight

FLOAT_TYPES, INTEGER_TYPES = ("F64", "F32", "F16", "BF16"), ("I64", "I32")
DRAFT_TOKEN_IDS = "draft_token_ids"  # ours, in config.json: the tokens a head with a trimmed vocabulary drafts
ACCEPTANCE = "acceptance"  # ours too: scripts/measure_draft_head.py prints it
PICKLES = ("pytorch_model.bin", "*.bin", "*.pt", "*.pth")
OWN_EMBEDDING = "embed_tokens.weight"
_PARTS = {  # rows of a matrix or vector of the layer's blocks, one after the other
    "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "output": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
    "norm": ["post_attention_layernorm"],
}
_IGNORED = (LAYER + "self_attn.rotary_emb.inv_freq", *IGNORED)  # tensors that follow from the layer's shape


@dataclass(frozen=True, slots=True)
class DraftHeadFacts:
    """Facts from a head's config.json and the header of its tensors, known before its weights are read.

    has_embedding and has_rows: whether the head has its own embedding and its own rows of the lm_head. acceptance: for
    each position of a draft sequence, the measured chance that its draft is right given that all before it are; empty
    if not measured. token_ids: a trimmed vocabulary, drafted by the model's rows of the lm_head.
    """

    spec: ModelSpec  # spec of the head's layer
    n_draft_tokens: int  # size of the vocabulary that the head drafts
    has_embedding: bool
    acceptance: tuple[float, ...]
    dialect: Dialect = EAGLE_1
    has_rows: bool = False
    token_ids: tuple[int, ...] | None = None


def draft_head_facts(folder: Path, model: ModelSpec) -> DraftHeadFacts:
    """Return the facts of the head in `folder`.

    Raises:
        UsageError: if the head belongs to another model.
        ModelError: if its config.json is invalid.
        CheckpointError: if its weights can't be read.
    """
    config, where = read_config_file(folder), str(folder)
    is_3, dialect = is_eagle3(config), EAGLE_1
    spec = read_spec(layer_config(config, where) if is_3 else config)
    check_head_shape(spec, model, folder)
    token_ids = draft_token_ids(config, model, folder)
    n_draft_tokens = model.vocab_size if token_ids is None else len(token_ids)
    if is_3:
        seen_size = Fields(config, where).integer("target_hidden_size", model.hidden_size)
        check_head_shape(replace(spec, hidden_size=seen_size), model, folder)
        dialect = eagle3_of(config, model.n_layers, where)
        n_draft_tokens = draft_vocabulary_size(config, n_draft_tokens, where)
    file = find_file(folder, SINGLE_FILE, CheckpointError)
    names = set() if file is None else {plain_name(name) for name in read_header(file)}
    acceptance, has_embedding = _acceptance(config, where), OWN_EMBEDDING in names
    return DraftHeadFacts(spec, n_draft_tokens, has_embedding, acceptance, dialect, LM_HEAD in names, token_ids)


def _acceptance(config: Mapping[str, Any], where: str) -> tuple[float, ...]:
    found = config.get(ACCEPTANCE, [])
    if not isinstance(found, list) or not all(type(chance) in (int, float) and 0 <= chance <= 1 for chance in found):
        raise ModelError(f"{where}: {ACCEPTANCE} is {shown(found)}; expected a list of chances from 0 to 1.")
    return tuple(float(chance) for chance in found[:MAX_ACCEPTANCE_POSITIONS])


def read_draft_head(folder: Path, model: ModelSpec) -> DraftHead:
    """Read the head in `folder`, which must belong to a model of this shape and vocabulary.

    Raises:
        ModelError: if its configuration doesn't fit.
        CheckpointError: if files are missing, damaged or pickles, or a tensor is missing or unexpected.
    """
    head = draft_head_facts(folder, model)
    spec, dialect = head.spec, head.dialect
    token_ids = None if head.token_ids is None else torch.tensor(head.token_ids)
    file = find_file(folder, SINGLE_FILE, CheckpointError)
    if file is None:
        raise CheckpointError(f"{folder} holds no {SINGLE_FILE}{_instead(folder)}.")
    names, header = _by_plain_name(file)
    shapes = head_shapes(spec, header)
    if dialect.captured:
        n_rows = head.n_draft_tokens if token_ids is None else model.vocab_size  # token_ids: rows of the model's head
        shapes = eagle3_shapes(spec, dialect, n_rows, shapes, has_head=LM_HEAD in header)
    elif HIDDEN_NORM in header or D2T in header:
        raise CheckpointError(
            f"{file} holds an EAGLE-3 head, and its config.json has no {DRAFT_VOCABULARY} and names no architecture of "
            f"one; get both again."
        )
    _check_names(header, shapes, file)
    tensors = _tensors(file, {name: names[name] for name in shapes})
    matrices, vectors = {FC: tensors["fc.weight"]}, {}
    if OWN_EMBEDDING in tensors:
        matrices[EMBEDDING] = tensors[OWN_EMBEDDING]
    if "fc.bias" in tensors:
        vectors[f"{FC}_bias"] = tensors["fc.bias"]
    if dialect.captured:
        vectors |= eagle3_vectors(dialect, tensors)
        rows, own_ids = draft_rows(tensors, model.vocab_size, file)
        matrices |= rows
        token_ids = own_ids if token_ids is None else token_ids
    for short, tensor in (item for block in layer_blocks(spec, dialect) for item in block.tensors.items()):
        kind = "bias" if short.endswith("_bias") else "weight"
        parts = [tensors[f"{LAYER}{part}.{kind}"] for part in _PARTS[short.removesuffix("_bias")]]
        (matrices if tensor.role is TensorRole.MATRIX else vectors)[tensor.name] = torch.cat(parts)
    dense = ModelWeights({name: DenseWeight(values) for name, values in matrices.items()}, vectors)
    return DraftHead(spec, dense, token_ids, dialect)


def check_head_shape(spec: ModelSpec, model: ModelSpec, folder: Path) -> None:
    """Check the shape of the head's layer.

    Raises:
        UsageError: if the head in `folder` belongs to another model.
        ModelError: if heads can't have this kind of layer.
    """
    if (spec.hidden_size, spec.vocab_size) != (model.hidden_size, model.vocab_size):
        raise UsageError(
            f"the draft head {folder} is for hidden size {spec.hidden_size} and {spec.vocab_size} tokens, this model "
            f"has {model.hidden_size} and {model.vocab_size}; name a head made for this model, or ",
            RUN_OPTIONS["draft_head"],
            f" {NO_HEAD}.",
        )
    if spec.n_layers != 1:
        raise ModelError(f"{folder}: num_hidden_layers is {spec.n_layers}, a draft head has 1.")
    plain = spec.norm == "rms" and spec.norm_affine and spec.gated and spec.rope is not None
    plain = plain and spec.pre_norm and not spec.post_norm and spec.layer_ropes is None
    if not plain or spec.qk_norm or spec.ffn_bias or spec.attention_output_bias:
        raise ModelError(
            f"{folder}: {spec.architecture} with these settings is not a layer that a draft head can have."
        )


def draft_token_ids(config: Mapping[str, Any], model: ModelSpec, folder: Path) -> tuple[int, ...] | None:
    """Return the ids of the tokens that the head in `folder` can draft, ascending, or None for all.

    Raises: ModelError: if config.json lists invalid tokens.
    """
    found = config.get(DRAFT_TOKEN_IDS)
    if found is None:
        return None
    is_list = isinstance(found, list) and len(found) > 0 and all(type(token_id) is int for token_id in found)
    if not is_list or not 0 <= found[0] <= found[-1] < model.vocab_size or not all(a < b for a, b in pairwise(found)):
        raise ModelError(
            f"{folder}: {DRAFT_TOKEN_IDS} is {shown(found)}; expected an ascending list of tokens from 0 to "
            f"{model.vocab_size - 1}, each once."
        )
    return tuple(found)


def _instead(folder: Path) -> str:
    pickles = sorted({file.name for pattern in PICKLES for file in folder.glob(pattern)})
    if not pickles:
        return ", the draft head's weights"
    return (
        f", but {shown(pickles[0])}, a pickle, which can run code when opened and is never read; "
        "scripts/convert_draft_head.py makes a safetensors file of it"
    )


def head_shapes(spec: ModelSpec, header: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all required tensors, and of the optional tensors that exist."""
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
    shapes = {"fc.weight": (size, 2 * size)} | {LAYER + name: shape for name, shape in layer.items()}
    return shapes | {name: shape for name, shape in optional.items() if name in header}


def _check_names(header: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]], file: Path) -> None:
    missing, extra = shapes.keys() - header.keys(), header.keys() - shapes.keys() - set(_IGNORED)
    if missing:
        raise CheckpointError(f"{file} lacks tensor {min(missing)} of a draft head; get the file again.")
    if extra:
        raise CheckpointError(
            f"{file} holds tensor {shown(min(extra))}, which a draft head of this kind does not have."
        )
    for name, shape in shapes.items():
        if header[name].shape != shape:
            raise CheckpointError(
                f"{file}: tensor {name} is {list(header[name].shape)}, its config.json says {list(shape)}."
            )
        types = INTEGER_TYPES if name == D2T else FLOAT_TYPES
        if header[name].dtype not in types:
            raise CheckpointError(f"{file}: tensor {name} has type {header[name].dtype}, not {' or '.join(types)}.")


def _by_plain_name(file: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return two dictionaries by plain name: the names in the file, and its header.

    Raises: CheckpointError: if two tensors have the same plain name.
    """
    header = read_header(file)
    names = {plain_name(name): name for name in header}
    if len(names) < len(header):
        twice = min(name for name in header if names[plain_name(name)] != name)
        raise CheckpointError(f"{file} holds tensor {shown(plain_name(twice))} under two names; get the file again.")
    return names, {plain: header[name] for plain, name in names.items()}


def _tensors(file: Path, names: dict[str, str]) -> dict[str, Tensor]:
    """Read the tensors and return them by plain name. All but integers are converted to fp32."""
    get = _opened(file)
    tensors = {plain: get(name) for plain, name in names.items()}
    for name, values in tensors.items():
        if not values.is_floating_point():
            continue
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
