"""When the CPU, the GPU and the link are free, pass after pass: what overlaps and what waits, by expected times alone.

The host begins the GPU's work and waits for what comes back. Hidden states never wait for weights on the link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

from hetero_ee.models.blocks import BlockKind
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.statistics import PromptReading
from hetero_ee.planning.times.costs import N_STREAM_BUFFERS, Costs, reads_on_cpu


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a pass."""

    seconds: float = 0.0
    transfer_s: float = 0.0  # hidden states and logits between the devices
    waited_s: float = 0.0  # computing that had to wait for a copy

    def since(self, before: "PassTime") -> "PassTime":
        """What came after `before`, both counted from one moment on."""
        return PassTime(
            self.seconds - before.seconds, self.transfer_s - before.transfer_s, self.waited_s - before.waited_s
        )


@dataclass(frozen=True, slots=True)
class Flow:
    """Tokens on their way through the parts."""

    ready_s: float
    on_gpu: bool | None = False  # where they are; None after a part that both devices compute


class Lanes:
    """A simulation that begins at 0, nothing copied yet. Copies of streamed weights run ahead as far as there are
    buffers, also into the next pass, if it streams the same parts; if not, they begin again.

    beside_cpu: see Costs.copy_s.
    """

    def __init__(self, costs: Costs, *, beside_cpu: bool) -> None:
        self._costs, self._beside_cpu = costs, beside_cpu
        self._cpu_s = self._gpu_s = self._link_s = 0.0
        self._buffers_s = [0.0] * N_STREAM_BUFFERS  # when each is free, the next one first
        self._order: list[tuple[Part, Placement]] = []  # what is streamed, pass after pass
        self._context_tokens = 0
        self.spent = PassTime()  # everything so far; seconds: where the host is

    def entered(self, on_gpu: bool = False) -> Flow:
        """Tokens that begin now, on the CPU or where the embedding lies."""
        return Flow(self._cpu_s, on_gpu)

    def begin(self, parts: Sequence[Part], placements: Sequence[Placement], context_tokens: int) -> None:
        """A pass through these parts follows, so that their copies may begin."""
        order = [(part, placement) for part, placement in zip(parts, placements, strict=True) if placement.is_streamed]
        if order and [part.name for part, _ in order] != [part.name for part, _ in self._order]:
            self._drop_copies()
            self._order = order
        self._context_tokens = context_tokens

    def through(
        self, parts: Sequence[Part], placements: Sequence[Placement], m: int, context_tokens: int, flow: Flow
    ) -> Flow:
        """m tokens through these parts in order, as soon as the devices are free.

        A streamed part's buffer is free once the part has been computed.
        """
        costs, transfer_s = self._costs, self._costs.transfer_s(m)
        part_s = costs.part_s
        cpu, gpu, link, buffers = self._cpu_s, self._gpu_s, self._link_s, self._buffers_s
        ready, on_gpu = flow.ready_s, flow.on_gpu
        waited_s = 0.0
        n_transfers = 0
        for part, placement in zip(parts, placements, strict=True):
            seconds = part_s(part, placement, m, context_tokens)
            computes_on_gpu = placement.on_gpu
            if part.kind is BlockKind.EMBEDDING:
                on_gpu = computes_on_gpu  # ids come with the launches
            if on_gpu is not None and on_gpu != computes_on_gpu:
                n_transfers += 1
                ready = (max(cpu, gpu) if computes_on_gpu else max(cpu, ready)) + transfer_s
            on_gpu = computes_on_gpu
            if placement.is_split:
                first_s, hot_s, cold_s = costs.split_s(part, placement, m)
                start = max(cpu, gpu, ready) + first_s
                gpu = ready = start + max(hot_s, cold_s)
                cpu = start + cold_s - transfer_s
                continue
            if not on_gpu:
                cpu = ready = max(cpu, ready) + seconds
                continue
            start = max(cpu, gpu, ready)
            if placement.is_streamed:
                copy_s = costs.copy_s(part, placement, context_tokens, beside_cpu=self._beside_cpu)
                link = max(link, buffers[0]) + copy_s
                waited_s += max(0.0, link - start)
                start = max(start, link)
                buffers = [*buffers[1:], start + seconds]
            gpu = ready = start + seconds
        self._cpu_s, self._gpu_s, self._link_s, self._buffers_s = cpu, gpu, link, buffers
        self._spend(n_transfers * transfer_s, waited_s)
        return Flow(ready, on_gpu)

    def finish_logits(self, flow: Flow, m: int) -> None:
        """The host waits for these logits of m tokens, which come over the link where the GPU has computed them."""
        self.wait(flow, self._costs.logits_transfer_s(m) if flow.on_gpu else 0.0)

    def finish_draft(self, flow: Flow, end_s: float, *, on_gpu: bool) -> None:
        """The host waits for a token that is judged on that device, in end_s."""
        transfer_s, cpu, gpu, ready = self._costs.transfer_s(1), self._cpu_s, self._gpu_s, flow.ready_s
        crosses = flow.on_gpu is not None and flow.on_gpu != on_gpu
        if crosses:
            ready = (max(cpu, gpu) if on_gpu else max(cpu, ready)) + transfer_s
            self._spend(transfer_s)
        if on_gpu:
            self._gpu_s = max(cpu, gpu, ready) + end_s
            self.wait(Flow(self._gpu_s), transfer_s)
        else:
            self._cpu_s = max(cpu, ready) + end_s
            self._spend()

    def wait(self, flow: Flow, transfer_s: float = 0.0) -> None:
        """The host waits for the hidden states where they are, or for what is transferred of them."""
        self._cpu_s = max(self._cpu_s, flow.ready_s) + transfer_s
        self._spend(transfer_s)

    def read_states(
        self,
        reading: PromptReading,
        flow: Flow,
        m: int,
        context_tokens: int,
        *,
        normed_on_gpu: bool,
        embedded_on_gpu: bool,
    ) -> None:
        """m tokens' states are normed on that device, and drafts read them, and the tokens' embeddings, on theirs. The
        host goes on where the GPU does that."""
        transfer_s, seconds = self._costs.transfer_s(m), reading.chunk_s(m, context_tokens)
        start = normed_on_gpu if flow.on_gpu is None else flow.on_gpu
        states = pairwise((start, normed_on_gpu, reading.on_gpu))
        for here, there in (*states, (embedded_on_gpu and not reading.own_embedding, reading.on_gpu)):
            if there and not here:
                self._to_gpu(transfer_s)
            elif here and not there:
                self.wait(Flow(max(self._gpu_s, flow.ready_s)), transfer_s)
        if reading.on_gpu:
            self._gpu_s += seconds
        else:
            self._cpu_s += seconds
        self._spend()

    def _to_gpu(self, transfer_s: float) -> None:
        """What comes there after all that the GPU was given."""
        self._gpu_s = max(self._gpu_s, self._cpu_s) + transfer_s
        self._spend(transfer_s)

    def _spend(self, transfer_s: float = 0.0, waited_s: float = 0.0) -> None:
        spent = self.spent
        self.spent = PassTime(self._cpu_s, spent.transfer_s + transfer_s, spent.waited_s + waited_s)

    def whole_pass(self, parts: Sequence[Part], placements: Sequence[Placement], m: int, context_tokens: int) -> None:
        """m tokens through all these parts; the host waits for the end, and for logits where the head is the last."""
        self.begin(parts, placements, context_tokens)
        flow = self.through(parts, placements, m, context_tokens, self.entered())
        if parts[-1].kind is BlockKind.HEAD:
            self.finish_logits(flow, m)
        else:
            self.wait(flow)

    def _drop_copies(self) -> None:
        """Those that ran ahead still take their time on the link, for nothing; buffers are free when the GPU is."""
        for (part, placement), free_s in zip(cycle(self._order), self._buffers_s):
            copy_s = self._costs.copy_s(part, placement, self._context_tokens, beside_cpu=self._beside_cpu)
            self._link_s = max(self._link_s, free_s) + copy_s
        self._buffers_s = [max(self._cpu_s, self._gpu_s)] * N_STREAM_BUFFERS


def pass_time(
    costs: Costs, parts: Sequence[Part], placements: Sequence[Placement], m: int, context_tokens: int
) -> PassTime:
    """One of many alike: m tokens through these parts, beginning on the CPU.

    Where weights are streamed it is the third, whose first copies ran under the end of the second.
    """
    lanes = Lanes(costs, beside_cpu=reads_on_cpu(parts, placements))
    for _ in range(2 if any(placement.is_streamed for placement in placements) else 0):
        lanes.whole_pass(parts, placements, m, context_tokens)
    before = lanes.spent
    lanes.whole_pass(parts, placements, m, context_tokens)
    return lanes.spent.since(before)
