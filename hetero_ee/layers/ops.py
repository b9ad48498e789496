"""Define the operations that layers need from a device.

Arrays are the device's own: torch tensors, NumPy arrays or tensors on a GPU. Rows are tokens: (m, features), fp32. An
operation returns its result. "In place" means that it may change its first argument and return that. `into` names the
buffer that a device with fixed buffers writes the result to; two results with one name are never needed at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hetero_ee.layers.state import State
from hetero_ee.layers.tensors import Tensors

Array = Any
Matrix = Any  # a weight and its bias as the device multiplies with it
LookUp = Callable[[Any], tuple[Array, Array]]  # from a batch to Rows.inputs
Heads = Any  # a layer's attention as the device computes it, and the place of its keys and values

# Buffers of a pass.
NORMED, QKV, ATTENDED, INNER, ACTIVE, DELTA, LOGITS = "normed", "qkv", "attended", "inner", "active", "delta", "logits"
PRODUCT = "product"  # of a matrix whose result is copied into another buffer
GATES, MIXED = "gates", "mixed"
ROUTES, OUTPUTS, SHARED = "routes", "outputs", "shared"  # of a router, its experts, and the expert of all tokens
SCALED = "scaled"  # input of experts with scales of their own
MULTIPLIED = (ATTENDED, ACTIVE)  # a mixer's buffers that are the input of a matrix product
CLAMPED_SILU = "clamped_silu"  # an activation that limits its second factor, too


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation function between an FFN's matrices."""

    kind: str  # "silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu" or "clamped_silu", see activate.py
    threshold: float  # below it, "fatrelu" is 0; limit of the inputs of "clamped_silu"
    gated: bool  # the FFN is down(act(gate(x)) * up(x)), else down(act(up(x)))


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

    For a split FFN, `chosen` selects this device's neurons, and the GPU has the first `section` sections.
    """

    up: Matrix | None  # a row per neuron; None without a gate
    down: Matrix  # a row per neuron
    least: Array | None  # (n_chosen,): smaller activations do not count
    chosen: slice | None = None
    section: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A layer's router with its parameters on a device."""

    spec: Any  # RouterSpec
    weights: Array  # (n_experts, hidden)
    bias: Array | None  # (n_experts,), added to the logits
    choice_bias: Array | None  # (n_experts,), added to the scores for the choice only
    factors: Array | None = None  # (n_experts,), of the weights


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A layer's experts, or consecutive ones of them, on a device."""

    first: Matrix  # gate_up or up of all these experts
    down: Matrix
    activation: Activation
    n_first_rows: int  # rows of one expert in `first`
    n_down_rows: int  # and in `down`
    n: int  # number of experts
    start: int = 0  # index of the first one in the layer


class Parameters(Protocol):
    """Access to one block's parameters on a device, by the block's own short names."""

    def matrix(self, short: str) -> Matrix: ...

    def vector(self, short: str) -> Array | None:
        """Return a vector, None if the block has none with this name."""
        ...

    def least(self) -> Array | None:
        """Return the activations below which neurons of a sparse FFN count as inactive, None if only those at 0 do."""
        ...


class Rows(Protocol):
    """The tokens of one pass, in the form that a device's operations need."""

    @property
    def some_may_skip(self) -> bool:
        """Whether any of the tokens may skip neurons."""
        ...

    @property
    def inputs(self) -> tuple[Array, Array]:
        """The tokens' embeddings (m, hidden) and rows of the layers' table, for mixers that read tokens."""
        ...


class Mixer(ABC):
    """An attention, an FFN or another part of a layer, with its parameters on a device."""

    has_state = False  # whether the mixer reads and writes a cache
    reads_tokens = False  # whether it reads Rows.inputs
    n_neurons = 0  # number of neurons, if some may be skipped

    @abstractmethod
    def forward(self, ops: "Ops", x: Array, rows: Rows) -> Array:
        """Return the output, to be added to the hidden states, for their norm x (m, hidden)."""


