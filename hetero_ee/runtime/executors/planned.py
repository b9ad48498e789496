"""Runs a plan: each block on its device, with transfers of hidden states and streamed weights.

The host waits for the GPU only when it needs a result on the CPU. So while the CPU runs the later layers of a prompt's
chunk, the GPU's first layers already run the next chunk.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from hetero_ee.costs.work import Work
from hetero_ee.errors import DeviceLostError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import DeviceCaches
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.device import Allocation, Device, Event, T
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.devices.traffic import Traffic
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.executors.executor import BlockExecutor, Executor, HostExecutor, Observe
from hetero_ee.runtime.route import DECODE, PREFILL, Route, Segment
from hetero_ee.runtime.streaming.weight_streams import WeightStreams
from hetero_ee.runtime.work import BlockWorks, n_hot
from hetero_ee.weights.model_weights import ModelWeights

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool


@dataclass(frozen=True, slots=True)
class _Flow:
    """Hidden states on their way through the plan, with the captured ones.

    A device may read them once the events in `ready` are reached.
    """

    hidden: Tensor
    ready: tuple[Event, ...] = ()
    captured: tuple[Tensor, ...] = ()


class PlannedExecutor(Executor):
    """Runs a plan on a machine. Logits are returned on the CPU, other results on the device that computed them.

    Args:
        gpu: executor of the GPU; None if the plan puts nothing there.
        streams: runs blocks whose weights are streamed; None if there are none.
        claims: memory to free at the end.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        plan: Plan,
        machine: Machine,
        cpu: HostExecutor,
        gpu: BlockExecutor | None,
        streams: WeightStreams | None = None,
        claims: Sequence[Allocation] = (),
    ) -> None:
        self.spec, self.weights, self.plan, self.machine = spec, weights, plan, machine
        self.blocks = decoder_blocks(spec)
        self.prompt_chunk_tokens = plan.prefill_chunk_tokens
        self._cpu_executor, self._gpu_executor, self._streams, self._claims = cpu, gpu, streams, claims
        self._executors: list[BlockExecutor] = [cpu] if gpu is None else [cpu, gpu]
        self.cache = DeviceCaches([each.cache for each in self._executors], plan.snapshot_bytes)
        self._route = Route(plan, self.blocks)
        self.overlap = self._route.overlap
        self._works = BlockWorks(spec, self.blocks, plan.kv_type)

    @property
    def pool(self) -> "ThreadPool | None":
        return self._cpu_executor.pool

    def close(self) -> None:
        """Free all memory, even if a lost device no longer answers."""
        with ExitStack() as given_back:
            for claim in self._claims:
                given_back.callback(claim.free)
            for executor in (*self._executors, *self.machine.opened_beside):
                given_back.callback(executor.close)
            if self._streams is not None:
                with suppress(DeviceLostError):
                    self._streams.close()

    def run(self, batch: Batch, hidden: Tensor | None, layers: range) -> Tensor:
        """Run the batch through these layers as in Executor.run. If this fails, the cache is rolled back."""
        with self._admitted(batch, layers):
            found = self._through(batch, self._entered(batch, hidden), self._segments(batch, layers))
        self.captured = found.captured
        return found.hidden

    def capture(self, layers: Sequence[int]) -> None:
        """Capture states as in Executor.capture. A new segment starts at each of these layers."""
        super().capture(layers)
        self._route = Route(self.plan, self.blocks, self.capturing)

    @contextmanager
    def _admitted(self, batch: Batch, layers: range) -> Iterator[None]:
        """Admit the batch to the cache of these layers, and roll back if the `with` block fails."""
        if layers:
            self.cache.admit(batch, layers)
        try:
            yield
        except BaseException:
            if layers:
                self._take_back(batch, layers)
            raise

    def on_cpu(self, hidden: Tensor) -> Tensor:
        return self._moved(_Flow(hidden), False).hidden

    def prompt(self, chunks: Iterable[Batch], observe: Observe | None = None) -> Tensor:
        """Run a prompt's chunks, two at a time on different devices. If one fails, unfinished ones are rolled back."""
        every = range(self.spec.n_layers)
        unfinished: list[Batch] = []
        waiting: tuple[Batch, _Flow, Sequence[Segment]] | None = None  # a chunk whose first segments run already
        flow: _Flow | None = None
        try:
            for batch in chunks:
                if waiting is not None and any(segment.is_streamed for segment in waiting[2]):
                    flow, waiting = self._finished(*waiting, observe, unfinished), None  # copies come in a pass's order
                self.cache.admit(batch, every)
                unfinished.append(batch)
                segments = self._segments(batch, every)
                n_first = next((i for i, each in enumerate(segments) if not each.on_gpu), len(segments))
                first = self._through(batch, self._entered(batch, None), segments[:n_first])
                if waiting is not None:
                    self._finished(*waiting, observe, unfinished)
                waiting = batch, first, segments[n_first:]
            assert waiting is not None, "a prompt has a token"
            flow = self._finished(*waiting, observe, unfinished)
        except BaseException:
            for batch in unfinished:
                self._take_back(batch, every)
            raise
        return self._to_logits(_Flow(flow.hidden[-1:], flow.ready))[0]

    def _finished(
        self, batch: Batch, flow: _Flow, segments: Sequence[Segment], observe: Observe | None, unfinished: list[Batch]
    ) -> _Flow:
        """Run the oldest unfinished chunk through the rest of its segments."""
        found = self._through(batch, flow, segments)
        if observe is not None:
            observe(batch, self.final_norm(found.hidden), *found.captured)
        unfinished.remove(batch)
        return found

    def _take_back(self, batch: Batch, layers: range) -> None:
        for _, sequence, position in batch.entries():
            self.cache.cut(sequence, position, layers)

    def to_logits(self, hidden: Tensor) -> Tensor:
        return self._to_logits(_Flow(hidden))

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm on the head's device. Its time counts as the head's."""
        flow, (executor, device) = self._moved(_Flow(hidden), self.head_on_gpu), self._executor(self.head_on_gpu)
        found, _ = device.run([], lambda: self._marked(executor.final_norm(flow.hidden)), flow.ready)
        return found.clone() if found is flow.hidden else found  # transfers arrive in a reused buffer

    def lm_head(self, normed: Tensor) -> Tensor:
        return self._logits(_Flow(normed), lambda executor, x: executor.lm_head(x), self._head_works(len(normed)))

    def partial_logits(self, hidden: Tensor, token_ids: Tensor, end: DraftEnd) -> Tensor:
        works = self._works.head(self.blocks[-1], end).candidates(*token_ids.shape)
        return self._logits(_Flow(hidden), lambda executor, x: executor.partial_logits(x, token_ids, end), works)

    def draft_rows(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> Tensor:
        moved, (executor, device) = self._moved(_Flow(hidden), self.head_on_gpu), self._executor(self.head_on_gpu)
        works = self._works.head(self.blocks[-1], end).draft(len(noise))
        found, event = self._ran(
            device, works, lambda: self._marked(executor.draft_rows(moved.hidden, noise, end)), moved.ready
        )
        return self._moved(_Flow(found, (event,)), False, "drafts").hidden

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        works = self._works.head(self.blocks[-1], end).logits(len(hidden))
        return self._logits(_Flow(hidden), lambda executor, x: executor.draft_logits(x, end), works)

    @property
    def neurons(self) -> NeuronCounts:
        """Numbers of neurons used so far. The host waits for the GPU if it has sparse FFNs."""
        counted = NeuronCounts()
        for on_gpu in (False, True)[: len(self._executors) if self.spec.neuron_major else 0]:
            executor, device = self._executor(on_gpu)
            counted += device.run([], partial(getattr, executor, "neurons"))[0]
        return counted

    @property
    def traffic(self) -> Traffic:
        return self.machine.traffic

    @property
    def head_on_gpu(self) -> bool:
        return self._route.place(self.blocks[-1]).on_gpu

    def _executor(self, on_gpu: bool) -> tuple[BlockExecutor, Device]:
        if not on_gpu:
            return self._cpu_executor, self.machine.cpu
        assert self._gpu_executor is not None, "the plan has a part on a GPU that is not there"
        return self._gpu_executor, self.machine.device(on_gpu=True)

    def _segments(self, batch: Batch, layers: range) -> tuple[Segment, ...]:
        """Return the segments that the batch passes, and start copying the weights that they stream."""
        kind = PREFILL if self.plan.prefills(len(batch)) else DECODE
        segments = self._route.segments(kind, layers)
        if self._streams is not None:
            self._streams.begin([block for each in segments if each.is_streamed for block in each.blocks])
        return segments

    def _entered(self, batch: Batch, hidden: Tensor | None) -> _Flow:
        if hidden is not None:
            return _Flow(hidden)
        on_gpu = self._route.place(self.blocks[0]).on_gpu
        executor, device = self._executor(on_gpu)

        def embed() -> Tensor:
            found = executor.embed(batch)
            return self.machine.copier.to_gpu(found) if on_gpu else found

        found, event = device.run(self._works.through(self.blocks[:1], batch), embed)
        return _Flow(found, (event,) if on_gpu else ())

    def _through(self, batch: Batch, flow: _Flow, segments: Sequence[Segment]) -> _Flow:
        captured = flow.captured
        for segment in segments:
            if segment.is_captured:
                captured = (*captured, flow.hidden)
            flow = self._moved(flow, segment.on_gpu)
            flow = self._through_segment(batch, flow, segment)
        return replace(flow, captured=captured)

    def _through_segment(self, batch: Batch, flow: _Flow, segment: Segment) -> _Flow:
        if segment.is_streamed:
            return self._streamed(batch, flow, segment)
        if segment.is_split:
            return self._split(batch, flow, segment)
        return self._computed(batch, flow, segment)

    def _computed(self, batch: Batch, flow: _Flow, segment: Segment) -> _Flow:
        executor, device = self._executor(segment.on_gpu)

        def compute() -> Tensor:
            found = executor.forward(flow.hidden, batch, segment.blocks)
            return self.machine.copier.to_gpu(found) if segment.on_gpu else found

        found, event = self._ran(device, self._segment_works(batch, segment), compute, flow.ready)
        return _Flow(found, (event,) if segment.on_gpu else ())

    def _split(self, batch: Batch, flow: _Flow, segment: Segment) -> _Flow:
        """Run an FFN that is split between GPU and CPU.

        The GPU starts its neurons before the host waits for the input and computes the CPU's neurons. The CPU's sum
        needs no wait for a transfer buffer, since the GPU had read all earlier transfers before it began.
        """
        (block,), (_, cpu), (_, gpu) = segment.blocks, self._executor(False), self._executor(True)
        n_first, to_gpu = n_hot(block, segment.place), self.machine.copier.to_gpu
        first, hot, cold = self._works.split(block, batch, segment.place)
        here, there = (executor.split(block, n_first) for executor in self._executors)
        x, begun = gpu.run([first], lambda: to_gpu(there.begin(flow.hidden, batch)), flow.ready)
        sums, added = gpu.run([hot], lambda: there.first_sums(x, batch))
        moved = self._moved(_Flow(x, (begun,)), False)
        rest, _ = self._ran(cpu, [cold], lambda: here.rest(moved.hidden, batch), moved.ready)
        back = self._moved(_Flow(rest, (begun,)), True)
        found, event = gpu.run([], lambda: to_gpu(there.end(flow.hidden, x, sums, back.hidden)), (added, *back.ready))
        return _Flow(found, (event,))

    def _streamed(self, batch: Batch, flow: _Flow, segment: Segment) -> _Flow:
        """Run streamed blocks one by one. Each waits for its weights and for the previous block."""
        assert self._streams is not None
        for block, work in zip(segment.blocks, self._segment_works(batch, segment), strict=True):
            found, event = self._streams.run(block, segment.place, batch, flow.hidden, flow.ready, work)
            flow = _Flow(found, (event,))
        return flow

    def _segment_works(self, batch: Batch, segment: Segment) -> list[Work]:
        return self._works.through(segment.blocks, batch, from_disk=segment.place.reads_disk)

    def _ran(
        self, device: Device, works: Sequence[Work], compute: Callable[[], T], ready: Sequence[Event]
    ) -> tuple[T, Event]:
        """Run `compute` on a device after the events `ready`, and count the weights that the CPU reads."""
        if device is self.machine.cpu:
            self.machine.traffic.read(works)
        return device.run(works, compute, ready)

    def _moved(self, flow: _Flow, to_gpu: bool, name: str = "hidden states") -> _Flow:
        """Move hidden states to the GPU or the CPU, unless they are there. The host waits for transfers to the CPU."""
        return _Flow(*self.machine.moved(name, flow.hidden, flow.ready, to_gpu=to_gpu))

    def _to_logits(self, flow: _Flow) -> Tensor:
        return self._logits(flow, lambda executor, x: executor.to_logits(x), self._head_works(len(flow.hidden)))

    def _head_works(self, m: int) -> list[Work]:
        return self._works.head(self.blocks[-1]).logits(m)

    def _logits(self, flow: _Flow, compute: Callable[[BlockExecutor, Tensor], Tensor], works: Sequence[Work]) -> Tensor:
        """Run compute(executor, hidden) on the head's device and transfer the result to the CPU."""
        moved, (executor, device) = self._moved(flow, self.head_on_gpu), self._executor(self.head_on_gpu)
        found, event = self._ran(device, works, lambda: self._marked(compute(executor, moved.hidden)), moved.ready)
        logits = self._moved(_Flow(found, (event,)), False, "logits").hidden
        return logits.clone() if self.head_on_gpu else logits  # transfers arrive in a reused buffer

    def _marked(self, x: Tensor) -> Tensor:
        """Mark x as a GPU tensor if the head is on the GPU, which matters for emulated GPUs."""
        return self.machine.copier.to_gpu(x) if self.head_on_gpu else x
