"""Simulates when the CPU, the GPU and the link are busy during consecutive passes, from expected times.

The host launches the GPU's work and waits for its results. Hidden states never wait for weights on the link.
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
    """Seconds of one or more passes, with the shares spent on transfers and on waiting."""

    seconds: float = 0.0
    transfer_s: float = 0.0  # hidden states and logits between the devices
    waited_s: float = 0.0  # computing that waited for a copy

    def since(self, before: "PassTime") -> "PassTime":
        """Return the times spent since the earlier total `before`."""
        return PassTime(
            self.seconds - before.seconds, self.transfer_s - before.transfer_s, self.waited_s - before.waited_s
        )


@dataclass(frozen=True, slots=True)
class Flow:
    """Hidden states between two parts: when they are ready, and on which device."""

    ready_s: float
    on_gpu: bool | None = False  # their device; None after a part that both compute


class Lanes:
    """A simulation of CPU, GPU and link that begins at 0 seconds with nothing copied.

    While parts "visit", the CPU computes more than it reads, unless it computes experts, which few tokens choose.

    Copies of streamed weights run ahead as far as there are buffers, also into the next pass if it streams the same
    parts. If it streams others, its copies start with the pass.

    Args:
        beside_cpu: of parts that are streamed for each token, see Costs.copy_s.
    """

    def __init__(self, costs: Costs, *, beside_cpu: bool) -> None:
        self._costs, self._beside_cpu = costs, beside_cpu
        self._cpu_s = self._gpu_s = self._link_s = 0.0
        self._buffers_s = [0.0] * N_STREAM_BUFFERS  # when each is free, in order of use
        self._order: list[tuple[Part, Placement]] = []  # streamed parts, pass after pass
        self._visits_beside_cpu = False  # whether "visit" copies share RAM with experts that the CPU reads
        self._context_tokens = 0
        self.spent = PassTime()  # so far; its seconds are the host's clock

    def entered(self, on_gpu: bool = False) -> Flow:
        """Return the flow of tokens that start now on the device of the embedding."""
        return Flow(self._cpu_s, on_gpu)

    def begin(self, parts: Sequence[Part], placements: Sequence[Placement], context_tokens: int) -> None:
        """Announce a pass through these parts, so that copies of its streamed weights can start."""
        order = [(part, placement) for part, placement in zip(parts, placements, strict=True) if placement.is_streamed]
        if order and [part.name for part, _ in order] != [part.name for part, _ in self._order]:
            self._drop_copies()
            self._order = order
            pairs = zip(parts, placements, strict=True)
            self._visits_beside_cpu = any(part.has_experts and placement.uses_cpu for part, placement in pairs)
        self._context_tokens = context_tokens

    def through(
        self, parts: Sequence[Part], placements: Sequence[Placement], m: int, context_tokens: int, flow: Flow
    ) -> Flow:
        """Run m tokens through these parts in order, as soon as the devices are free, and return where they end.

        A streamed part's buffer is free again once the part is computed.
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
                on_gpu = computes_on_gpu  # ids arrive with the launches
            if on_gpu is not None and on_gpu != computes_on_gpu:
                n_transfers += 1
                ready = (max(cpu, gpu) if computes_on_gpu else max(cpu, ready)) + transfer_s
            on_gpu = computes_on_gpu
            if not on_gpu:
                cpu = ready = max(cpu, ready) + seconds
                continue
            if placement.is_split:
                first_s, hot_s, cold_s = costs.split_s(part, placement, m)
                start = max(cpu, gpu, ready) + first_s
                gpu = ready = start + max(hot_s, cold_s)
                cpu = start + cold_s - transfer_s
                continue
            start = max(cpu, gpu, ready)
            if placement.is_streamed:
                copy_s = self._copy_s(part, placement, context_tokens)
                link = max(link, buffers[0]) + copy_s
                waited_s += max(0.0, link - start)
                start = max(start, link)
                buffers = [*buffers[1:], start + seconds]
            gpu = ready = start + seconds
        self._cpu_s, self._gpu_s, self._link_s, self._buffers_s = cpu, gpu, link, buffers
        self._spend(n_transfers * transfer_s, waited_s)
        return Flow(ready, on_gpu)

    def finish_logits(self, flow: Flow, m: int) -> None:
        """Wait for the logits of m tokens, including their transfer if the GPU computed them."""
        self.wait(flow, self._costs.logits_transfer_s(m) if flow.on_gpu else 0.0)

    def finish_draft(self, flow: Flow, end_s: float, *, on_gpu: bool) -> None:
        """Judge a token at an exit layer, for end_s seconds on the head's device, and wait for the result."""
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
        """Make the host wait for hidden states and then for a transfer of transfer_s seconds."""
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
        """Run a draft source on a prompt chunk's m tokens, from their normed states and embeddings.

        The host continues while the GPU works.

        Args:
            normed_on_gpu, embedded_on_gpu: the devices of the final norm and of the embedding.
        """
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
        """Transfer data to the GPU after all work that the GPU has so far."""
        self._gpu_s = max(self._gpu_s, self._cpu_s) + transfer_s
        self._spend(transfer_s)

    def _spend(self, transfer_s: float = 0.0, waited_s: float = 0.0) -> None:
        spent = self.spent
        self.spent = PassTime(self._cpu_s, spent.transfer_s + transfer_s, spent.waited_s + waited_s)

    def whole_pass(self, parts: Sequence[Part], placements: Sequence[Placement], m: int, context_tokens: int) -> None:
        """Run m tokens through all these parts, and wait for the result: logits if the last part is the head."""
        self.begin(parts, placements, context_tokens)
        flow = self.through(parts, placements, m, context_tokens, self.entered())
        if parts[-1].kind is BlockKind.HEAD:
            self.finish_logits(flow, m)
        else:
            self.wait(flow)

    def _copy_s(self, part: Part, placement: Placement, context_tokens: int) -> float:
        beside_cpu = self._visits_beside_cpu if placement == Placement.VISIT else self._beside_cpu
        return self._costs.copy_s(part, placement, context_tokens, beside_cpu=beside_cpu)

    def _drop_copies(self) -> None:
        """Finish copies that ran ahead but aren't needed. Their buffers are free once CPU and GPU are."""
        for (part, placement), free_s in zip(cycle(self._order), self._buffers_s):
            self._link_s = max(self._link_s, free_s) + self._copy_s(part, placement, self._context_tokens)
        self._buffers_s = [max(self._cpu_s, self._gpu_s)] * N_STREAM_BUFFERS


def pass_time(
    costs: Costs, parts: Sequence[Part], placements: Sequence[Placement], m: int, context_tokens: int
) -> PassTime:
    """Return the time of one of many equal passes of m tokens.

    With streamed weights it is the third pass, whose first copies ran during the end of the second.
    """
    lanes = Lanes(costs, beside_cpu=reads_on_cpu(parts, placements))
    for _ in range(2 if any(placement.is_streamed for placement in placements) else 0):
        lanes.whole_pass(parts, placements, m, context_tokens)
    before = lanes.spent
    lanes.whole_pass(parts, placements, m, context_tokens)
    return lanes.spent.since(before)
