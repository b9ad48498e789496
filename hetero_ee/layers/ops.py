"""Ops: what layers ask of a device.

Arrays are of the device: torch tensors, NumPy arrays or tensors on a GPU. Rows are tokens: (m, features), fp32. A
verb returns its result; where it says "in place" it may change its first argument and return that. `into` names the
buffer that a device with fixed buffers writes the result to: two results under one name are never needed at once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hetero_ee.layers.state import State
from hetero_ee.layers.tensors import Tensors

Array = Any
Matrix = Any  # a weight and its bias as the device multiplies with it
Heads = Any  # a layer's attention as the device computes it, and the place of its keys and values

# Buffers of a pass.
NORMED, QKV, ATTENDED, INNER, ACTIVE, DELTA, LOGITS = "normed", "qkv", "attended", "inner", "active", "delta", "logits"
MULTIPLIED = (ATTENDED, ACTIVE)  # those of a mixer that a matrix is multiplied with


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm ("rms") or LayerNorm ("layer") with its parameters on a device."""

    kind: str
    scale: Array | None  # (features,)
    bias: Array | None
    eps: float


@dataclass(frozen=True, slots=True)
class Neurons:
    """The neurons of a sparse FFN that one device sums up.

    For a split FFN, `chosen` are the neurons of this device, and the first `section` sections are the GPU's.
    """

    up: Matrix | None  # a row per neuron; None without a gate
    down: Matrix  # a row per neuron
    least: Array | None  # (n_chosen,): smaller activations do not count
    chosen: slice | None = None
    section: int = 0


class Parameters(Protocol):
    """The parameters of one block on a device, by the block's own short names."""

    def matrix(self, short: str) -> Matrix: ...

    def vector(self, short: str) -> Array | None:
        """Return the vector, None if the block has none of that name."""
        ...

    def least(self) -> Array | None:
        """Return the activations below which the neurons of a sparse FFN do not count, None if all but 0 count."""
        ...


class Rows(Protocol):
    """The tokens of one pass as a device's operations take them."""

    @property
    def some_may_skip(self) -> bool:
        """Whether neurons may be left out for any of the tokens."""
        ...


class Mixer(ABC):
    """An attention, FFN or another part of a layer, with its parameters on a device."""

    has_state = False  # whether it reads and writes what a cache keeps of each sequence
    n_neurons = 0  # of which some may be skipped

    @abstractmethod
    def forward(self, ops: "Ops", x: Array, rows: Rows) -> Array:
        """Return what to add to the hidden states whose norm is x (m, hidden)."""


class MixerSpec(ABC):
    """The numbers that define a mixer of one layer, and what follows from them."""

    name: ClassVar[str]  # of its block in a layer

    @property
    def state(self) -> State | None:
        """Return what a cache keeps of each sequence for the mixer, None if nothing."""
        return None

    @property
    def buffers(self) -> dict[str, int]:
        """Return the features per token of the buffers that the mixer needs besides NORMED and DELTA."""
        return {}

    @abstractmethod
    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare the parameters in the order in which they are stored."""

    @abstractmethod
    def bind(self, ops: "Ops", parameters: "Parameters", layer: int, cache: Any) -> Mixer:
        """Bind the mixer of a layer to its parameters on a device, and to the cache that keeps its state."""


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between an FFN's matrices."""

    kind: str  # "silu", "gelu", "gelu_tanh", "relu" or "fatrelu"
    threshold: float  # below it, "fatrelu" is 0
    gated: bool  # the FFN is down(act(gate(x)) * up(x)), else down(act(up(x)))


class Ops(Protocol):
    """The operations of one device."""

    def matrix(self, name: str, weight: Any, bias: Array | None) -> Matrix:
        """Prepare a weight for linear(), masked_linear() or Neurons.

        Raises:
            TypeError: if the device cannot multiply with a weight of this kind.
        """
        ...

    def vector(self, vector: Any) -> Array: ...

    def part(self, matrix: Matrix, rows: slice) -> Matrix:
        """Return some rows of a prepared matrix, with their part of its bias."""
        ...

    def heads(self, spec: Any, layer: int, cache: Any, query_norm: Norm | None, key_norm: Norm | None) -> Heads:
        """Prepare the attention of a layer (an AttentionSpec), whose keys and values are in this cache."""
        ...

    def embed(self, tokens: Matrix, batch: Any, n_features: int, learned: Array | None, offset: int) -> Array:
        """Look up the tokens; `learned` has a row to add for each position + offset, unless None."""
        ...

    def add_norm(self, x: Array, delta: Array | None, norm: Norm | None) -> Array:
        """Add delta to x in place, unless it is None, and return the norm of x, or x if norm is None."""
        ...

    def norm_in_place(self, x: Array, norm: Norm) -> Array: ...

    def scale(self, x: Array, factor: float) -> Array:
        """Multiply x by a number, in place."""
        ...

    def add(self, x: Array, y: Array) -> Array:
        """Add y (m, features) or (features,) to x, in place."""
        ...

    def linear(self, x: Array, matrix: Matrix, into: str) -> Array:
        """Return x W^T + bias: (m, K) -> (m, N)."""
        ...

    def concatenate(self, parts: list[Array]) -> Array:
        """Join the features of each row."""
        ...

    def activate(self, x: Array, activation: Activation) -> Array:
        """Return act(x): (m, F) -> (m, F), or, with a gate, act(first half) * second half: (m, 2F) -> (m, F)."""
        ...

    def cap(self, x: Array, cap: float) -> Array:
        """Return cap * tanh(x / cap), in place."""
        ...

    def write_kv(self, qkv: Array, heads: Heads, rows: Any) -> Array:
        """Norm and rotate queries and keys (m, queries + keys + values), store keys and values, return the queries.

        In place. What is returned is for attend() with the same heads.
        """
        ...

    def attend(self, queries: Array, heads: Heads, rows: Any) -> Array:
        """Attend each token to its own sequence up to itself: (m, queries)."""
        ...

    def masked_linear(self, x: Array, matrix: Matrix, scores: Array | None, rows: Any) -> Array:
        """Return x W^T + bias, 0 where a neuron may be skipped and its score is not above 0.

        scores: (m, N), of which the first belong to a matrix of fewer rows; None skips nothing.
        """
        ...

    def sparse_ffn(self, x: Array, active: Array, neurons: Neurons, scores: Array | None, rows: Any) -> Array:
        """Sum the rows of down over the active neurons, each times its activation and, with a gate, its up: (m, K).

        active: (m, n_neurons). Counts the neurons used and, by their scores, those predicted.
        """
        ...

    def first_sections(self, x: Array, active: Array, neurons: Neurons, scores: Array | None, rows: Any) -> Array:
        """Begin a split FFN's sum with its first sections: return what fold_sections() takes of them."""
        ...

    def rest_sections(self, x: Array, active: Array, neurons: Neurons, scores: Array | None, rows: Any) -> Array:
        """Sum the sections from neurons.section on: (m, K)."""
        ...

    def fold_sections(self, x: Array, sums: Array, rest: Array, neurons: Neurons) -> Array:
        """Add the first sections to the sum of the rest, in the order of an FFN that is not split: (m, K)."""
        ...

    def sliced_head(self, x: Array, matrix: Matrix, token_ids: Any) -> Array:
        """Return the product for chosen tokens, each row its own: (m, hidden), (m, k) -> (m, k)."""
        ...
