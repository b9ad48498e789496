"""Represent a draft head, a layer that predicts further tokens, as a list of blocks, and the MTP layer of a checkpoint.

A multi-token prediction (MTP) layer is a draft head that a checkpoint holds after its own layers. It reads fc
[norm(e); norm(h)], where e is the newest token's embedding and h the final normed state that led to the token. A
decoder layer and a norm follow; the result estimates the next h. Source: DeepSeek-V3 (arXiv 2412.19437); Qwen3.5's
layout and its normed h: vLLM's qwen3_5_mtp.py, llama.cpp pull request 24025.
"""

from dataclasses import dataclass, replace

from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.blocks import Block, BlockKind, decoder_blocks, matrix_role
from hetero_ee.models.spec import ModelSpec

FC = "fc"  # the matrix in addition to those of the layer's blocks
EMBEDDING_NORM, HIDDEN_NORM, HEAD_NORM, FC_NORM = "embedding_norm", "hidden_norm", "head_norm", "fc_norm"
NORM_EACH, NORM_ALL = "each", "all"  # captured states normed one by one, or as the one vector that fc sees


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a draft head combines a token's embedding with the model's states. The default is that of EAGLE-1."""

    captured: tuple[int, ...] = ()  # EAGLE-3 reads the states before these layers, ascending, others the final state
    has_norms: bool = False  # embedding, state and result are normed
    norm_output: bool = False  # the next draft begins with the normed result
    norm_before_residual: bool = False  # EAGLE-3's attention is added to the normed state
    fc_norm: str | None = None  # EAGLE-3's norm before fc: NORM_EACH, NORM_ALL

    @property
    def norms_layer(self) -> bool:
        """Whether the layer's attention norms its input itself, as in MTP."""
        return self.has_norms and not self.captured


EAGLE_1, MTP = Dialect(), Dialect(has_norms=True, norm_output=True)


def layer_blocks(spec: ModelSpec, dialect: Dialect = EAGLE_1) -> list[Block]:
    """Return the attention and the FFN. EAGLE's attention has no input norm; EAGLE-3's reads two normed states."""
    attention, ffn = (block for block in decoder_blocks(spec) if block.layer is not None)
    if dialect.norms_layer:
        return [attention, ffn]
    tensors = {short: tensor for short, tensor in attention.tensors.items() if short != "norm"}
    if dialect.captured:
        n_rows, n_columns = tensors["qkv"].shape
        tensors["qkv"] = replace(tensors["qkv"], shape=(n_rows, 2 * n_columns))
    return [replace(attention, tensors=tensors, has_norm=False), ffn]


def fc_block(spec: ModelSpec, dialect: Dialect = EAGLE_1) -> Block:
    """Return fc and the norms outside of the layer as a block that belongs to no layer."""
    size = spec.hidden_size
    vectors = {} if dialect.norms_layer else {f"{FC}_bias": size}
    if dialect.has_norms:
        vectors |= dict.fromkeys((EMBEDDING_NORM, HIDDEN_NORM, HEAD_NORM), size) | _fc_norms(dialect, size)
    tensors = {name: TensorSpec(name, TensorRole.VECTOR, (n,)) for name, n in vectors.items()}
    tensors[FC] = TensorSpec(FC, matrix_role(spec, FC), (size, (len(dialect.captured) or 2) * size))
    return Block(FC, BlockKind.LAYER, None, tensors, has_norm=False)


def _fc_norms(dialect: Dialect, size: int) -> dict[str, int]:
    """Return the sizes of the norms in fc, by name."""
    n_seen = len(dialect.captured)
    if dialect.fc_norm == NORM_EACH:
        return {f"{FC_NORM}.{number}": size for number in range(n_seen)}
    return {FC_NORM: n_seen * size} if dialect.fc_norm == NORM_ALL else {}


def mtp_spec(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the MTP layer of a model that has one, as a model with one layer."""
    assert spec.mtp is not None, "the model has an MTP layer"
    layouts = tuple((_head_name(spec, name), layout) for name, layout in spec.matrix_layouts)
    alone = replace(spec, n_layers=1, own_layers=(spec.mtp,), sliding_windows=(None,), layer_ropes=None, mtp=None)
    return replace(alone, matrix_layouts=layouts)


def stored_blocks(spec: ModelSpec) -> list[Block]:
    """Return the decoder's blocks and those of the MTP layer, all of whose tensors a checkpoint and a store hold."""
    blocks = decoder_blocks(spec)
    if spec.mtp is None:
        return blocks
    head = mtp_spec(spec)
    for block in (fc_block(head, MTP), *layer_blocks(head, MTP)):
        tensors = {short: replace(each, name=_stored_name(spec, each.name)) for short, each in block.tensors.items()}
        blocks.append(replace(block, tensors=tensors))
    return blocks


def mtp_names(spec: ModelSpec) -> dict[str, str]:
    """Map the names of the head's tensors to those in the model's weights; empty if the model has no MTP layer."""
    mine = (tensor.name for block in stored_blocks(spec) for tensor in block.tensors.values())
    return {_head_name(spec, name): name for name in mine if name.startswith(f"layers.{spec.n_layers}.")}


def _stored_name(spec: ModelSpec, name: str) -> str:
    """Return a tensor's name in the model's weights: the layer's number is that after the last layer's."""
    room, _, short = name.partition("layers.0.")
    return f"layers.{spec.n_layers}.{short or f'mtp.{room}'}"


def _head_name(spec: ModelSpec, name: str) -> str:
    """Return the head's name of a tensor in the model's weights."""
    short = name.removeprefix(f"layers.{spec.n_layers}.")
    return name if short == name else short.removeprefix("mtp.") if short.startswith("mtp.") else f"layers.0.{short}"
