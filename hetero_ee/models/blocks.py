"""The decoder as a flat list of blocks: what the loader, the store, the planner and the executor all go through.

Matrices are (out, in). Projections that read the same input are one matrix with their rows one after the other:
qkv is query, key, value; gate_up is gate, up. Where FFNs are neuron-major, what is skipped with a neuron that is not
active has a row for each neuron: up beside a gate, and down, whose rows are its columns; with a predictor of active
neurons also the first matrix, the gate or the up without one.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from hetero_ee.models.spec import ModelSpec


class BlockKind(Enum):
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FFN = "ffn"
    FINAL_NORM = "final_norm"
    HEAD = "head"


class TensorRole(Enum):
    """What a tensor is for, which decides how it may be stored."""

    MATRIX = "matrix"  # multiplies hidden states; quantized
    MATRIX_8 = "8-bit matrix"  # the same, of which the model's file says that 4 bits would be too few
    MATRIX_ZEROS = "4-bit matrix with zero points"  # the same, whose 4-bit codes in the model's file have zero points
    NEURONS = "neurons"  # a row per neuron of a neuron-major FFN; quantized row by row
    FIRST_ROWS = "first rows"  # the same, of the matrix that says which neurons are active
    VOCABULARY = "vocabulary"  # embedding or head: a row per token; quantized at a width of its own
    POSITIONS = "positions"  # learned position table; kept in full precision
    VECTOR = "vector"  # norms and biases; kept in full precision


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model: its name inside this engine, its role and its shape."""

    name: str
    role: TensorRole
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """A unit that can be placed on a device."""

    name: str
    kind: BlockKind
    layer: int | None  # index of the decoder layer, None outside of them
    tensors: dict[str, TensorSpec]  # by the block's own short names; a tied head names the embedding's
    has_norm: bool = True  # without one, an attention or FFN takes its input as it is
    has_post_norm: bool = False  # whether its output passes one

    @property
    def n_elements(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors.values())


def decoder_blocks(spec: ModelSpec) -> list[Block]:
    """Every block of the decoder in the order a token passes them."""
    blocks = [_embedding_block(spec)]
    for layer in range(spec.n_layers):
        blocks += [_attention_block(spec, layer), _ffn_block(spec, layer)]
    if spec.final_norm:
        blocks.append(Block("final_norm", BlockKind.FINAL_NORM, None, dict(_norm(spec, "norm", "final_norm.norm"))))
    blocks.append(_head_block(spec))
    return blocks


def attentions(blocks: Iterable[Block], layers: range) -> list[Block]:
    """The attentions of these layers, in order."""
    return [block for block in blocks if block.kind is BlockKind.ATTENTION and block.layer in layers]


def all_tensors(blocks: list[Block]) -> list[TensorSpec]:
    """Every tensor once, in block order (a tied head adds none)."""
    return list({tensor.name: tensor for block in blocks for tensor in block.tensors.values()}.values())


def is_in_rows(role: TensorRole) -> bool:
    """Whether such a tensor lies row after row, one a neuron."""
    return role in (TensorRole.NEURONS, TensorRole.FIRST_ROWS)


def first_matrix(spec: ModelSpec) -> str:
    """Short name of the matrix that says which neurons of a neuron-major FFN are active."""
    return "gate" if spec.gated else "up"


def least_activations(block: Block) -> str:
    """Name of a vector that a neuron-major FFN may have beside its tensors: below it, a neuron counts as inactive."""
    return f"{block.name}.least"


def _embedding_block(spec: ModelSpec) -> Block:
    tensors = {"tokens": TensorSpec("embedding.tokens", TensorRole.VOCABULARY, (spec.vocab_size, spec.hidden_size))}
    if spec.learned_position_offset is not None:
        n_rows = spec.max_context_tokens + spec.learned_position_offset
        tensors["positions"] = TensorSpec("embedding.positions", TensorRole.POSITIONS, (n_rows, spec.hidden_size))
    return Block("embedding", BlockKind.EMBEDDING, None, tensors)


def _head_block(spec: ModelSpec) -> Block:
    name = "embedding.tokens" if spec.tied_head else "head.tokens"
    tensor = TensorSpec(name, TensorRole.VOCABULARY, (spec.vocab_size, spec.hidden_size))
    return Block("head", BlockKind.HEAD, None, {"tokens": tensor})


