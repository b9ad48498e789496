"""Represent the decoder as a flat list of blocks, which the loader, store, planner and executors iterate over.

The blocks of layers hold the parameters that their mixers declare (hetero_ee/layers).
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from hetero_ee.layers.decoder import BoundBlock, LayerSpec
from hetero_ee.layers.ffn import FfnSpec
from hetero_ee.layers.ops import MixerSpec, Ops, Parameters
from hetero_ee.layers.state import RecurrentState, State
from hetero_ee.layers.tensors import MATRIX_LAYOUTS, TensorRole, Tensors, TensorSpec
from hetero_ee.models.spec import ModelSpec


class BlockKind(Enum):
    EMBEDDING = "embedding"
    TABLE = "table"  # of per-layer embeddings; always on the host
    LAYER = "layer"  # a mixer or FFN
    FINAL_NORM = "final_norm"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the decoder that can be placed on a device, such as one layer's attention."""

    name: str
    kind: BlockKind
    layer: int | None  # index of the decoder layer, None outside of layers
    tensors: dict[str, TensorSpec]  # by short names within the block; a tied head uses the embedding's
    mixer: MixerSpec | None = None  # in a layer's block
    has_norm: bool = True  # whether a mixer normalizes its input
    has_post_norm: bool = False  # whether it normalizes its output

    @property
    def state(self) -> State | None:
        """State that a cache keeps of each sequence for the block, None if there is none."""
        return None if self.mixer is None else self.mixer.state

    @property
    def n_elements(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors.values())


def decoder_blocks(spec: ModelSpec) -> list[Block]:
    """Return every block of the decoder, in the order in which tokens pass through them."""
    blocks = [_embedding_block(spec)]
    if spec.layer_table is not None:
        tensor = TensorSpec("table.tokens", TensorRole.VOCABULARY, (spec.layer_table.n_rows, spec.layer_table.width))
        blocks.append(Block("table", BlockKind.TABLE, None, {"tokens": tensor}))
    for layer in range(spec.n_layers):
        own = spec.layer(layer)
        blocks += [_layer_block(spec, layer, own, mixer) for mixer in own.mixers]
    if spec.final_norm:
        blocks.append(_final_norm_block(spec))
    blocks.append(_head_block(spec))
    return blocks


def neuron_blocks(spec: ModelSpec) -> list[Block]:
    """Return the FFNs, whose neurons may be skipped, in the order of their layers."""
    return [block for block in decoder_blocks(spec) if isinstance(block.mixer, FfnSpec)]


def layer_states(spec: ModelSpec) -> list[State | None]:
    """Return for each layer the state that it keeps of a sequence, None if it keeps none."""
    layers = map(spec.layer, range(spec.n_layers))
    return [next((each.state for each in layer.mixers if each.state is not None), None) for layer in layers]


def has_trees(spec: ModelSpec) -> bool:
    """Return whether a pass can verify a tree of drafts. A recurrent state follows a single path."""
    return not any(isinstance(state, RecurrentState) for state in layer_states(spec))


def layer_buffers(spec: ModelSpec) -> dict[str, int]:
    """Return the features per token of each buffer, by name: the most that any layer's mixer needs."""
    found: dict[str, int] = {}
    for layer in map(spec.layer, range(spec.n_layers)):
        for mixer in layer.mixers:
            found |= {name: max(width, found.get(name, 0)) for name, width in mixer.buffers.items()}
    return found


def bind(ops: Ops, spec: ModelSpec, block: Block, parameters: Parameters, cache: Any) -> BoundBlock:
    """Bind a layer's block to its parameters on a device, and to the part of the cache that keeps its state."""
    assert block.mixer is not None and block.layer is not None, "not a block of a layer"
    norm = spec.norms.bind(parameters, "norm") if block.has_norm else None
    post_norm = spec.norms.bind(parameters, "post_norm") if block.has_post_norm else None
    state, layer, part = block.state, block.layer, None
    if state is not None:
        layer = block.layer if state.source is None else state.source
        part = cache.part(layer)
    mixer, scale = block.mixer.bind(ops, parameters, layer, part), parameters.vector("layer_scale")
    return BoundBlock(mixer, norm, post_norm, spec.residual_scale, scale)


def all_tensors(blocks: list[Block]) -> list[TensorSpec]:
    """Return every tensor once, in block order. A tied head adds none."""
    return list({tensor.name: tensor for block in blocks for tensor in block.tensors.values()}.values())


def first_matrix(spec: ModelSpec) -> str:
    """Return the short name of the matrix that decides which neurons of a neuron-major FFN are active."""
    return "gate" if spec.gated else "up"


def least_activations(block: Block) -> str:
    """Return the name of an FFN's optional vector of thresholds: neurons with smaller activations count as inactive."""
    return f"{block.name}.least"


def matrix_role(spec: ModelSpec, name: str) -> TensorRole:
    """Return the role of the matrix with this name, by which it is quantized."""
    layout = next((layout for each, layout in spec.matrix_layouts if each == name), None)
    return TensorRole.MATRIX if layout is None else TensorRole(layout)


def in_layout(spec: ModelSpec, layout: str) -> ModelSpec:
    """Return the spec with all of the layers' matrices in this layout, or in int4 if it is the name of no layout."""
    plain = spec.in_plain_int4
    if layout not in MATRIX_LAYOUTS.values():
        return plain
    names = (tensor.name for tensor in all_tensors(decoder_blocks(plain)) if tensor.role is TensorRole.MATRIX)
    return replace(plain, matrix_layouts=tuple((name, layout) for name in sorted(names)))


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


def _layer_block(spec: ModelSpec, layer: int, own: LayerSpec, mixer: MixerSpec) -> Block:
    tensors = Tensors(f"layers.{layer}.{mixer.name}", partial(matrix_role, spec))
    has_norm, is_scaled = spec.pre_norm and mixer.reads_norm, own.is_scaled and mixer is own.mixers[-1]
    if has_norm and mixer.has_norm_scale:
        _declare_norm(spec, tensors, "norm")
    mixer.declare(tensors, spec.hidden_size)
    if spec.post_norm:
        _declare_norm(spec, tensors, "post_norm")
    if is_scaled:
        tensors.vector("layer_scale", 1)
    return Block(tensors.prefix, BlockKind.LAYER, layer, tensors.declared, mixer, has_norm, spec.post_norm)


def _final_norm_block(spec: ModelSpec) -> Block:
    tensors = Tensors("final_norm", lambda name: TensorRole.MATRIX)
    _declare_norm(spec, tensors, "norm")
    return Block(tensors.prefix, BlockKind.FINAL_NORM, None, tensors.declared)


def _declare_norm(spec: ModelSpec, tensors: Tensors, short: str) -> None:
    if spec.norm_affine:
        tensors.vector(short, spec.hidden_size)
        if spec.norm == "layer" and spec.norm_bias:
            tensors.vector(f"{short}_bias", spec.hidden_size)
