"""Mixture of experts: a router chooses a few experts, which are FFNs, for each token, and their outputs are summed.

    output = sum over chosen experts e of weight_e down_e(act(gate_e(x)) * up_e(x)), + the shared expert's output

The router computes in fp32. A token's outputs are added one after the other in fp32, from the highest expert's to the
lowest one's, and the shared expert's last. So the sum has the same bits whichever device computes which experts, and
whatever the other tokens of the batch choose.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hetero_ee.layers.ops import (
    ACTIVE,
    INNER,
    OUTPUTS,
    ROUTES,
    SCALED,
    SHARED,
    Activation,
    Array,
    Experts,
    Mixer,
    MixerSpec,
    Norm,
    Ops,
    Parameters,
    Router,
    Rows,
)
from hetero_ee.layers.tensors import Tensors

SOFTMAX, SIGMOID, OF_CHOSEN = "softmax", "sigmoid", "softmax_of_chosen"
SCALES = "router_scale", "input_scale", "shared_scale"  # of the normed input of router, experts and shared expert
OUTPUT_NORMS = "output_norm", "shared_norm"  # of the sum of the experts' outputs, and of the shared expert's output


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Parameters of a router, which chooses experts and weights their outputs. Families differ only in these."""

    n_experts: int
    n_active: int  # experts per token
    scores: str = SOFTMAX  # SOFTMAX or SIGMOID: of all logits, before the choice; OF_CHOSEN: softmax of those chosen
    has_bias: bool = False  # added to the logits
    has_choice_bias: bool = False  # added to the scores for the choice only
    renormalizes: bool = False  # divides a token's weights by their sum plus `added`
    added: float = 0.0
    scale: float = 1.0  # of the weights
    has_factors: bool = False  # multiplies each expert's weight by a factor of its own
    groups: tuple[int, int, int] = (1, 1, 1)  # (n, chosen, best): a token's experts are in `chosen` of n equal groups,
    # those whose `best` (1 or 2) highest scores for the choice have the largest sums

    @property
    def weighting(self) -> dict[str, Any]:
        """How a token's choice and weights follow from its scores, as keyword arguments of the devices' routers."""
        return {"renormalizes": self.renormalizes, "scale": self.scale, "added": self.added, "groups": self.groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec(MixerSpec):
    """Parameters of one layer's mixture of experts."""

    name: ClassVar[str] = "moe"

    router: RouterSpec
    hidden_size: int
    size: int  # neurons of an expert
    activation: Activation
    bias: bool = False  # of the experts' matrices
    shared_size: int = 0  # neurons of an expert that every token uses; 0 for none
    shared_is_gated: bool = False  # multiplies the shared expert's output by sigmoid(shared_gate x)
    inner_norm_eps: float | None = None  # of OUTPUT_NORMS in layers with these and SCALES; None for other layers

    @property
    def has_norm_scale(self) -> bool:
        return self.inner_norm_eps is None

    @property
    def first(self) -> str:
        """Short name of the experts' first matrix."""
        return "gate_up" if self.activation.gated else "up"

    @property
    def expert_matrices(self) -> tuple[str, str]:
        """Short names of the matrices that hold all experts, one after the other."""
        return self.first, "down"

    @property
    def expert_rows(self) -> int:
        """Rows of an expert in the first matrix."""
        return self.size * (2 if self.activation.gated else 1)

    @property
    def active_size(self) -> int:
        """Number of neurons that a token uses."""
        return self.router.n_active * self.size + self.shared_size

    @property
    def buffers(self) -> dict[str, int]:
        n_active, widths = self.router.n_active, self.expert_rows // self.size
        inner = max(n_active * self.size, self.shared_size)
        own = {INNER: widths * inner, ACTIVE: inner, ROUTES: 2 * n_active, OUTPUTS: n_active * self.hidden_size}
        own |= {} if self.has_norm_scale else {SCALED: self.hidden_size}
        return own | ({SHARED: self.hidden_size} if self.shared_size else {})

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare the router, the experts' matrices and those of the shared expert.

        An expert's rows in gate_up are those of its gate and then of its up. Its rows in down follow those of the
        expert before it, too.
        """
        n_experts = self.router.n_experts
        tensors.vector("router", n_experts, hidden_size)
        if self.router.has_bias:
            tensors.vector("router_bias", n_experts)
        if self.router.has_choice_bias:
            tensors.vector("choice_bias", n_experts)
        if self.router.has_factors:
            tensors.vector("factors", n_experts)
        for short in () if self.has_norm_scale else SCALES + OUTPUT_NORMS:
            tensors.vector(short, hidden_size)
        tensors.matrix(self.first, n_experts * self.expert_rows, hidden_size, bias=self.bias)
        tensors.matrix("down", n_experts * hidden_size, self.size, bias=self.bias)
        if self.shared_size:
            tensors.matrix(f"shared_{self.first}", self.shared_size * self.expert_rows // self.size, hidden_size)
            tensors.matrix("shared_down", hidden_size, self.shared_size)
        if self.shared_is_gated:
            tensors.vector("shared_gate", 1, hidden_size)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> "Moe":
        return Moe(self, parameters)


class Moe(Mixer):
    """One layer's mixture of experts with its parameters on a device."""

    def __init__(self, spec: MoeSpec, parameters: Parameters) -> None:
        router_scale, self._input_scale, self._shared_scale = map(parameters.vector, SCALES)
        norms = (parameters.vector(short) for short in OUTPUT_NORMS)
        eps = spec.inner_norm_eps or 0.0
        self._norm, self._shared_norm = (None if each is None else Norm("rms", each, None, eps) for each in norms)
        weights = parameters.vector("router")
        if router_scale is not None:
            weights = weights * (router_scale * spec.hidden_size**-0.5)
        others = (parameters.vector(short) for short in ("router_bias", "choice_bias", "factors"))
        self.router = Router(spec.router, weights, *others)
        matrices = parameters.matrix(spec.first), parameters.matrix("down")
        self.experts = Experts(*matrices, spec.activation, spec.expert_rows, spec.hidden_size, spec.router.n_experts)
        self._shared = self._shared_gate = None
        if spec.shared_size:
            self._shared = parameters.matrix(f"shared_{spec.first}"), parameters.matrix("shared_down")
            self._shared_gate = parameters.vector("shared_gate")

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        routes = ops.route(x, self.router)
        return self.end(ops, ops.expert_sums(self.inputs(ops, x), routes, self.experts, None), self.shared(ops, x))

    def inputs(self, ops: Ops, x: Array) -> Array:
        """Return what the experts read of the normed x."""
        return _scaled(ops, x, self._input_scale)

    @property
    def has_shared(self) -> bool:
        return self._shared is not None

    def shared(self, ops: Ops, x: Array) -> Array | None:
        """Return the shared expert's output (m, hidden), or None for a layer without one."""
        if self._shared is None:
            return None
        first, down = self._shared
        x = _scaled(ops, x, self._shared_scale)
        output = ops.linear(ops.activate(ops.linear(x, first, INNER), self.experts.activation), down, SHARED)
        output = output if self._shared_gate is None else ops.gate_rows(output, x, self._shared_gate)
        return output if self._shared_norm is None else ops.norm_in_place(output, self._shared_norm)

    def part(self, ops: Ops, chosen: slice) -> Experts:
        """Return some consecutive experts, for a device that computes only these."""
        all_of_them = self.experts
        first, end, _ = chosen.indices(all_of_them.n)
        sizes = all_of_them.n_first_rows, all_of_them.n_down_rows
        rows = (slice(first * size, end * size) for size in sizes)
        matrices = map(ops.part, (all_of_them.first, all_of_them.down), rows)
        names = zip(("first", "down"), matrices, strict=True)
        return replace(all_of_them, n=end - first, start=first, **dict(names))

    def end(self, ops: Ops, summed: Array, shared: Array | None) -> Array:
        """Add the shared expert's output to the sum of all others', which may have a norm."""
        summed = summed if self._norm is None else ops.norm_in_place(summed, self._norm)
        return summed if shared is None else ops.add(summed, shared)


def _scaled(ops: Ops, x: Array, scale: Array | None) -> Array:
    return x if scale is None else ops.scaled(x, scale, SCALED)
