"""Run the decoder: each block's norm, mixer and residual, from the embedding to the logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_ee.layers.ops import Array, Mixer, MixerSpec, Norm, Ops, Parameters, Rows


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Specs of one decoder layer's mixers, which run one after the other, such as an attention and an FFN, if any."""

    mixer: MixerSpec
    ffn: MixerSpec | None
    last: MixerSpec | None = None  # runs after the FFN
    is_scaled: bool = False  # multiplies the hidden states after the layer by a number that was trained

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return tuple(each for each in (self.mixer, self.ffn, self.last) if each is not None)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Kind and epsilon that all norms of hidden states share."""

    kind: str  # "rms" or "layer"
    eps: float

    def bind(self, parameters: Parameters, short: str) -> Norm:
        """Return the norm whose parameters the block calls `short`."""
        return Norm(self.kind, parameters.vector(short), parameters.vector(f"{short}_bias"), self.eps)


@dataclass(frozen=True, slots=True)
class BoundBlock:
    """A block of a layer, with its parameters on a device."""

    mixer: Mixer
    norm: Norm | None  # before the mixer
    post_norm: Norm | None  # after the mixer
    residual_scale: float
    layer_scale: Array | None = None  # (1,): factor of the hidden states after the block

    def finish(self, ops: Ops, delta: Array) -> Array:
        """Apply the norm after the mixer, if any, and the residual scale to the mixer's output."""
        if self.post_norm is not None:
            delta = ops.norm_in_place(delta, self.post_norm)
        return delta if self.residual_scale == 1 else ops.scale(delta, self.residual_scale)

    def add(self, ops: Ops, x: Array, delta: Array) -> Array:
        """Add the mixer's output to the hidden states x, in place, and scale them at the end of a layer."""
        x = ops.add(x, self.finish(ops, delta))
        return x if self.layer_scale is None else ops.multiply(x, self.layer_scale)


def forward(ops: Ops, blocks: Sequence[BoundBlock], x: Array, rows: Rows) -> Array:
    """Run hidden states x (m, hidden) through the blocks, in place.

    Each block's output is added to x by the same operation that computes the next block's norm, or before x is scaled.
    """
    delta = None
    for block in blocks:
        delta = block.mixer.forward(ops, ops.add_norm(x, delta, block.norm), rows)
        x, delta = (x, block.finish(ops, delta)) if block.layer_scale is None else (block.add(ops, x, delta), None)
    return x if delta is None else ops.add(x, delta)


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Parameters of the embedding, which turns tokens into the first layer's input."""

    hidden_size: int
    position_offset: int  # rows skipped in a table of learned positions
    scale: float

    def forward(self, ops: Ops, parameters: Parameters, batch: Any) -> Array:
        """Return the hidden states (m, hidden) that the first layer reads."""
        learned = parameters.vector("positions")
        x = ops.embed(parameters.matrix("tokens"), batch, self.hidden_size, learned, self.position_offset)
        return x if self.scale == 1 else ops.scale(x, self.scale)


@dataclass(frozen=True, slots=True)
class LogitsSpec:
    """Parameters of the step that turns the head's product into logits."""

    scale: float
    cap: float  # limit of logits, applied by tanh; 0 for none

    def finish(self, ops: Ops, product: Array) -> Array:
        """Scale and cap the head's product, in place."""
        if self.scale != 1:
            product = ops.scale(product, self.scale)
        return ops.cap(product, self.cap) if self.cap else product
