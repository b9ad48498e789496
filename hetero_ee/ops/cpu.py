"""The CPU's operations: Numba kernels on NumPy arrays, weights in their stored form, one thread pool for all."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.recurrent import RecurrentCache
from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.delta import GatedDeltaSpec
from hetero_ee.layers.mamba import MambaSpec
from hetero_ee.layers.ops import Activation, Experts, LookUp, Neurons, Norm, Ops, Router
from hetero_ee.layers.rope import RopeSpec
from hetero_ee.ops.cpu_rows import CpuRows, cache_shape
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.ops.torch_delta import TorchConv
from hetero_ee.ops.torch_ops import query_factors
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.tiles import TILE_ROWS
from hetero_ee.weights.weight import TileWeight
from hetero_ee_cpu_ops.activate import activate, gate
from hetero_ee_cpu_ops.attention.attention import NO_SINKS, Attention
from hetero_ee_cpu_ops.attention.kv_write import KvWrite
from hetero_ee_cpu_ops.attention.rope import Rope
from hetero_ee_cpu_ops.delta import DeltaRule, DeltaSequence
from hetero_ee_cpu_ops.embed import embed_int4, embed_int8
from hetero_ee_cpu_ops.expert_ffn import ExpertFfn
from hetero_ee_cpu_ops.expert_pairs import Pairs, pairs_of
from hetero_ee_cpu_ops.grouped_matmul import ExpertMatrix, GroupedMatmul
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.mamba import Mamba2
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.neurons.masked_linear import MaskedLinear
from hetero_ee_cpu_ops.neurons.rows import RowMatrix
from hetero_ee_cpu_ops.neurons.sparse_ffn import SparseFfn
from hetero_ee_cpu_ops.norm import layer_norm, rms_norm, rms_norm_heads
from hetero_ee_cpu_ops.read_ahead import read_ahead
from hetero_ee_cpu_ops.route import RouterRule, gate_rows, route


@dataclass(frozen=True, slots=True)
class CpuMatrix:
    """A matrix in tiles, or in rows of neurons, in the form that the kernels need."""

    weight: TileWeight | RowWeight
    tiles: Any  # TileMatrix, or None
    rows: Any  # RowMatrix, or None
    bias: Any  # fp32 (n_rows,) or None
    n_rows: int
    first_row: int = 0  # first row that is read, a multiple of 16


@dataclass(frozen=True, slots=True)
class CpuHeads:
    """One layer's attention, and the location of its keys and values in the cache."""

    spec: AttentionSpec
    cache: CpuKvCache
    place: int
    write: KvWrite
    attention: Attention
    rope: Rope | None
    norms: list[tuple[Any, int, int]]  # see AttentionSpec.norms
    sinks: Any  # fp32 (n_heads,), empty for none


@dataclass(frozen=True, slots=True)
class CpuDelta:
    """One layer's gated delta rule, and the cache with its state."""

    rule: DeltaRule
    cache: RecurrentCache
    layer: int

    def run(self, inputs: Any, gates: Any, rows: CpuRows) -> Any:
        """See Ops.gated_delta."""
        sequences, layer, index = [], self.layer, self.cache.index(self.layer)
        for sequence, mine in rows.by_sequence.items():
            first = rows.batch.positions[mine[0]]
            *parts, _ = self.cache.storage(sequence).parts
            span = self.cache.begin(layer, sequence, first, len(mine))
            sequences.append(DeltaSequence(mine, first, *span, *(part[index].numpy() for part in parts)))
        out = self.rule.run(inputs, gates, sequences)
        for sequence, each in zip(rows.by_sequence, sequences, strict=True):
            self.cache.moved(layer, sequence, each.new_base)
        return out


