"""The decoder: each block's norm, mixer and residual, from the embedding to the logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_ee.layers.ops import Array, Mixer, MixerSpec, Norm, Ops, Parameters, Rows


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: two mixers, one after the other, such as an attention and an FFN."""

    mixer: MixerSpec
    ffn: MixerSpec


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The kind of all norms of hidden states."""

    kind: str  # "rms" or "layer"
    eps: float

    def bind(self, parameters: Parameters, short: str) -> Norm:
        """Return the block's norm of that name."""
        return Norm(self.kind, parameters.vector(short), parameters.vector(f"{short}_bias"), self.eps)


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


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """The numbers that define what comes before the first layer."""

    hidden_size: int
    position_offset: int  # rows skipped in a table of learned positions
    scale: float

    def forward(self, ops: Ops, parameters: Parameters, batch: Any) -> Array:
        """Return the hidden states (m, hidden) before the first layer."""
        learned = parameters.vector("positions")
        x = ops.embed(parameters.matrix("tokens"), batch, self.hidden_size, learned, self.position_offset)
        return x if self.scale == 1 else ops.scale(x, self.scale)


@dataclass(frozen=True, slots=True)
class LogitsSpec:
    """The numbers that make logits of the head's product."""

    scale: float
    cap: float  # logits stay below it, by tanh; 0 without

    def finish(self, ops: Ops, product: Array) -> Array:
        """Scale and cap the product, in place."""
        if self.scale != 1:
            product = ops.scale(product, self.scale)
        return ops.cap(product, self.cap) if self.cap else product
