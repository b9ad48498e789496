"""The decoder: each block's norm, mixer and residual, from the embedding to the logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_ee.layers.attention import Attention
from hetero_ee.layers.ffn import Ffn
from hetero_ee.layers.ops import Array, Mixer, Norm, Ops, Parameters, Rows
from hetero_ee.layers.sparse_ffn import SparseFfn
from hetero_ee.models.blocks import Block, BlockKind
from hetero_ee.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BoundBlock:
    """A block with its parameters on a device."""

    mixer: Mixer
    norm: Norm | None  # of its input
    post_norm: Norm | None  # of its output
    residual_scale: float

    def finish(self, ops: Ops, delta: Array) -> Array:
        """Norm and scale the mixer's output as it is added to the hidden states."""
        if self.post_norm is not None:
            delta = ops.norm_in_place(delta, self.post_norm)
        return delta if self.residual_scale == 1 else ops.scale(delta, self.residual_scale)


def forward(ops: Ops, blocks: Sequence[BoundBlock], x: Array, rows: Rows) -> Array:
    """Run hidden states x (m, hidden) through the blocks, in place.

    Each block's output is added on the way into the next block's norm.
    """
    delta = None
    for block in blocks:
        delta = block.mixer.forward(ops, ops.add_norm(x, delta, block.norm), rows)
        delta = block.finish(ops, delta)
    return x if delta is None else ops.add(x, delta)


def bind(ops: Ops, spec: ModelSpec, block: Block, parameters: Parameters, cache: Any) -> BoundBlock:
    """Bind an attention or FFN to its parameters on a device, and to the cache that keeps its state."""
    assert block.layer is not None, "not a block of a layer"
    layer = spec.layer(block.layer)
    mixer: Mixer
    if block.kind is BlockKind.ATTENTION:
        mixer = Attention(ops, layer.attention, parameters, block.layer, cache, spec.norm_eps)
    elif layer.ffn.neuron_major:
        mixer = SparseFfn(layer.ffn, parameters)
    else:
        mixer = Ffn(layer.ffn, parameters)
    norm = bound_norm(spec, parameters, "norm") if block.has_norm else None
    post_norm = bound_norm(spec, parameters, "post_norm") if block.has_post_norm else None
    return BoundBlock(mixer, norm, post_norm, spec.residual_scale)


def bound_norm(spec: ModelSpec, parameters: Parameters, short: str) -> Norm:
    """Return the block's norm of that name."""
    return Norm(spec.norm, parameters.vector(short), parameters.vector(f"{short}_bias"), spec.norm_eps)


def embed(ops: Ops, spec: ModelSpec, parameters: Parameters, batch: Any) -> Array:
    """Return the hidden states (m, hidden) before the first layer."""
    learned, offset = parameters.vector("positions"), spec.learned_position_offset or 0
    x = ops.embed(parameters.matrix("tokens"), batch, spec.hidden_size, learned, offset)
    return x if spec.embedding_scale == 1 else ops.scale(x, spec.embedding_scale)


def to_logits(ops: Ops, spec: ModelSpec, product: Array) -> Array:
    """Scale and cap the head's product, in place."""
    if spec.logit_scale != 1:
        product = ops.scale(product, spec.logit_scale)
    return ops.cap(product, spec.logit_cap) if spec.logit_cap else product
