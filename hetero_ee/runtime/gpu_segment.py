"""Consecutive decoder layers on a GPU: the same launches for every pass of m rows, for a CUDA graph to replay.

Buffers stay where they are, and lengths, positions and pages are read from device memory: nothing is recorded anew when
contexts grow. Without a recorder the launches are made one by one, with the same results.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.models.blocks import Block, BlockKind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.gpu_kv_cache import GpuKvCache
from hetero_ee.runtime.gpu_operations import GpuOperations
from hetero_ee.runtime.rows import Rows
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.weight import TileWeight
from hetero_ee_kernels.pages import attention_workspace
from hetero_ee_kernels.rope_table import rope_table

MAX_ROWS = 16  # more rows run in turns; each number of rows has a graph of its own
Work = Callable[[], None]
Recorder = Callable[[Work], Work]  # records the launches without computing anything, returns what makes them


class CudaGraphRecorder:
    """Records work in CUDA graphs that share their memory, as they never run at the same time.

    On a stream of its own device: torch's for recording lies on the device that recorded first in this process.
    """

    def __init__(self, device: Any) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        replay: Work = graph.replay
        return replay


@dataclass(frozen=True, slots=True)
class _Linear:
    """multiply(x, matrix, out); bias: None or fp32 (N,)."""

    multiply: Callable[..., Any]
    matrix: Any
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Room for MAX_ROWS rows; every pass of m rows uses the first m of each."""

    x: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    inner: Tensor
    active: Tensor
    delta: Tensor
    slots: Tensor
    positions: Tensor

    def first(self, m: int) -> "_Buffers":
        return _Buffers(*(getattr(self, name)[:m] for name in self.__slots__))


