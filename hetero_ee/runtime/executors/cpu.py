"""The executor on the CPU kernels: int4 weights as they are stored, int8 activations, everything shared by one thread
pool.

It computes what the reference computes, with each residual added inside the norm that follows it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.config import Progress
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.blocks import Block, BlockKind, first_matrix, least_activations
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.hot import section_neurons
from hetero_ee.runtime.executors.executor import HostExecutor, SplitFfn
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.weight import TileWeight, Weight
from hetero_ee_cpu_ops.activate import activate
from hetero_ee_cpu_ops.attention import Attention
from hetero_ee_cpu_ops.embed import embed_int4, embed_int8
from hetero_ee_cpu_ops.kv_table import SequenceCache, kv_table
from hetero_ee_cpu_ops.kv_write import KvWrite
from hetero_ee_cpu_ops.masked_linear import MaskedLinear
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.norm import layer_norm, rms_norm, rms_norm_heads
from hetero_ee_cpu_ops.rope import Rope
from hetero_ee_cpu_ops.rows import RowMatrix
from hetero_ee_cpu_ops.sparse_ffn import SparseFfn
from hetero_ee_cpu_ops.thread_pool import ThreadPool

COMPILING = "Compiling the CPU kernels"
ALL = slice(None, None)  # of an FFN's neurons


@dataclass(frozen=True, slots=True)
class _Linear:
    """A matrix in tiles with its bias, None or fp32 (N,)."""

    matrix: TileMatrix
    n_rows: int
    bias: Any


class CpuExecutor(HostExecutor):
    """Runs one model whose matrices are in tiles, or rows of neurons. cache: see HostExecutor.

    threads: how many to start, 1 or more, or a pool; close() ends them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        max_tokens: int,
        threads: int | ThreadPool,
        *,
        cache: CpuKvCache | None = None,
    ) -> None:
        super().__init__(spec, weights, max_tokens, cache)
        self._pool = threads if isinstance(threads, ThreadPool) else ThreadPool(threads)
        self._matmul = Matmul(self._pool)
        shape, kind = (max(1, self.cache.n_layers), spec.n_kv_heads, spec.head_dim), self.cache.kind
        self._cache_shape = shape
        self._kv_write = KvWrite(*shape, kind)
        scale, cap = spec.attention_scale, spec.attention_cap
        self._attention = Attention(shape[0], spec.n_heads, *shape[1:], kind, self._pool, scale=scale, cap=cap)
        n_positions = self.cache.max_tokens
        self._ropes = {rope: Rope(rope.inverse_frequencies(n_positions), rope.scaling.magnitude) for rope in spec.ropes}
        self._sparse_ffn, self._masked_linear = SparseFfn(self._pool), MaskedLinear(self._pool)
        self._linears, self._rows = self._taken(weights)
        self._vectors = {name: vector.numpy() for name, vector in weights.vectors.items()}
        self._foreign: dict[Weight, _Linear] = {}
        self._parts: dict[tuple[str, int | None, int | None], RowMatrix] = {}  # see _some_rows

    def prepare(self, progress: Progress | None = None, stage: str = COMPILING) -> None:
        """Compiles what the first token needs, or loads it from the disk, by one pass over one token."""
        kinds = sorted({linear.matrix.kind for linear in self._linears.values()})
        for n_done, kind in enumerate(kinds):
            if progress:
                progress(stage, n_done, len(kinds) + 1)
            self._matmul.compile(kind)
        sequence = self.cache.open_new()
        if progress:
            progress(stage, len(kinds), len(kinds) + 1)
        self.hidden(Batch.of_sequence(sequence, 0, [0]))
        self.cache.close(sequence)
        if progress:
            progress(stage, len(kinds) + 1, len(kinds) + 1)

    def close(self) -> None:
        self._pool.close()

    @property
    def pool(self) -> ThreadPool:
        return self._pool

    def embed(self, batch: Batch) -> Tensor:
        return torch.from_numpy(self._embedded(batch))

    def linear(self, x: Tensor, name: str) -> Tensor:
        return torch.from_numpy(self._product(np.ascontiguousarray(x.numpy()), self._linears[name]))

    def product(self, x: Tensor, weight: Weight) -> Tensor:
        if weight not in self._foreign:
            self._foreign[weight] = self._linear("a matrix that is not the model's", weight)
        return torch.from_numpy(self._product(np.ascontiguousarray(x.numpy()), self._foreign[weight]))

    def normed(self, x: Tensor, name: str) -> Tensor:
        return torch.from_numpy(rms_norm(np.ascontiguousarray(x.numpy()), self._vectors[name], self.spec.norm_eps))

    def attend(self, qkv: Tensor, batch: Batch, block: Block) -> Tensor:
        turns = np.array(batch.positions, np.int64)
        own = np.array(qkv.numpy(), order="C")  # a copy: heads turn in place
        return torch.from_numpy(self._attended_by(block, own, turns, self._places(batch)))

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        turns = np.array(batch.positions, np.int64)
        places = self._places(batch) if any(block.kind is BlockKind.ATTENTION for block in blocks) else None
        x, delta = np.array(hidden.numpy(), order="C"), None  # a copy: norms add to it in place
        for block in blocks:
            if block.kind is BlockKind.ATTENTION:
                delta = self._attended(block, self._normed(block, x, delta), turns, places)
            else:
                delta = self._fed_forward(block, self._normed(block, x, delta), batch)
            delta = self._scaled(block, delta)
        return torch.from_numpy(x if delta is None else x + delta)

    def split(self, block: Block, n_first: int) -> SplitFfn:
        return _CpuSplit(self, block, n_first)

    @contextmanager
    def borrowing(self, weights: ModelWeights) -> Iterator[None]:
        own = self._linears, self._rows, self._vectors
        linears, rows = self._taken(weights)
        vectors = {name: vector.numpy() for name, vector in weights.vectors.items()}
        self._linears, self._rows, self._vectors = own[0] | linears, own[1] | rows, own[2] | vectors
        try:
            yield
        finally:
            self._linears, self._rows, self._vectors = own

    def final_norm(self, hidden: Tensor) -> Tensor:
        block = self.blocks[-2]
        if block.kind is not BlockKind.FINAL_NORM:
            return hidden
        return torch.from_numpy(self._normed(block, np.ascontiguousarray(hidden.numpy()), None))

    def lm_head(self, normed: Tensor) -> Tensor:
        product = self._multiplied(np.ascontiguousarray(normed.numpy()), self.blocks[-1], "tokens")
        return self.finished(torch.from_numpy(product))

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        array = logits.numpy()
        activate(array, "softcap", array, gated=False, threshold=cap, pool=self._pool)
        return logits

    def sliced_head(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """See HostExecutor.sliced_head. One pass over all rows' tokens; for many rows, the whole head costs less."""
        ids, where = np.unique(token_ids.numpy(), return_inverse=True)
        linear = self._linears[self.blocks[-1].tensors["tokens"].name]
        logits = self._matmul.sliced(np.ascontiguousarray(x.numpy()), linear.matrix, ids)
        chosen = np.take_along_axis(logits, where.reshape(token_ids.shape), axis=1)
        return self.finished(torch.from_numpy(chosen))

    def _places(self, batch: Batch) -> Any:
        """Where each token's keys and values lie, for all layers."""
        caches = [self._sequence_cache(sequence) for sequence in batch.sequences]
        return kv_table(caches, batch.positions, self._cache_shape, self.cache.kind)

    def _sequence_cache(self, sequence: int) -> SequenceCache:
        """The sequence's storage as the kernels take it."""
        view: SequenceCache = self.cache.view(sequence, _sequence_cache)
        return view

    def _embedded(self, batch: Batch) -> Any:
        block, ids = self.blocks[0], np.array(batch.token_ids, np.int64)
        weight = self.weights.matrices[block.tensors["tokens"].name]
        assert isinstance(weight, TileWeight)
        tiles, scales = weight.tiles.numpy(), weight.scales.numpy().view(np.uint16)
        if weight.codebook is None:
            x = embed_int8(tiles, scales, 2.0**weight.exponent, weight.shape, ids)
        else:
            codebook = np.array(weight.codebook, np.int8)
            x = embed_int4(tiles, scales, 2.0**weight.exponent, codebook, weight.shape, ids)
        if self.spec.embedding_scale != 1:
            x *= np.float32(self.spec.embedding_scale)
        if "positions" in block.tensors:
            offset = self.spec.learned_position_offset or 0
            x += self._vectors[block.tensors["positions"].name][np.array(batch.positions) + offset]
        return x

    def _attended(self, block: Block, normed: Any, turns: Any, places: Any) -> Any:
        attended = self._attended_by(block, self._multiplied(normed, block, "qkv"), turns, places)
        return self._multiplied(attended, block, "output")

    def _attended_by(self, block: Block, qkv: Any, turns: Any, places: Any) -> Any:
        """(m, queries) of qkv, whose heads are normed and turned in place."""
        assert block.layer is not None
        place = self.cache.index(block.layer)
        self._write(block, qkv, turns, places, place)
        return self._attention.attend(qkv, places, place, self.spec.sliding_windows[block.layer])

    def _write(self, block: Block, qkv: Any, turns: Any, places: Any, place: int) -> None:
        """Norm and rotate all heads of qkv in place, then write keys and values into the cache."""
        spec, first_key = self.spec, self.spec.query_size
        assert block.layer is not None
        if spec.qk_norm:
            n_queries, n_keys = (1, 1) if spec.qk_norm_whole else (spec.n_heads, spec.n_kv_heads)
            query_scale, key_scale = self._vector(block, "query_norm"), self._vector(block, "key_norm")
            rms_norm_heads(qkv, query_scale, spec.norm_eps, 0, n_queries)
            rms_norm_heads(qkv, key_scale, spec.norm_eps, first_key, n_keys)
        if rope := spec.rope_of(block.layer):
            self._ropes[rope].turn(qkv, turns, 0, spec.n_heads + spec.n_kv_heads, spec.head_dim)
        self._kv_write.write(qkv, places, place, first_key, first_key + spec.kv_size)

    def _fed_forward(self, block: Block, normed: Any, batch: Batch) -> Any:
        spec = self.spec
        if spec.neuron_major:
            return self._summed_neurons(block, normed, batch)
        inner = self._multiplied(normed, block, "gate_up" if spec.gated else "up")
        kind, threshold = spec.activation, spec.activation_threshold
        active = activate(inner, kind, gated=spec.gated, threshold=threshold, pool=self._pool)
        return self._multiplied(active, block, "down")

    def _summed_neurons(self, block: Block, normed: Any, batch: Batch) -> Any:
        """An FFN whose inactive neurons are not read."""
        scores = self._scores(block, normed) if batch.may_skip().any() else None  # a prompt's tokens need all
        active = self._active(block, normed, batch, scores)
        return self._biased(block, self._sparse_ffn(normed, active, *self._neuron_rows(block)))

    def _neuron_rows(self, block: Block) -> tuple[RowMatrix | None, RowMatrix]:
        """Up, where there is a gate, and down."""
        up, down = (self._rows.get(block.tensors[short].name) for short in ("up", "down"))
        assert down is not None, "not a sparse FFN"
        return up if self.spec.gated else None, down

    def _biased(self, block: Block, summed: Any) -> Any:
        bias = self._vector(block, "down_bias")
        return summed if bias is None else summed + bias

    def _scores(self, block: Block, normed: Any) -> Any:
        """A predictor's, None without one."""
        if not self.spec.predictor_rank:
            return None
        return self._multiplied(self._multiplied(normed, block, "predictor_in"), block, "predictor_out")

    def _active(self, block: Block, normed: Any, batch: Batch, scores: Any, neurons: slice = ALL) -> Any:
        """Activations (m, ffn), 0 where a neuron is not active, or is none of these. scores: of these alone."""
        spec, first = self.spec, self._first(block, normed, batch, scores, neurons)
        active = activate(first, spec.activation, gated=False, threshold=spec.activation_threshold, pool=self._pool)
        least = self._vectors.get(least_activations(block))
        if least is not None:
            active[batch.may_skip()[:, None] & (np.abs(active) < least[neurons])] = 0.0
        self._neurons.count(active, batch, scores)
        if neurons == ALL:
            return active
        whole = np.zeros((len(active), spec.ffn_size), np.float32)
        whole[:, neurons] = active
        return whole

    def _first(self, block: Block, normed: Any, batch: Batch, scores: Any, neurons: slice) -> Any:
        """What says which of these neurons are active, before its activation."""
        short = first_matrix(self.spec)
        name = block.tensors[short].name
        if not self.spec.first_in_rows:
            product = self._product(normed, self._linears[name], neurons.start or 0)
            return product if neurons.stop is None else np.ascontiguousarray(product[:, : neurons.stop])
        rows = self._rows[name] if neurons == ALL else self._some_rows(name, neurons)
        bias, may_skip = self._vector(block, f"{short}_bias"), None if scores is None else batch.may_skip()
        return self._masked_linear(normed, scores, rows, None if bias is None else bias[neurons], may_skip)

    def _some_rows(self, name: str, neurons: slice) -> RowMatrix:
        """Of a matrix of the model's."""
        key = name, neurons.start, neurons.stop
        if key not in self._parts:
            weight = self.weights.matrices[name]
            assert isinstance(weight, RowWeight), "not in rows"
            self._parts[key] = _row_matrix(replace(weight, codes=weight.codes[neurons], scales=weight.scales[neurons]))
        return self._parts[key]

    def _normed(self, block: Block, x: Any, delta: Any) -> Any:
        """The block's norm of x, x itself where it has none; first adds delta, the block before's output, to x."""
        if not block.has_norm:
            if delta is not None:
                x += delta
            return x
        return self._norm(block, "norm", x, delta=delta)

    def _scaled(self, block: Block, delta: Any) -> Any:
        """The block's output as it is added to the hidden state: normed, where it has such a norm, and scaled."""
        if block.has_post_norm:
            delta = self._norm(block, "post_norm", delta, out=delta)
        if self.spec.residual_scale != 1:
            delta *= np.float32(self.spec.residual_scale)
        return delta

    def _norm(self, block: Block, short: str, x: Any, **more: Any) -> Any:
        scale, eps = self._vector(block, short), self.spec.norm_eps
        if self.spec.norm == "layer":
            return layer_norm(x, scale, self._vector(block, f"{short}_bias"), eps, **more)
        return rms_norm(x, scale, eps, **more)

    def _vector(self, block: Block, short: str) -> Any:
        tensor = block.tensors.get(short)
        return None if tensor is None else self._vectors[tensor.name]

    def _multiplied(self, x: Any, block: Block, short: str) -> Any:
        return self._product(x, self._linears[block.tensors[short].name])

    def _product(self, x: Any, linear: _Linear, first_row: int = 0) -> Any:
        """x W^T + bias, fp32 (m, N), contiguous; without the rows of W before first_row, a multiple of 16."""
        n_rows = linear.n_rows - first_row
        product = self._matmul.from_row(x, linear.matrix, first_row) if first_row else self._matmul(x, linear.matrix)
        if product.shape[1] != n_rows:
            product = np.ascontiguousarray(product[:, :n_rows])
        if linear.bias is not None:
            product += linear.bias[first_row:]
        return product

    def _taken(self, weights: ModelWeights) -> tuple[dict[str, _Linear], dict[str, RowMatrix]]:
        """Matrices as the kernels take them."""
        rows = {name: weight for name, weight in weights.matrices.items() if isinstance(weight, RowWeight)}
        tiles = {name: self._linear(name, weight) for name, weight in weights.matrices.items() if name not in rows}
        return tiles, {name: _row_matrix(weight) for name, weight in rows.items()}

    def _linear(self, name: str, weight: Any) -> _Linear:
        if not isinstance(weight, TileWeight):
            raise TypeError(f"{name} is {type(weight).__name__}, the CPU kernels multiply tiles.")
        matrix = TileMatrix(weight.tiles.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook)
        bias = self.weights.vectors.get(f"{name}_bias")
        return _Linear(matrix, weight.n_rows, None if bias is None else bias.numpy())


def _row_matrix(weight: RowWeight) -> RowMatrix:
    return RowMatrix(weight.codes.numpy(), weight.scales.numpy(), weight.exponent, weight.codebook, weight.n_columns)


def _sequence_cache(*parts: Tensor) -> SequenceCache:
    arrays = (part.numpy() for part in parts)
    return SequenceCache(*(array.view(np.uint16) if array.dtype == np.float16 else array for array in arrays))


class _CpuSplit(SplitFfn):
    """Of a sparse FFN. On an emulated GPU end() adds the first neurons up, section by section."""

    def __init__(self, of: CpuExecutor, block: Block, n_first: int) -> None:
        self._of, self._block, self._n_first, self._width = of, block, n_first, of.spec.hidden_size
        self._section = n_first // section_neurons(of.spec.ffn_size)

    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        x = self._of._normed(self._block, np.array(hidden.numpy(), order="C"), None)
        scores = self._of._scores(self._block, x)
        return torch.from_numpy(x if scores is None else np.hstack([x, scores[:, self._n_first :]]))

    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        normed = self._normed(x)
        scores, neurons = self._of._scores(self._block, normed), slice(None, self._n_first)
        scores = None if scores is None else np.ascontiguousarray(scores[:, neurons])
        return torch.from_numpy(self._of._active(self._block, normed, batch, scores, neurons))

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        normed, scores = self._normed(x), None
        if x.shape[1] > self._width:
            scores = np.ascontiguousarray(x.numpy()[:, self._width :])
        active = self._of._active(self._block, normed, batch, scores, slice(self._n_first, None))
        rows = self._of._neuron_rows(self._block)
        return torch.from_numpy(self._of._sparse_ffn.from_section(normed, active, *rows, self._section))

    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        of, rows = self._of, self._of._neuron_rows(self._block)
        summed = of._sparse_ffn.onto(rest.numpy(), self._normed(x), sums.numpy(), *rows, self._section)
        return hidden + torch.from_numpy(of._scaled(self._block, of._biased(self._block, summed)))

    def _normed(self, x: Tensor) -> Any:
        return np.ascontiguousarray(x.numpy()[:, : self._width])