def _attention_block(spec: ModelSpec, layer: int) -> Block:
    prefix = f"layers.{layer}.attention"
    tensors = dict(_norm(spec, "norm", f"{prefix}.norm")) if spec.pre_norm else {}
    qkv_size = spec.query_size + 2 * spec.kv_size
    tensors |= _linear(spec, f"{prefix}.qkv", qkv_size, spec.hidden_size, spec.qkv_bias)
    if spec.qk_norm:
        whole, one = (spec.query_size, spec.kv_size), (spec.head_dim, spec.head_dim)
        for name, size in zip(("query_norm", "key_norm"), whole if spec.qk_norm_whole else one, strict=True):
            tensors[name] = TensorSpec(f"{prefix}.{name}", TensorRole.VECTOR, (size,))
    tensors |= _linear(spec, f"{prefix}.output", spec.hidden_size, spec.query_size, spec.attention_output_bias)
    return _layer_block(spec, prefix, BlockKind.ATTENTION, layer, tensors)


def _ffn_block(spec: ModelSpec, layer: int) -> Block:
    prefix = f"layers.{layer}.ffn"
    tensors = dict(_norm(spec, "norm", f"{prefix}.norm")) if spec.pre_norm else {}
    if spec.neuron_major:
        return _layer_block(spec, prefix, BlockKind.FFN, layer, tensors | _neurons(spec, prefix))
    first, n_rows = ("gate_up", 2 * spec.ffn_size) if spec.gated else ("up", spec.ffn_size)
    tensors |= _linear(spec, f"{prefix}.{first}", n_rows, spec.hidden_size, spec.ffn_bias)
    tensors |= _linear(spec, f"{prefix}.down", spec.hidden_size, spec.ffn_size, spec.ffn_bias)
    return _layer_block(spec, prefix, BlockKind.FFN, layer, tensors)


def _layer_block(spec: ModelSpec, name: str, kind: BlockKind, layer: int, tensors: dict[str, TensorSpec]) -> Block:
    if spec.post_norm:
        tensors |= _norm(spec, "post_norm", f"{name}.post_norm")
    return Block(name, kind, layer, tensors, spec.pre_norm, spec.post_norm)


def _neurons(spec: ModelSpec, prefix: str) -> dict[str, TensorSpec]:
    first, rows = first_matrix(spec), ("up", "down") if spec.gated else ("down",)
    tensors, shape = _predictor(spec, prefix), (spec.ffn_size, spec.hidden_size)
    tensors |= _linear(spec, f"{prefix}.{first}", *shape, spec.ffn_bias)
    if spec.first_in_rows:
        tensors[first] = replace(tensors[first], role=TensorRole.FIRST_ROWS)
    tensors |= {short: TensorSpec(f"{prefix}.{short}", TensorRole.NEURONS, shape) for short in rows}
    if spec.ffn_bias:
        for short, size in zip(rows, (spec.ffn_size, spec.hidden_size)[-len(rows) :], strict=True):
            tensors[f"{short}_bias"] = TensorSpec(f"{prefix}.{short}_bias", TensorRole.VECTOR, (size,))
    return tensors


def _predictor(spec: ModelSpec, prefix: str) -> dict[str, TensorSpec]:
    """Two matrices of low rank, whose product with an FFN's input, and a bias, is above 0 for neurons to compute."""
    if not spec.predictor_rank:
        return {}
    tensors = _linear(spec, f"{prefix}.predictor_in", spec.predictor_rank, spec.hidden_size, bias=False)
    return tensors | _linear(spec, f"{prefix}.predictor_out", spec.ffn_size, spec.predictor_rank, bias=True)


def _linear(spec: ModelSpec, name: str, n_rows: int, n_columns: int, bias: bool) -> dict[str, TensorSpec]:
    short = name.rsplit(".", 1)[1]
    role = TensorRole.MATRIX_ZEROS if name in spec.zero_point_matrices else TensorRole.MATRIX
    role = TensorRole.MATRIX_8 if name in spec.int8_matrices else role
    tensors = {short: TensorSpec(name, role, (n_rows, n_columns))}
    if bias:
        tensors[f"{short}_bias"] = TensorSpec(f"{name}_bias", TensorRole.VECTOR, (n_rows,))
    return tensors


def _norm(spec: ModelSpec, short: str, name: str) -> Iterator[tuple[str, TensorSpec]]:
    if spec.norm_affine:
        yield short, TensorSpec(name, TensorRole.VECTOR, (spec.hidden_size,))
        if spec.norm == "layer" and spec.norm_bias:
            yield f"{short}_bias", TensorSpec(f"{name}_bias", TensorRole.VECTOR, (spec.hidden_size,))