class CpuOps(Ops):
    """The CPU's operations, which share `pool`. Hidden states are fp32 (m, features), contiguous.

    Args:
        reads_ahead: requests experts from the disk once they are chosen, for weights that don't fit in RAM. This
            includes experts that the plan keeps in RAM, since the system may have evicted their pages.
    """

    def __init__(self, pool: ThreadPool, *, reads_ahead: bool = False) -> None:
        self.pool, self._reads_ahead = pool, reads_ahead
        self._matmul = Matmul(pool)
        self._grouped_matmul = GroupedMatmul(pool)
        self._expert_ffns: dict[Experts, ExpertFfn] = {}
        self._sparse_ffn, self._masked_linear = SparseFfn(pool), MaskedLinear(pool)
        self._rules: dict[Router, RouterRule] = {}
        self._ropes: dict[tuple[RopeSpec, int], Rope] = {}
        self._attentions: dict[tuple[Any, ...], tuple[KvWrite, Attention]] = {}

    def compile(self, kind: Any) -> None:
        """Compile the product with tiles of this kind, or load the compiled product from the disk."""
        self._matmul.functions(kind)

    def matrix(self, name: str, weight: Any, bias: Any) -> CpuMatrix:
        if isinstance(weight, RowWeight):
            rows = RowMatrix(
                weight.codes.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook, weight.n_columns
            )
            return CpuMatrix(weight, None, rows, bias, weight.shape[0])
        if not isinstance(weight, TileWeight):
            raise TypeError(f"{name} is {type(weight).__name__}, the CPU kernels multiply tiles.")
        tiles = TileMatrix(
            weight.tiles.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook, weight.n_terms
        )
        return CpuMatrix(weight, tiles, None, bias, weight.n_rows)

    def vector(self, vector: Tensor) -> Any:
        return vector.numpy()

    def part(self, matrix: CpuMatrix, rows: slice) -> CpuMatrix:
        first, end, _ = rows.indices(matrix.n_rows)
        bias, weight = None if matrix.bias is None else matrix.bias[rows], matrix.weight
        if isinstance(weight, RowWeight):
            return self.matrix("rows", replace(weight, codes=weight.codes[rows], scales=weight.scales[rows]), bias)
        return replace(matrix, bias=bias, n_rows=end - first, first_row=matrix.first_row + first)

    def heads(
        self,
        spec: AttentionSpec,
        layer: int,
        cache: CpuKvCache,
        query_norm: Norm | None,
        key_norm: Norm | None,
        sinks: Any = None,
    ) -> CpuHeads:
        rope = None if spec.rope is None else self._rope(spec.rope, cache.max_tokens)
        norms = spec.norms(query_norm, key_norm, np.ones(spec.head_dim, np.float32))
        kernels, sinks = self._attention(spec, cache), NO_SINKS if sinks is None else sinks
        return CpuHeads(spec, cache, cache.index(layer), *kernels, rope, norms, sinks)

    def rows(self, batch: Batch, counts: NeuronCounts, look_up: LookUp | None = None) -> CpuRows:
        """Convert a batch for the operations. Neurons are counted in `counts`. look_up: returns Rows.inputs."""
        return CpuRows(batch, counts, np.array(batch.positions, np.int64), bool(batch.may_skip().any()), look_up)

    def array(self, x: Tensor) -> Any:
        """Return a NumPy copy, which operations may change in place."""
        return np.array(x.numpy(), order="C")

    def view(self, x: Tensor) -> Any:
        """Return a NumPy array that shares the tensor's memory, if the tensor is contiguous."""
        return np.ascontiguousarray(x.numpy())

    def tensor(self, x: Any) -> Tensor:
        return torch.from_numpy(x)

    def empty(self, m: int, width: int, into: str) -> Any:
        return np.empty((m, width), np.float32)

    def embed(self, tokens: CpuMatrix, batch: Batch, n_features: int, learned: Any, offset: int) -> Any:
        weight, ids = tokens.weight, np.array(batch.token_ids, np.int64)
        assert isinstance(weight, TileWeight)
        tiles, scales = weight.tiles.numpy(), weight.scales.numpy().view(np.uint16)
        if weight.codebook is None:
            x = embed_int8(tiles, scales, 2.0**weight.exponent, weight.shape, ids)
        else:
            codebook = np.array(weight.codebook, np.int8)
            x = embed_int4(tiles, scales, 2.0**weight.exponent, codebook, weight.shape, ids)
        if learned is not None:
            x += learned[np.array(batch.positions) + offset]
        return x

    def add_norm(self, x: Any, delta: Any, norm: Norm | None) -> Any:
        if norm is None:
            if delta is not None:
                x += delta
            return x
        if norm.kind == "layer":
            return layer_norm(x, norm.scale, norm.bias, norm.eps, delta=delta)
        return rms_norm(x, norm.scale, norm.eps, delta=delta)

    def norm_in_place(self, x: Any, norm: Norm) -> Any:
        if norm.kind == "layer":
            return layer_norm(x, norm.scale, norm.bias, norm.eps, out=x)
        return rms_norm(x, norm.scale, norm.eps, out=x)

    def scale(self, x: Any, factor: float) -> Any:
        x *= np.float32(factor)
        return x

    def multiply(self, x: Any, y: Any) -> Any:
        x *= y
        return x

    def scaled(self, x: Any, scale: Any, into: str) -> Any:
        return x * scale

    def add(self, x: Any, y: Any) -> Any:
        x += y
        return x

    def linear(self, x: Any, matrix: CpuMatrix, into: str) -> Any:
        tiles, n_rows = matrix.tiles, matrix.n_rows
        is_whole = n_rows == matrix.weight.shape[0]
        product = self._matmul(x, tiles) if is_whole else self._matmul.rows(x, tiles, matrix.first_row, n_rows)
        if product.shape[1] != n_rows:
            product = np.ascontiguousarray(product[:, :n_rows])
        if matrix.bias is not None:
            product += matrix.bias
        return product

    def linear_by_head(self, x: Any, matrix: CpuMatrix, n_heads: int, into: str) -> Any:
        m, n_rows = len(x), matrix.n_rows // n_heads
        pairs = Pairs(np.arange(n_heads), m * np.arange(n_heads + 1), np.arange(m * n_heads), np.zeros((0, 0)))
        by_head = x.reshape(m, n_heads, -1).swapaxes(0, 1).reshape(m * n_heads, -1)
        by_head, heads = np.ascontiguousarray(by_head), self._expert_matrix(matrix, n_rows, n_heads)
        product = self._grouped_matmul(by_head, heads, pairs, gather=False)
        return product.reshape(n_heads, m, n_rows).swapaxes(0, 1).reshape(m, -1)

    def concatenate(self, parts: list[Any]) -> Any:
        return np.hstack(parts)

    def append_copy(self, x: Any, first: int, into: str) -> Any:
        return np.hstack([x, x[:, first:]])

    def activate(self, x: Any, activation: Activation) -> Any:
        kind, threshold = activation.kind, activation.threshold
        return activate(x, kind, gated=activation.gated, threshold=threshold, pool=self.pool)

    def cap(self, x: Any, cap: float) -> Any:
        return activate(x, "softcap", x, gated=False, threshold=cap, pool=self.pool)

    def write_kv(self, qkv: Any, heads: CpuHeads, rows: CpuRows) -> Any:
        spec, is_own = heads.spec, heads.spec.kv_layer is None
        for scale, first, n_heads in heads.norms:
            rms_norm_heads(qkv, scale, spec.norm_eps, first, n_heads)
        if heads.rope is not None:
            n_rotating = spec.n_heads + (spec.n_kv_heads if is_own else 0)
            heads.rope.rotate(qkv, rows.positions, 0, n_rotating, spec.head_dim)
        if is_own:
            heads.write.write(qkv, rows.places(heads.cache), heads.place, spec.query_size, spec.first_value)
        if spec.query_growth is not None:
            qkv[:, : spec.query_size] *= query_factors(spec.query_growth, rows.positions)[:, None]
        return qkv

    def attend(self, queries: Any, heads: CpuHeads, rows: CpuRows) -> Any:
        spec, table = heads.spec, rows.places(heads.cache)
        return heads.attention.attend(queries, table, heads.place, spec.window, sinks=heads.sinks)

    def gate(self, x: Any, gates: Any) -> Any:
        return gate(x, gates)

    def route(self, x: Any, router: Router) -> Any:
        rule = self._rules.get(router)
        if rule is None:
            spec, vectors = router.spec, (router.bias, router.choice_bias, router.factors)
            rule = RouterRule(router.weights, vectors, spec.n_active, spec.scores, **spec.weighting)
            self._rules[router] = rule
        return route(x, rule, self.pool)

    def expert_sums(self, x: Any, routes: Any, experts: Experts, sums: Any) -> Any:
        if self._reads_ahead:
            _read_experts_ahead(pairs_of(routes, experts.start, experts.n), experts)
        ffn = self._expert_ffns.get(experts)
        if ffn is None:
            first = self._expert_matrix(experts.first, experts.n_first_rows, experts.n)
            down, kind = self._expert_matrix(experts.down, experts.n_down_rows, experts.n), experts.activation
            ffn = ExpertFfn(
                self.pool, first, down, experts.start, kind.kind, gated=kind.gated, threshold=kind.threshold
            )
            self._expert_ffns[experts] = ffn
        return ffn(x, routes, sums)

    def _expert_matrix(self, matrix: CpuMatrix, n_rows: int, n_experts: int) -> ExpertMatrix:
        return ExpertMatrix(self._matmul, matrix.tiles, matrix.first_row, n_rows, n_experts, matrix.bias)

    def gate_rows(self, x: Any, inputs: Any, weights: Any) -> Any:
        return gate_rows(x, inputs, weights, self.pool)

    def delta_rule(
        self, spec: GatedDeltaSpec, layer: int, cache: RecurrentCache, vectors: tuple[Any, Any, Any], norm: Norm
    ) -> CpuDelta:
        rule = DeltaRule(spec.heads, *vectors, norm.scale, norm.eps, self.pool, is_tiled=spec.is_tiled)
        return CpuDelta(rule, cache, layer)

    def gated_delta(self, inputs: Any, gates: Any, rule: CpuDelta, rows: CpuRows) -> Any:
        return rule.run(inputs, gates, rows)

    def mamba_rule(
        self, spec: MambaSpec, layer: int, cache: RecurrentCache, vectors: tuple[Any, ...], norm: Norm
    ) -> CpuDelta:
        heads, (conv, a_log, dt_bias, skips, bias) = spec.heads, vectors
        rule = Mamba2(heads, (conv, a_log, dt_bias), bias, skips, norm.scale, norm.eps, self.pool)
        return CpuDelta(rule, cache, layer)

    def mamba(self, inputs: Any, rule: CpuDelta, rows: CpuRows) -> Any:
        return rule.run(inputs, inputs, rows)

    def conv(self, layer: int, cache: RecurrentCache, weights: Any) -> TorchConv:
        return TorchConv(layer, cache, torch.from_numpy(weights))

    def short_conv(self, inputs: Any, conv: TorchConv, rows: CpuRows) -> Any:
        """See Ops.short_conv. Uses torch, since the layer's matrices need 1,000 times as many operations."""
        outputs, x = torch.empty(len(inputs), len(conv.weights)), torch.from_numpy(inputs)
        for sequence, mine in rows.by_sequence.items():
            outputs[mine] = conv.run(x[mine], sequence, rows.batch.positions[mine[0]])
        return outputs.numpy()

    def masked_linear(self, x: Any, matrix: CpuMatrix, scores: Any, rows: CpuRows) -> Any:
        if matrix.rows is None:
            return self.linear(x, matrix, "")
        may_skip = None if scores is None else rows.batch.may_skip()
        return self._masked_linear(x, scores, matrix.rows, matrix.bias, may_skip)

    def sparse_ffn(self, x: Any, active: Any, neurons: Neurons, scores: Any, rows: CpuRows) -> Any:
        self._skip(active, neurons, scores, rows)
        return self._sparse_ffn(x, active, *_up_and_down(neurons))

    def first_sections(self, x: Any, active: Any, neurons: Neurons, scores: Any, rows: CpuRows) -> Any:
        """Return the activations (m, ffn), 0 for all other neurons. fold_sections() sums them by section."""
        self._skip(active, neurons, scores, rows)
        return _spread(active, neurons)

    def rest_sections(self, x: Any, active: Any, neurons: Neurons, scores: Any, rows: CpuRows) -> Any:
        self._skip(active, neurons, scores, rows)
        up_and_down = _up_and_down(neurons)
        return self._sparse_ffn.from_section(x, _spread(active, neurons), *up_and_down, neurons.section)

    def fold_sections(self, x: Any, sums: Any, rest: Any, neurons: Neurons) -> Any:
        return self._sparse_ffn.onto(rest, x, sums, *_up_and_down(neurons), neurons.section)

    def sliced_head(self, x: Any, matrix: CpuMatrix, token_ids: Tensor) -> Any:
        """See Ops.sliced_head. Makes one pass over the rows of all ids; for many ids the whole head costs less."""
        ids, where = np.unique(token_ids.numpy(), return_inverse=True)
        logits = self._matmul.sliced(x, matrix.tiles, ids)
        return np.take_along_axis(logits, where.reshape(token_ids.shape), axis=1)

    def _rope(self, rope: RopeSpec, n_positions: int) -> Rope:
        key = rope, n_positions
        if key not in self._ropes:
            self._ropes[key] = Rope(rope.inverse_frequencies(n_positions), rope.scaling.magnitude)
        return self._ropes[key]

    def _attention(self, spec: AttentionSpec, cache: CpuKvCache) -> tuple[KvWrite, Attention]:
        """Return the kernels that write keys and values, and that attend. Layers of one shape share them."""
        shape = cache_shape(cache)
        key = shape, cache.kind, spec.n_heads, spec.scale, spec.cap, spec.shared_dim
        if key not in self._attentions:
            sizes = shape[0], spec.n_heads, *shape[1:]
            attention = Attention(
                *sizes, cache.kind, self.pool, scale=spec.scale, cap=spec.cap, value_dim=spec.shared_dim
            )
            self._attentions[key] = KvWrite(*shape, cache.kind), attention
        return self._attentions[key]

    @staticmethod
    def _skip(active: Any, neurons: Neurons, scores: Any, rows: CpuRows) -> None:
        """Set activations that count as inactive to 0, and count the active neurons."""
        if neurons.least is not None:
            active[rows.batch.may_skip()[:, None] & (np.abs(active) < neurons.least)] = 0.0
        rows.counts.count(active, rows.batch, scores)


def _up_and_down(neurons: Neurons) -> tuple[RowMatrix | None, RowMatrix]:
    return None if neurons.up is None else neurons.up.rows, neurons.down.rows


def _spread(active: Any, neurons: Neurons) -> Any:
    """Insert the activations of the chosen neurons into an array for all neurons, 0 elsewhere."""
    whole = np.zeros((len(active), neurons.down.n_rows), np.float32)
    whole[:, neurons.chosen] = active
    return whole


def _read_experts_ahead(pairs: Pairs, experts: Experts) -> None:
    """Request the matrices of all chosen experts at once, so that the disk has many reads to order."""
    for matrix, n_rows in ((experts.first, experts.n_first_rows), (experts.down, experts.n_down_rows)):
        for rows in (matrix.weight.tiles.numpy(), matrix.weight.scales.numpy()):
            for expert in pairs.experts:
                first = (matrix.first_row + int(expert) * n_rows) // TILE_ROWS
                read_ahead(rows, first, first + n_rows // TILE_ROWS)
