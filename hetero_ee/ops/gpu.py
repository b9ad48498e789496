"""A GPU's operations: kernels chosen by the registry, which write into an arena so that CUDA graphs can replay them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.kv.gpu_recurrent import GpuRecurrentCache
from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.delta import GatedDeltaSpec
from hetero_ee.layers.mamba import MambaSpec
from hetero_ee.layers.ops import (
    ACTIVE,
    ATTENDED,
    DELTA,
    INNER,
    MIXED,
    NORMED,
    OUTPUTS,
    ROUTES,
    Activation,
    Experts,
    Neurons,
    Norm,
    Ops,
    Router,
)
from hetero_ee.ops.arena import MAX_ROWS, Arena, GpuRows
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.weights.rows import UNIT_COLUMNS, RowWeight
from hetero_ee.weights.sections import BLOCK, MAX_SECTIONS
from hetero_ee.weights.weight import TileWeight
from hetero_ee_kernels.delta_state import DeltaWeights
from hetero_ee_kernels.expert_pairs import pairs_of
from hetero_ee_kernels.row_matrix import RowMatrix, Skips
from hetero_ee_kernels.tile_matrix import TileMatrix

FIRST, SECTION_SUMS = "first", "section_sums"  # buffers of split FFNs


def tile_matrix(weight: TileWeight, device: Any) -> TileMatrix:
    """Copy a weight's tiles to the GPU. The bytes are those in memory and on disk, not repacked."""
    tiles, scales = weight.tiles.to(device), weight.scales.to(device)
    return TileMatrix(tiles, scales, weight.exponent, weight.codebook, weight.n_rows, weight.n_terms)


def row_matrix(weight: RowWeight, device: Any) -> RowMatrix:
    """Copy rows of neurons to the GPU. The bytes are those in memory and on disk, not repacked."""
    codes, scales = weight.codes.to(device), weight.scales.to(device)
    return RowMatrix(codes, scales, weight.exponent, weight.codebook, weight.n_columns)


@dataclass(frozen=True, slots=True)
class GpuMatrix:
    """A weight on the GPU. multiply(x, matrix, out) computes the product; None for rows of neurons."""

    multiply: Callable[..., Any] | None
    matrix: Any
    bias: Tensor | None  # fp32 (n_rows,)
    n_rows: int


@dataclass(frozen=True, slots=True)
class GpuHeads:
    """One layer's attention, and the location of its keys and values in the cache."""

    spec: AttentionSpec
    cache: GpuKvCache
    place: int
    angles: Any  # the table of rotary angles, or None
    factors: Any  # of queries by position, fp32 (n_positions, 1), or None
    norms: list[tuple[Any, int, int]]  # see AttentionSpec.norms
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class GpuRecurrence:
    """One layer's gated delta rule, Mamba-2 or short convolution, and the location of its state in the cache."""

    cache: GpuRecurrentCache
    place: int
    weights: Any  # DeltaWeights, or those of the convolution (channels, kernel)


