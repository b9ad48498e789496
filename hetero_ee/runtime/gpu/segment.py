"""Consecutive decoder blocks on a GPU, whose launches a CUDA graph can replay.

Launches depend only on the number of rows and whether they are a tree of drafts: buffers stay in place, and lengths,
positions, paths and pages are read from device memory, so growing contexts need no new graph. Passes with many rows, as
of prompts, are not recorded, since their launches are a small part of their time. Without a recorder all launches are
made one by one, with the same results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import GpuCache
from hetero_ee.kv.gpu_recurrent import GpuRecurrentCache
from hetero_ee.layers import decoder
from hetero_ee.layers.state import RecurrentState
from hetero_ee.models.blocks import Block, bind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.arena import HIDDEN, MAX_ROWS, Arena
from hetero_ee.ops.device_weights import DeviceWeights
from hetero_ee.ops.gpu import GpuOps
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.ops.token_inputs import TokenInputs
from hetero_ee.weights.model_weights import ModelWeights

Work = Callable[[], None]
Recorder = Callable[[Work], Work]  # records the launches without computing anything, returns what makes them


class CudaGraphRecorder:
    """Records work in CUDA graphs. They share their memory, as they never run at the same time.

    Recording uses a stream of this device, since torch's own belongs to the first device that recorded in this process.
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
    """Recorded launches, by number of rows and whether they are a tree. Without `record`, nothing is recorded.

    It must not reference its owner, which could then not be freed at once if memory runs out.
    """

    def __init__(self, record: Recorder | None) -> None:
        self._record = record
        self._known: dict[tuple[int, bool], Work] = {}

    def run(self, m: int, compute: Callable[[int], None], *, is_tree: bool = False) -> None:
        """Launch compute(m), or replay the launches that it made before for m rows.

        They must be the same each time, on buffers that stay in place. The first call launches one by one, which
        compiles kernels (recording does not allow that), and then records for later calls. Recording computes nothing.
        """
        replay = self._known.get((m, is_tree))
        if replay is not None:
            replay()
            return
        compute(m)
        if self._record is not None and m <= MAX_ROWS:
            self._known[m, is_tree] = self._record(lambda: compute(m))


@dataclass(frozen=True, slots=True)
class GpuResources:
    """Holds the cache, operations and buffers of a segment. Segments of one model on one GPU may share them."""

    cache: GpuCache  # KV cache of the layers, in which sequences are opened
    operations: GpuOperations
    recorder: Recorder | None = None  # records CUDA graphs, see recorder_for; None launches everything one by one
    arena: Arena | None = None  # buffers; each segment makes its own if None
    inputs: TokenInputs | None = None  # looks up what layers read of tokens; None if they read nothing


class GpuSegment:
    """Consecutive attentions and FFNs of a model on a GPU.

    Matrices must be in tiles, those of sparse FFNs in rows.

    Args:
        weights: weights of the blocks, or DeviceWeights shared with other segments.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights | DeviceWeights,
        blocks: Sequence[Block],
        resources: GpuResources,
    ) -> None:
        self.spec, self.cache = spec, resources.cache
        cache, recorder = resources.cache, resources.recorder
        self._device = cache.device
        self._arena = resources.arena or Arena(spec, cache)
        self._ops = GpuOps(resources.operations, self._device, self._arena)
        if isinstance(weights, ModelWeights):
            weights = DeviceWeights(self._ops, weights, blocks)
        self._blocks = [bind(self._ops, spec, block, weights.of(block), cache) for block in blocks]
        self._inputs = resources.inputs if any(block.mixer.reads_tokens for block in self._blocks) else None
        self._has_state = any(block.mixer.has_state for block in self._blocks)
        self._parts = {
            cache.part(block.layer) for block in blocks if block.state is not None and block.layer is not None
        }
        self._recurrent: dict[GpuRecurrentCache, list[int]] = {}  # layers with such a state, by the cache that has it
        for block in blocks:
            if isinstance(block.state, RecurrentState) and block.layer is not None:
                self._recurrent.setdefault(cast(GpuRecurrentCache, cache.part(block.layer)), []).append(block.layer)
        self._n_neurons = sum(block.mixer.n_neurons for block in self._blocks)
        self._recorder, self._replays, self._version = recorder, Replays(recorder), 0

    @torch.inference_mode()
    def run(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Run hidden states (m, hidden), fp32 on the device, through the blocks.

        The cache, to which the batch must have been admitted, is filled. Raises: ValueError: if the shape is wrong.
        """
        if self._n_neurons:
            self._arena.n_neurons += int(batch.may_skip().sum()) * self._n_neurons
        with entered(self._device):
            out = torch.empty(hidden.shape, device=self._device)
            for rows, m in self._placed(hidden, batch):
                self._current_replays().run(m, self._compute, is_tree=self._arena.is_tree)
                out[rows] = self._hidden(m)
        return out

    @torch.inference_mode()
    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the mixer of this segment's only block, without norms: (m, K) -> (m, hidden). Launched one by one."""
        (block,), out = self._blocks, torch.empty(len(batch), self.spec.hidden_size, device=self._device)
        with entered(self._device):
            for rows, m in self._placed(None, batch):
                out[rows] = block.mixer.forward(self._ops, x[rows].contiguous(), self._arena.tokens(m))
        return out

    def _placed(self, hidden: Tensor | None, batch: Batch) -> Iterator[tuple[slice, int]]:
        """Copy parts of the batch into the arena, one after the other, and yield each part's rows and their number."""
        if hidden is not None and tuple(hidden.shape) != (len(batch), self.spec.hidden_size):
            raise ValueError(
                f"hidden states are {tuple(hidden.shape)} for {len(batch)} rows of {self.spec.hidden_size}."
            )
        slots = self.cache.slots(batch) if self._has_state else [0] * len(batch)
        may_skip = batch.may_skip().tolist() if self.spec.neuron_major else None
        inputs = None if self._inputs is None else self._inputs(batch)
        for first in range(0, len(batch), self._arena.n_rows):
            rows = slice(first, min(first + self._arena.n_rows, len(batch)))
            if hidden is not None:
                self._hidden(rows.stop - first).copy_(hidden[rows])
            skips = may_skip[rows] if may_skip is not None else None
            self._arena.place(slots[rows], batch.positions[rows], skips, batch.paths[rows])
            if inputs is not None:
                self._arena.place_inputs(*(each[rows] for each in inputs))
            with ExitStack() as passing:
                for state, layers in self._recurrent.items():
                    passing.enter_context(state.passing(batch.sequences[rows], batch.positions[rows], layers))
                yield rows, rows.stop - first

    def _current_replays(self) -> Replays:
        """Return the recorded launches, without those on tensors of the cache that have been replaced."""
        version = sum(part.version for part in self._parts)
        if version != self._version:
            self._version, self._replays = version, Replays(self._recorder)
        return self._replays

    def _hidden(self, m: int) -> Tensor:
        """Return the arena's buffer of m rows of hidden states."""
        return self._arena.rows(HIDDEN, m, self.spec.hidden_size)

    def _compute(self, m: int) -> None:
        """Run m rows through the blocks, in place. The launches depend only on m and on whether they are a tree."""
        decoder.forward(self._ops, self._blocks, self._hidden(m), self._arena.tokens(m))


def recorder_for(device: Any, operations: GpuOperations) -> Recorder | None:
    """Return a recorder of CUDA graphs if the device and all operations support them, else None."""
    return CudaGraphRecorder(device) if device.type == "cuda" and operations.is_capturable else None


def entered(device: Any) -> AbstractContextManager[Any]:
    """Return a context in which this GPU is the current one, where Triton and graphs launch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