class GpuSegment:
    """Attentions and FFNs of a model that follow each other. cache: holds their layers; open sequences there.

    Weights must be in tiles. recorder: None runs every launch by itself, see `recorder_for`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        blocks: Sequence[Block],
        cache: GpuKvCache,
        operations: GpuOperations,
        recorder: Recorder | None = None,
    ) -> None:
        self.spec, self.cache = spec, cache
        self._ops, self._record = operations, recorder
        self._device = cache.pages.codes.device
        self._blocks = list(blocks)
        names = {tensor.name for block in self._blocks for tensor in block.tensors.values()}
        self._vectors = {  # copies on a CPU too: a mapped vector begins anywhere
            name: vector.to(self._device, copy=True) for name, vector in weights.vectors.items() if name in names
        }
        self._linears = {name: self._linear(name, w) for name, w in weights.matrices.items() if name in names}
        self._turns = self._rope_table()
        self._buffers = self._new_buffers()
        self._workspace = attention_workspace(cache.pages, MAX_ROWS, spec.n_heads)
        self._replays: dict[int, Work] = {}

    @torch.inference_mode()
    def run(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Hidden states (m, hidden) before the first block -> after the last, fp32 on the device.

        The cache, which has admitted the rows, is filled. Raises ValueError for hidden states of other shapes.
        """
        if tuple(hidden.shape) != (len(rows), self.spec.hidden_size):
            raise ValueError(
                f"hidden states are {tuple(hidden.shape)} for {len(rows)} rows of {self.spec.hidden_size}."
            )
        with _entered(self._device):
            return self._run(hidden, rows)

    def _run(self, hidden: Tensor, rows: Rows) -> Tensor:
        slots, out = self.cache.slots(rows), torch.empty(hidden.shape, device=self._device)
        for first in range(0, len(rows), MAX_ROWS):
            end = min(first + MAX_ROWS, len(rows))
            some = self._buffers.first(end - first)
            some.x.copy_(hidden[first:end])
            some.slots.copy_(torch.tensor(slots[first:end], dtype=torch.int32))
            some.positions.copy_(torch.tensor(rows.positions[first:end], dtype=torch.int32))
            self._pass(end - first)
            out[first:end] = some.x
        return out

    def _pass(self, m: int) -> None:
        """The first pass of m rows is launched one by one: it compiles what it needs, which recording does not allow.

        Every pass computes once: recording computes nothing, and what it recorded serves from the next pass on.
        """
        replay = self._replays.get(m)
        if replay is not None:
            replay()
            return
        self._compute(m)
        if self._record is not None:
            self._replays[m] = self._record(lambda: self._compute(m))

    def _compute(self, m: int) -> None:
        """buffers.x of m rows, before the segment -> after it. Launches alone: they depend on m and nothing else."""
        b = self._buffers.first(m)
        delta = None
        for block in self._blocks:
            self._normed(block, b, delta)
            (self._attend if block.kind is BlockKind.ATTENTION else self._feed_forward)(block, b)
            delta = b.delta
        self._ops.add(b.x, b.delta)

    def _attend(self, block: Block, b: _Buffers) -> None:
        spec, ops = self.spec, self._ops
        assert block.layer is not None
        layer = self.cache.place(block.layer)
        self._multiply(b.normed, block, "qkv", b.qkv)
        if spec.qk_norm:
            query_scale, key_scale = self._vector(block, "query_norm"), self._vector(block, "key_norm")
            ops.rms_norm_heads(b.qkv, query_scale, spec.norm_eps, 0, spec.n_heads)
            ops.rms_norm_heads(b.qkv, key_scale, spec.norm_eps, spec.query_size, spec.n_kv_heads)
        place = (self.cache.pages, b.slots, b.positions, layer)
        ops.kv_write(b.qkv, *place, spec.query_size, spec.query_size + spec.kv_size, turns=self._turns)
        window = spec.sliding_windows[block.layer]
        ops.attention(b.qkv, *place, window, b.attended, workspace=self._workspace)
        self._multiply(b.attended, block, "output", b.delta)

    def _feed_forward(self, block: Block, b: _Buffers) -> None:
        spec = self.spec
        self._multiply(b.normed, block, "gate_up" if spec.gated else "up", b.inner)
        self._ops.activate(b.inner, spec.activation, b.active, gated=spec.gated, threshold=spec.activation_threshold)
        self._multiply(b.active, block, "down", b.delta)

    def _normed(self, block: Block, b: _Buffers, delta: Tensor | None) -> None:
        """b.normed: the norm of b.x, to which delta, the block before's output, is added first."""
        scale, eps = self._vector(block, "norm"), self.spec.norm_eps
        if self.spec.norm == "layer":
            self._ops.layer_norm(b.x, scale, self._vector(block, "norm_bias"), eps, b.normed, delta=delta)
        else:
            self._ops.rms_norm(b.x, scale, eps, b.normed, delta=delta)

    def _multiply(self, x: Tensor, block: Block, short: str, out: Tensor) -> None:
        linear = self._linears[block.tensors[short].name]
        linear.multiply(x, linear.matrix, out)
        if linear.bias is not None:
            self._ops.add(out, linear.bias)

    def _vector(self, block: Block, short: str) -> Tensor | None:
        tensor = block.tensors.get(short)
        return None if tensor is None else self._vectors[tensor.name]

    def _linear(self, name: str, weight: Any) -> _Linear:
        if not isinstance(weight, TileWeight):
            raise TypeError(f"{name} is {type(weight).__name__}, the GPU kernels multiply tiles.")
        ops, bias = self._ops, self._vectors.get(f"{name}_bias")
        if weight.codebook is None:
            return _Linear(ops.matmul_int8, ops.prepare_int8(weight, self._device), bias)
        return _Linear(ops.matmul_int4, ops.prepare_int4(weight, self._device), bias)

    def _rope_table(self) -> Any:
        rope = self.spec.rope
        if rope is None:
            return None
        return rope_table(rope.inverse_frequencies(), rope.scaling.magnitude, self.cache.max_tokens, self._device)

    def _new_buffers(self) -> _Buffers:
        spec = self.spec
        inner = spec.ffn_size * (2 if spec.gated else 1)
        widths = (spec.hidden_size, spec.hidden_size, spec.query_size + 2 * spec.kv_size, spec.query_size)
        floats = [
            torch.zeros(MAX_ROWS, width, device=self._device)
            for width in (*widths, inner, spec.ffn_size, spec.hidden_size)
        ]
        integers = [torch.zeros(MAX_ROWS, dtype=torch.int32, device=self._device) for _ in range(2)]
        return _Buffers(*floats, *integers)


def recorder_for(device: Any, operations: GpuOperations) -> Recorder | None:
    """A recorder of CUDA graphs where the device has them and every operation allows it."""
    return CudaGraphRecorder(device) if device.type == "cuda" and operations.is_capturable else None


def _entered(device: Any) -> AbstractContextManager[Any]:
    """Inside, launches go to this GPU: Triton and graphs take the current one, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