class GpuOps(Ops):
    """The operations of one GPU, which launch kernels.

    Args:
        arena: buffers for results; None allocates new tensors each time.
    """

    def __init__(self, kernels: GpuOperations, device: Any, arena: Arena | None = None) -> None:
        self.kernels, self.device = kernels, device
        self._arena = arena

    def matrix(self, name: str, weight: Any, bias: Tensor | None) -> GpuMatrix:
        if isinstance(weight, RowWeight):
            return GpuMatrix(None, row_matrix(weight, self.device), bias, weight.shape[0])
        if not isinstance(weight, TileWeight):
            raise TypeError(f"{name} is {type(weight).__name__}, the GPU kernels multiply tiles.")
        kernels = self.kernels
        if weight.layout == "int4":
            multiply, prepare = kernels.matmul_int4, kernels.prepare_int4
        else:
            multiply, prepare = kernels.matmul_int8, kernels.prepare_int8
        return GpuMatrix(multiply, prepare(weight, self.device), bias, weight.n_rows)

    def vector(self, vector: Tensor) -> Tensor:
        """Copy the vector, even if the device is a CPU: a mapped vector may not be aligned."""
        return vector.to(self.device, copy=True)

    def part(self, matrix: GpuMatrix, rows: slice) -> GpuMatrix:
        """Return the whole matrix, since a GPU holds only its own neurons of a split FFN."""
        return matrix

    def heads(
        self,
        spec: AttentionSpec,
        layer: int,
        cache: GpuKvCache,
        query_norm: Norm | None,
        key_norm: Norm | None,
        sinks: Tensor | None = None,
    ) -> GpuHeads:
        angles, factors = self.arena.rope_tables[spec.rope], self.arena.query_factors[spec.query_growth]
        norms = spec.norms(query_norm, key_norm, torch.ones(spec.head_dim, device=self.device))
        return GpuHeads(spec, cache, cache.index(layer), angles, factors, norms, sinks)

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "an operation of layers, which work in an arena"
        return self._arena

    def empty(self, m: int, width: int, into: str) -> Tensor:
        return self.arena.rows(into, m, width)

    def embed(self, tokens: GpuMatrix, batch: Batch, n_features: int, learned: Tensor | None, offset: int) -> Tensor:
        """See Ops.embed. Does not make the host wait. Raises ValueError for tokens outside of the vocabulary."""
        if not 0 <= min(batch.token_ids) <= max(batch.token_ids) < tokens.n_rows:
            raise ValueError(f"tokens {batch.token_ids} are not all of the {tokens.n_rows} there are.")
        ids, positions = (
            torch.tensor(numbers, dtype=torch.int32, pin_memory=self.device.type == "cuda").to(
                self.device, non_blocking=True
            )
            for numbers in (batch.token_ids, batch.positions)
        )
        place: dict[str, Any] = {"learned": learned, "positions": positions, "offset": offset}
        found: Tensor = self.kernels.embed(ids, tokens.matrix, n_features, **place)
        return found

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm | None) -> Tensor:
        out = self._out(NORMED, x, x.shape[1])
        if norm is not None:
            return self._norm(x, norm, out, delta=delta)
        if delta is not None:
            self.kernels.add(x, delta)
        return x if out is None else out.copy_(x)

    def norm_in_place(self, x: Tensor, norm: Norm) -> Tensor:
        return self._norm(x, norm, x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y)

    def scaled(self, x: Tensor, scale: Tensor, into: str) -> Tensor:
        return torch.mul(x, scale, out=self.arena.rows(into, len(x), x.shape[1]))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self.kernels.add(x, y)
        return x

    def linear(self, x: Tensor, matrix: GpuMatrix, into: str) -> Tensor:
        assert matrix.multiply is not None, "rows of neurons are no product"
        out = self._out(into, x, matrix.n_rows)
        found: Any = matrix.multiply(x, matrix.matrix, out)
        out = found if out is None else out
        if matrix.bias is not None:
            self.kernels.add(out, matrix.bias)
        return out

    def linear_by_head(self, x: Tensor, matrix: GpuMatrix, n_heads: int, into: str) -> Tensor:
        m, n_rows, tiles = len(x), matrix.n_rows // n_heads, _expert_tiles(matrix)
        heads = torch.arange(2 * n_heads, dtype=torch.float32, device=self.device).expand(m, -1)
        out = self.arena.rows(into, m * n_heads, n_rows)
        self.kernels.expert_matmul(x.reshape(m * n_heads, -1), tiles, pairs_of(heads, 0, n_heads, tiles), out)
        return out.view(m, n_heads * n_rows)

    def concatenate(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)

    def append_copy(self, x: Tensor, first: int, into: str) -> Tensor:
        n_features = x.shape[1]
        out = self.arena.rows(into, len(x), 2 * n_features - first)
        out[:, :n_features], out[:, n_features:] = x, x[:, first:]
        return out

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        out = self.arena.rows(ACTIVE, len(x), x.shape[1] // (2 if activation.gated else 1))
        how: dict[str, Any] = {"gated": activation.gated, "threshold": activation.threshold}
        self.kernels.activate(x, activation.kind, out, **how)
        return out

    def cap(self, x: Tensor, cap: float) -> Tensor:
        self.kernels.activate(x, "softcap", x, gated=False, threshold=cap)
        return x

    def write_kv(self, qkv: Tensor, heads: GpuHeads, rows: GpuRows) -> Tensor:
        spec, kernels = heads.spec, self.kernels
        for scale, first, n_heads in heads.norms:
            kernels.rms_norm_heads(qkv, scale, spec.norm_eps, first, n_heads)
        place = heads.cache.pages, rows.slots, rows.positions, heads.place
        starts = spec.query_size, spec.first_value if spec.kv_layer is None else None
        kernels.kv_write(qkv, *place, *starts, rotary_table=heads.angles, paths=rows.paths)
        if heads.factors is not None:
            qkv[:, : spec.query_size] *= heads.factors.index_select(0, rows.positions)
        return qkv

    def attend(self, queries: Tensor, heads: GpuHeads, rows: GpuRows) -> Tensor:
        spec, m = heads.spec, len(queries)
        out = self.arena.rows(ATTENDED, m, spec.n_heads * spec.attended_dim)
        place = heads.cache.pages, rows.slots, rows.positions, heads.place, spec.window
        scores: dict[str, Any] = {"scale": spec.scale, "cap": spec.cap, "sinks": heads.sinks, "paths": rows.paths}
        scores |= {"shared_dim": spec.shared_dim, "workspace": self.arena.workspace}
        self.kernels.attention(queries, *place, out, **scores)
        return out

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """See Ops.gate. Changes `gates`, too."""
        return x.mul_(gates.sigmoid_())

    def route(self, x: Tensor, router: Router) -> Tensor:
        spec, vectors = router.spec, (router.bias, router.choice_bias, router.factors)
        out = self.arena.rows(ROUTES, len(x), 2 * spec.n_active)
        self.kernels.route(x, router.weights, vectors, spec.n_active, spec.scores, out, **spec.weighting)
        return out

    def expert_sums(self, x: Tensor, routes: Tensor, experts: Experts, sums: Tensor | None) -> Tensor:
        return self.add_experts(self.expert_outputs(x, routes, experts), routes, experts, sums)

    def expert_outputs(self, x: Tensor, routes: Tensor, experts: Experts) -> Tensor:
        """Return the outputs of all pairs of a token and its choices (m * n_active, hidden).

        Those of other experts are undefined.
        """
        (m, width), n_active, multiply = x.shape, routes.shape[1] // 2, self.kernels.expert_matmul
        outputs = self.arena.rows(OUTPUTS, m * n_active, width)
        if experts.n:
            first, down = map(_expert_tiles, (experts.first, experts.down))
            pairs = pairs_of(routes, experts.start, experts.n, first)
            inner = self.arena.rows(INNER, m * n_active, experts.n_first_rows)
            multiply(x, first, pairs, inner, experts.first.bias)
            multiply(self.activate(inner, experts.activation), down, pairs, outputs, experts.down.bias)
        return outputs

    def add_experts(self, outputs: Tensor, routes: Tensor, experts: Experts, sums: Tensor | None) -> Tensor:
        out = self.arena.rows(DELTA, len(routes), outputs.shape[1])
        self.kernels.add_experts(outputs, routes, experts.start, experts.n, sums, out)
        return out

    def gate_rows(self, x: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
        return x.mul_(self.kernels.fp32_product(inputs, weights).sigmoid_())

    def delta_rule(
        self, spec: GatedDeltaSpec, layer: int, cache: GpuRecurrentCache, vectors: Sequence[Tensor], norm: Norm
    ) -> GpuRecurrence:
        conv, a_log, dt_bias = vectors
        assert norm.scale is not None, "a gated delta layer has a norm with a scale"
        weights = DeltaWeights(conv, -a_log.exp(), dt_bias, norm.scale, norm.eps, spec.is_tiled)
        return GpuRecurrence(cache, cache.index(layer), weights)

    def gated_delta(self, inputs: Tensor, gates: Tensor, rule: GpuRecurrence, rows: GpuRows) -> Tensor:
        out, workspace = self._recurrence_buffers(len(inputs), rule)
        place = rule.cache.pool, rows.in_slots, rule.place
        self.kernels.gated_delta(inputs, gates, rule.weights, *place, out, workspace)
        return out

    def mamba_rule(
        self, spec: MambaSpec, layer: int, cache: GpuRecurrentCache, vectors: tuple[Any, ...], norm: Norm
    ) -> GpuRecurrence:
        conv, a_log, dt_bias, skips, bias = vectors
        weights = DeltaWeights(conv, -a_log.exp(), dt_bias, norm.scale, norm.eps, False, skips, bias)
        return GpuRecurrence(cache, cache.index(layer), weights)

    def mamba(self, inputs: Tensor, rule: GpuRecurrence, rows: GpuRows) -> Tensor:
        out, workspace = self._recurrence_buffers(len(inputs), rule)
        self.kernels.mamba2(inputs, rule.weights, rule.cache.pool, rows.in_slots, rule.place, out, workspace)
        return out

    def _recurrence_buffers(self, m: int, rule: GpuRecurrence) -> tuple[Tensor, Tensor]:
        """Return the buffers of m tokens for outputs and for what the kernels keep between their launches."""
        shape = rule.cache.pool.shape
        return self.arena.rows(ATTENDED, m, shape.n_outputs), self.arena.rows(MIXED, m, shape.workspace_size).flatten()

    def conv(self, layer: int, cache: GpuRecurrentCache, weights: Tensor) -> GpuRecurrence:
        return GpuRecurrence(cache, cache.index(layer), weights)

    def short_conv(self, inputs: Tensor, conv: GpuRecurrence, rows: GpuRows) -> Tensor:
        out = self.arena.rows(ATTENDED, len(inputs), len(conv.weights))
        self.kernels.short_conv(inputs, conv.weights, conv.cache.pool, rows.in_slots, conv.place, out)
        return out

    def masked_linear(self, x: Tensor, matrix: GpuMatrix, scores: Tensor | None, rows: GpuRows) -> Tensor:
        if matrix.multiply is not None:
            return self.linear(x, matrix, INNER)
        skips: dict[str, Any] = {}
        if scores is None:
            out = self.arena.rows(INNER, len(x), matrix.n_rows)
        else:
            skips, out = {"may_skip": rows.may_skip, "n_used": self.arena.n_predicted}, scores
            if scores.shape[1] != matrix.n_rows:
                out = self.arena.rows(FIRST, len(x), matrix.n_rows)
                out.copy_(scores[:, : matrix.n_rows])
        self.kernels.masked_linear(x, out, matrix.matrix, out, bias=matrix.bias, **skips)
        return out

    def sparse_ffn(self, x: Tensor, active: Tensor, neurons: Neurons, scores: Any, rows: GpuRows) -> Tensor:
        out, (up, down) = self.arena.rows(DELTA, len(x), x.shape[1]), _up_and_down(neurons)
        self.kernels.sparse_ffn(x, active, up, down, out, self._skips(neurons, rows))
        return out

    def first_sections(self, x: Tensor, active: Tensor, neurons: Neurons, scores: Any, rows: GpuRows) -> Tensor:
        sums, (up, down) = self.section_sums(len(x), neurons), _up_and_down(neurons)
        n_blocks = neurons.down.n_rows // neurons.section // BLOCK  # blocks per section
        self.kernels.first_sections(x, active, up, down, n_blocks, sums, self._skips(neurons, rows))
        return sums

    def rest_sections(self, x: Tensor, active: Tensor, neurons: Neurons, scores: Any, rows: GpuRows) -> Tensor:
        raise NotImplementedError("a split FFN's other neurons are the CPU's")

    def fold_sections(self, x: Tensor, sums: Tensor, rest: Tensor, neurons: Neurons) -> Tensor:
        """See Ops.fold_sections. Changes `rest` in place."""
        self.kernels.fold_sections(sums, neurons.down.matrix, rest, rest)
        return rest

    def section_sums(self, m: int, neurons: Neurons) -> Tensor:
        """Return the buffer, at a fixed address, of a split FFN's first sums: (n_sections, m, width)."""
        width, n_sections = UNIT_COLUMNS * neurons.down.matrix.n_units, neurons.section
        sums = self.arena.rows(SECTION_SUMS, MAX_ROWS, MAX_SECTIONS * width).flatten()
        return sums[: n_sections * m * width].view(n_sections, m, width)

    def sliced_head(self, x: Tensor, matrix: GpuMatrix, token_ids: Tensor) -> Tensor:
        if isinstance(matrix.matrix, TileMatrix):
            found: Tensor = self.kernels.sliced_head(x, matrix.matrix, token_ids)
            return found
        assert matrix.multiply is not None, "a head is in tiles"
        whole: Tensor = matrix.multiply(x, matrix.matrix)
        return whole.gather(1, token_ids)

    def _out(self, name: str, x: Tensor, width: int) -> Tensor | None:
        return None if self._arena is None else self._arena.rows(name, len(x), width)

    def _norm(self, x: Tensor, norm: Norm, out: Tensor | None, **more: Any) -> Tensor:
        if norm.kind == "layer":
            found = self.kernels.layer_norm(x, norm.scale, norm.bias, norm.eps, out, **more)
        else:
            found = self.kernels.rms_norm(x, norm.scale, norm.eps, out, **more)
        return found if out is None else out

    def _skips(self, neurons: Neurons, rows: GpuRows) -> Skips:
        return Skips(rows.may_skip, self.arena.n_used, neurons.least)


def _expert_tiles(matrix: GpuMatrix) -> TileMatrix:
    if not isinstance(matrix.matrix, TileMatrix):
        raise UsageError(
            "experts and latent attention need Triton on the GPU, which can't be imported; install triton, or plan "
            "with -ngl 0."
        )
    return matrix.matrix


def _up_and_down(neurons: Neurons) -> tuple[RowMatrix | None, RowMatrix]:
    return None if neurons.up is None else neurons.up.matrix, neurons.down.matrix
