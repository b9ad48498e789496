"""Consecutive decoder layers on a GPU: the same launches for every pass of m rows, for a CUDA graph to replay where
they are few: a prompt's chunk takes longer than its launches.

Buffers stay where they are, and lengths, positions and pages are read from device memory: nothing is recorded again
when contexts grow. Without a recorder the launches are made one by one, with the same results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.models.blocks import Block, BlockKind, first_matrix
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.ops.gpu_weights import GpuWeights
from hetero_ee.runtime.gpu.buffers import MAX_ROWS, SegmentBuffers, SegmentRoom
from hetero_ee.weights.model_weights import ModelWeights

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
        # Only this thread's calls count as part of the recording: another one may be copying weights meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        replay: Work = graph.replay
        return replay


class Replays:
    """Recorded launches, by numbers of rows. record: None records nothing. Holds no owner: what runs out of memory must
    go without waiting for cycles to be found."""

    def __init__(self, record: Recorder | None) -> None:
        self._record = record
        self._known: dict[int, Work] = {}

    def run(self, m: int, compute: Callable[[int], None]) -> None:
        """compute: launches for so many rows, in buffers that stay where they are, always the same.

        The first pass of m rows is launched one by one: it compiles what it needs, which recording does not allow.

        Every pass computes once: recording computes nothing, and what it recorded serves from the next pass on.
        """
        replay = self._known.get(m)
        if replay is not None:
            replay()
            return
        compute(m)
        if self._record is not None and m <= MAX_ROWS:
            self._known[m] = self._record(lambda: compute(m))


class GpuSegment:
    """Attentions and FFNs of a model that follow each other. cache: holds their layers; open sequences there.

    Weights must be in tiles, neurons in rows; those of a GpuWeights, and a room, are shared with other segments.
    recorder: None runs every launch by itself, see `recorder_for`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights | GpuWeights,
        blocks: Sequence[Block],
        cache: GpuKvCache,
        operations: GpuOperations,
        recorder: Recorder | None = None,
        room: SegmentRoom | None = None,
    ) -> None:
        self.spec, self.cache = spec, cache
        self._ops = operations
        self._device = cache.pages.codes.device
        self._blocks = list(blocks)
        self._attends = any(block.kind is BlockKind.ATTENTION for block in blocks)
        self._n_neurons = sum(block.kind is BlockKind.FFN for block in blocks) * spec.ffn_size * spec.neuron_major
        if isinstance(weights, ModelWeights):
            weights = GpuWeights(weights, blocks, operations, self._device)
        self._weights, self._room = weights, room or SegmentRoom(spec, cache)
        self._replays = Replays(recorder)

    @torch.inference_mode()
    def run(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Hidden states (m, hidden) before the first block -> after the last, fp32 on the device.

        The cache, which has admitted the rows, is filled. Raises ValueError for hidden states of other shapes.
        """
        if self._n_neurons:
            self._room.n_neurons += int(batch.may_skip().sum()) * self._n_neurons
        with entered(self._device):
            out = torch.empty(hidden.shape, device=self._device)
            for rows, m in self._placed(hidden, batch):
                self._replays.run(m, self._compute)
                out[rows] = self._room.buffers.x[:m]
        return out

    @torch.inference_mode()
    def attend(self, qkv: Tensor, batch: Batch) -> Tensor:
        """Its one attention without matrices: (m, queries, keys and values) -> (m, queries). Launched one by one."""
        (block,), out = self._blocks, torch.empty(len(batch), self.spec.query_size, device=self._device)
        with entered(self._device):
            for rows, m in self._placed(None, batch):
                b = self._room.buffers.first(m)
                b.qkv.copy_(qkv[rows])
                self._attend_qkv(block, b)
                out[rows] = b.attended
        return out

    def _placed(self, hidden: Tensor | None, batch: Batch) -> Iterator[tuple[slice, int]]:
        """The batch in parts, each in the buffers while it is told: which rows, and how many."""
        if hidden is not None and tuple(hidden.shape) != (len(batch), self.spec.hidden_size):
            raise ValueError(
                f"hidden states are {tuple(hidden.shape)} for {len(batch)} rows of {self.spec.hidden_size}."
            )
        slots = self.cache.slots(batch) if self._attends else [0] * len(batch)
        may_skip = batch.may_skip().tolist() if self.spec.neuron_major else None
        for first in range(0, len(batch), self._room.n_rows):
            rows = slice(first, min(first + self._room.n_rows, len(batch)))
            skips = may_skip[rows] if may_skip is not None else None
            some = None if hidden is None else hidden[rows]
            self._room.place(some, slots[rows], batch.positions[rows], skips)
            yield rows, rows.stop - first

    def _compute(self, m: int) -> None:
        """buffers.x of m rows, before the segment -> after it. Launches alone: they depend on m and nothing else."""
        b = self._room.buffers.first(m)
        delta = None
        for block in self._blocks:
            self._normed(block, b, delta)
            (self._attend if block.kind is BlockKind.ATTENTION else self._feed_forward)(block, b)
            self._finish(block, b)
            delta = b.delta
        self._ops.add(b.x, b.delta)

    def _finish(self, block: Block, b: SegmentBuffers) -> None:
        """b.delta as it is added to the hidden state: normed, where it has such a norm, and scaled."""
        if block.has_post_norm:
            self._norm(block, "post_norm", b.delta, b.delta)
        if self.spec.residual_scale != 1:
            b.delta.mul_(self.spec.residual_scale)

    def _attend(self, block: Block, b: SegmentBuffers) -> None:
        self._multiply(b.normed, block, "qkv", b.qkv)
        self._attend_qkv(block, b)
        self._multiply(b.attended, block, "output", b.delta)

    def _attend_qkv(self, block: Block, b: SegmentBuffers) -> None:
        """b.attended of b.qkv."""
        place = self._write_kv(block, b)
        assert block.layer is not None
        spec, window = self.spec, self.spec.sliding_windows[block.layer]
        scores = {"scale": spec.attention_scale, "cap": spec.attention_cap}
        self._ops.attention(b.qkv, *place, window, b.attended, workspace=self._room.workspace, **scores)

    def _write_kv(self, block: Block, b: SegmentBuffers) -> tuple[Any, Tensor, Tensor, int]:
        """Of b.qkv: queries are turned there, keys and values are in the cache then: its pages, slots, positions and
        layer."""
        spec, ops = self.spec, self._ops
        assert block.layer is not None
        place = (self.cache.pages, b.slots, b.positions, self.cache.index(block.layer))
        if spec.qk_norm:
            n_queries, n_keys = (1, 1) if spec.qk_norm_whole else (spec.n_heads, spec.n_kv_heads)
            query_scale, key_scale = self._weights.vector(block, "query_norm"), self._weights.vector(block, "key_norm")
            ops.rms_norm_heads(b.qkv, query_scale, spec.norm_eps, 0, n_queries)
            ops.rms_norm_heads(b.qkv, key_scale, spec.norm_eps, spec.query_size, n_keys)
        turns = self._room.turns[spec.rope_of(block.layer)]
        ops.kv_write(b.qkv, *place, spec.query_size, spec.query_size + spec.kv_size, turns=turns)
        return place

    def _feed_forward(self, block: Block, b: SegmentBuffers) -> None:
        spec = self.spec
        if spec.neuron_major:
            self._sum_neurons(block, b)
            return
        self._multiply(b.normed, block, "gate_up" if spec.gated else "up", b.inner)
        self._ops.activate(b.inner, spec.activation, b.active, gated=spec.gated, threshold=spec.activation_threshold)
        self._multiply(b.active, block, "down", b.delta)

    def _sum_neurons(self, block: Block, b: SegmentBuffers) -> None:
        """An FFN whose inactive neurons are not read."""
        spec, weights = self.spec, self._weights
        if spec.predictor_rank:
            self._score(block, b)
        self._multiply_first(block, b, b.inner)
        self._ops.activate(b.inner, spec.activation, b.active, gated=False, threshold=spec.activation_threshold)
        up = weights.neurons(block, "up") if spec.gated else None
        skips = {"least": weights.least(block), "may_skip": b.may_skip, "n_used": self._room.n_used}
        self._ops.sparse_ffn(b.normed, b.active, up, weights.neurons(block, "down"), b.delta, **skips)
        self._add_down_bias(block, b)

    def _multiply_first(self, block: Block, b: SegmentBuffers, out: Tensor) -> None:
        """out (m, N): what says which of the block's first N neurons are active, before its activation. With a
        predictor, its scores are in b.inner."""
        name, weights, skips = first_matrix(self.spec), self._weights, {}
        if not self.spec.first_in_rows:
            self._multiply(b.normed, block, name, out)
            return
        if self.spec.predictor_rank:
            skips = {"may_skip": b.may_skip, "n_used": self._room.n_predicted}
            if out is not b.inner:
                out.copy_(b.inner[:, : out.shape[1]])
        bias = weights.vector(block, f"{name}_bias")
        self._ops.masked_linear(b.normed, out, weights.neurons(block, name), out, bias=bias, **skips)

    def _score(self, block: Block, b: SegmentBuffers) -> None:
        """b.inner: the predictor's word on every neuron."""
        low = b.normed.new_empty(len(b.normed), self.spec.predictor_rank)
        self._multiply(b.normed, block, "predictor_in", low)
        self._multiply(low, block, "predictor_out", b.inner)

    def _add_down_bias(self, block: Block, b: SegmentBuffers) -> None:
        bias = self._weights.vector(block, "down_bias")
        if bias is not None:
            self._ops.add(b.delta, bias)

    def _normed(self, block: Block, b: SegmentBuffers, delta: Tensor | None) -> None:
        """b.normed: the norm of b.x, to which delta, the block before's output, is added first."""
        if not block.has_norm:
            if delta is not None:
                self._ops.add(b.x, delta)
            b.normed.copy_(b.x)
            return
        self._norm(block, "norm", b.x, b.normed, delta=delta)

    def _norm(self, block: Block, short: str, x: Tensor, out: Tensor, **more: Any) -> None:
        scale, eps = self._weights.vector(block, short), self.spec.norm_eps
        if self.spec.norm == "layer":
            self._ops.layer_norm(x, scale, self._weights.vector(block, f"{short}_bias"), eps, out, **more)
        else:
            self._ops.rms_norm(x, scale, eps, out, **more)

    def _multiply(self, x: Tensor, block: Block, short: str, out: Tensor) -> None:
        linear = self._weights.linear(block, short)
        linear.multiply(x, linear.matrix, out)
        if linear.bias is not None:
            self._ops.add(out, linear.bias)


def recorder_for(device: Any, operations: GpuOperations) -> Recorder | None:
    """A recorder of CUDA graphs where the device has them and every operation allows it."""
    return CudaGraphRecorder(device) if device.type == "cuda" and operations.is_capturable else None


def entered(device: Any) -> AbstractContextManager[Any]:
    """Inside, launches go to this GPU: Triton and graphs take the current one, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