class MixerSpec(ABC):
    """Base of the parameters that describe one layer's mixer."""

    name: ClassVar[str]  # name of the mixer's block in a layer
    reads_norm: ClassVar[bool] = True  # whether its input is the hidden states' norm, in families with norms before

    @property
    def has_norm_scale(self) -> bool:
        """Whether the norm of its input has a scale, in families whose norms have one."""
        return True

    @property
    def state(self) -> State | None:
        """State that a cache keeps of each sequence for the mixer, None if there is none."""
        return None

    @property
    def buffers(self) -> dict[str, int]:
        """Features per token of each buffer that the mixer needs in addition to NORMED and DELTA."""
        return {}

    def row_sizes(self, short: str) -> tuple[int, ...]:
        """Return the numbers of rows that are stacked in a matrix; empty if it is one matrix or equal parts."""
        return ()

    def picked_rows(self, short: str) -> Sequence[tuple[int, Sequence[int]]]:
        """Return which rows of a checkpoint's tensor are stacked in a matrix, if one tensor holds more than the matrix.

        Returns:
            For each stacked part, the number of rows of a group and those of each group that belong to the part.
        """
        return ()

    @abstractmethod
    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare the mixer's parameters, in the order in which a store holds them."""

    @abstractmethod
    def bind(self, ops: "Ops", parameters: "Parameters", layer: int, cache: Any) -> Mixer:
        """Create the layer's mixer from its parameters on a device and the cache that keeps its state."""


class Ops(Protocol):
    """Interface of the operations that a device provides to layers."""

    def matrix(self, name: str, weight: Any, bias: Array | None) -> Matrix:
        """Prepare a weight for linear(), masked_linear() or Neurons.

        Raises:
            TypeError: if the device cannot multiply with a weight of this type.
        """
        ...

    def vector(self, vector: Any) -> Array: ...

    def part(self, matrix: Matrix, rows: slice) -> Matrix:
        """Return some rows of a prepared matrix and of its bias."""
        ...

    def heads(
        self,
        spec: Any,
        layer: int,
        cache: Any,
        query_norm: Norm | None,
        key_norm: Norm | None,
        sinks: Array | None = None,
    ) -> Heads:
        """Prepare a layer's attention.

        Args:
            spec: its AttentionSpec.
            cache: holds its keys and values.
            sinks: a score per head (n_heads,) that takes part in the softmax and has no value.
        """
        ...

    def empty(self, m: int, width: int, into: str) -> Array:
        """Return rows (m, width) to write to, contiguous, with any values."""
        ...

    def embed(self, tokens: Matrix, batch: Any, n_features: int, learned: Array | None, offset: int) -> Array:
        """Look up the tokens' rows. Unless None, `learned` has a row to add for each position + offset."""
        ...

    def add_norm(self, x: Array, delta: Array | None, norm: Norm | None) -> Array:
        """Add delta, unless None, to x in place, and return the norm of x, or x if `norm` is None."""
        ...

    def norm_in_place(self, x: Array, norm: Norm) -> Array: ...

    def scale(self, x: Array, factor: float) -> Array:
        """Multiply x by a number, in place."""
        ...

    def multiply(self, x: Array, y: Array) -> Array:
        """Multiply x (m, features) by y (m, features) or (1,), in place."""
        ...

    def scaled(self, x: Array, scale: Array, into: str) -> Array:
        """Return each row of x (m, features) multiplied by scale (features,)."""
        ...

    def add(self, x: Array, y: Array) -> Array:
        """Add y (m, features) or (features,) to x, in place."""
        ...

    def linear(self, x: Array, matrix: Matrix, into: str) -> Array:
        """Return x W^T + bias: (m, K) -> (m, N)."""
        ...

    def linear_by_head(self, x: Array, matrix: Matrix, n_heads: int, into: str) -> Array:
        """Multiply each head's features by that head's rows of a matrix: (m, n_heads K) -> (m, n_heads N).

        The heads' rows (N, K), N a multiple of 16, follow each other in the matrix, as those of experts do.
        """
        ...

    def concatenate(self, parts: list[Array]) -> Array:
        """Concatenate each row's features."""
        ...

    def append_copy(self, x: Array, first: int, into: str) -> Array:
        """Append to each row a copy of its features from `first` on: (m, N) -> (m, 2 N - first)."""
        ...

    def activate(self, x: Array, activation: Activation) -> Array:
        """Return act(x): (m, F) -> (m, F), or, with a gate, act(first half) * second half: (m, 2F) -> (m, F)."""
        ...

    def cap(self, x: Array, cap: float) -> Array:
        """Limit x to values between -cap and cap, by cap * tanh(x / cap), in place."""
        ...

    def write_kv(self, qkv: Array, heads: Heads, rows: Any) -> Array:
        """Norm and rotate queries, keys and values (m, queries + keys + values), in place, and store keys and values.

        If the layer reads the keys and values of another one, there are only queries (m, queries).

        Returns the queries in the form that attend() needs with the same heads.
        """
        ...

    def attend(self, queries: Array, heads: Heads, rows: Any) -> Array:
        """Let each token attend to its own sequence, up to itself: (m, queries)."""
        ...

    def gate(self, x: Array, gates: Array) -> Array:
        """Multiply x (m, features) by sigmoid(gates), in place."""
        ...

    def route(self, x: Array, router: Router) -> Array:
        """Choose experts for each token of x (m, hidden). The lower one of two experts with equal scores is chosen.

        Returns:
            (m, 2 n_active): the indices of each token's experts, from the highest to the lowest, then their weights.
        """
        ...

    def expert_sums(self, x: Array, routes: Array, experts: Experts, sums: Array | None) -> Array:
        """Sum the weighted outputs of the chosen ones of these experts: (m, hidden).

        Args:
            sums: sums of higher experts' outputs, to which these are added, from the highest to the lowest; None for 0.
        """
        ...

    def gate_rows(self, x: Array, inputs: Array, weights: Array) -> Array:
        """Multiply each row of x (m, features) by sigmoid(weights inputs), in place. weights: (1, hidden)."""
        ...

    def delta_rule(self, spec: Any, layer: int, cache: Any, vectors: tuple[Array, Array, Array], norm: Norm) -> Any:
        """Prepare a layer's gated delta rule.

        Args:
            spec: its GatedDeltaSpec.
            cache: holds its state.
            vectors: weights of the convolution (channels, kernel), a_log and dt_bias (n_value_heads,).
            norm: of each value head's output.
        """
        ...

    def gated_delta(self, inputs: Array, gates: Array, rule: Any, rows: Any) -> Array:
        """Apply the gated delta rule and update its state.

        Args:
            inputs: (m, queries + keys + values + output gates).
            gates: (m, 2 n_value_heads), the inputs of beta and of decay.

        Returns:
            Normed and gated outputs (m, n_value_heads * value_dim).
        """
        ...

    def mamba_rule(self, spec: Any, layer: int, cache: Any, vectors: tuple[Array, ...], norm: Norm) -> Any:
        """Prepare a layer's Mamba-2.

        Args:
            spec: its MambaSpec.
            cache: holds its state.
            vectors: weights of the convolution (channels, kernel), a_log, dt_bias, skips (n_value_heads,), and the
                convolution's bias (channels,) or None.
            norm: of the outputs, in groups.
        """
        ...

    def mamba(self, inputs: Array, rule: Any, rows: Any) -> Array:
        """Apply Mamba-2 and update its state: (m, C + B + x + gates + time steps) -> (m, n_value_heads * value_dim)."""
        ...

    def conv(self, layer: int, cache: Any, weights: Array) -> Any:
        """Prepare a layer's short convolution: weights (channels, kernel), and the cache with its last inputs."""
        ...

    def short_conv(self, inputs: Array, conv: Any, rows: Any) -> Array:
        """Return c * conv(b * x) (m, channels) for inputs [b | c | x] (m, 3 channels), and keep b * x."""
        ...

    def masked_linear(self, x: Array, matrix: Matrix, scores: Array | None, rows: Any) -> Array:
        """Return x W^T + bias, with 0 for neurons that a token may skip and whose score is not above 0.

        Scores are (m, N), None to skip nothing. A matrix with fewer rows uses the first scores.
        """
        ...

    def sparse_ffn(self, x: Array, active: Array, neurons: Neurons, scores: Array | None, rows: Any) -> Array:
        """Sum neurons' rows of down, each times its activation and, with a gate, its product with up: (m, K).

        Activations are (m, n_neurons), 0 for inactive neurons. Also counts the neurons used and, by scores, those
        predicted.
        """
        ...

    def first_sections(self, x: Array, active: Array, neurons: Neurons, scores: Array | None, rows: Any) -> Array:
        """Begin the sum of a split FFN with its first sections, and return what fold_sections() needs of them."""
        ...

    def rest_sections(self, x: Array, active: Array, neurons: Neurons, scores: Array | None, rows: Any) -> Array:
        """Sum the sections of a split FFN from neurons.section on: (m, K)."""
        ...

    def fold_sections(self, x: Array, sums: Array, rest: Array, neurons: Neurons) -> Array:
        """Add the first sections to the sum of the others, in the same order as in an FFN that is not split: (m, K)."""
        ...

    def sliced_head(self, x: Array, matrix: Matrix, token_ids: Any) -> Array:
        """Return the logits of chosen tokens, different ones for each row: (m, hidden), (m, k) -> (m, k)."""
        ...
