"""Expected time of a prompt that is read in chunks.

Parts on the GPU that come before any CPU part start a chunk while the previous chunk is still in later parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.planning.parts import Part
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.statistics import PromptReading
from hetero_ee.planning.times.costs import Costs, reads_on_cpu
from hetero_ee.planning.times.lanes import Flow, Lanes


@dataclass(frozen=True, slots=True)
class Placements:
    prefill: Sequence[Placement]  # for a chunk of a prompt
    decode: Sequence[Placement]  # when decoding, and for a short prompt or last chunk
    least_tokens: int | None = None  # see Plan.prefill_least_tokens

    def of(self, m: int) -> Sequence[Placement]:
        return self.prefill if m >= (self.least_tokens or MAX_DECODE_TOKENS + 1) else self.decode


def prompt_s(
    costs: Costs,
    parts: Sequence[Part],
    placements: Placements,
    n_tokens: int,
    chunk_tokens: int,
    reading: PromptReading | None = None,
) -> float:
    """Return the seconds to read a prompt and compute the logits of its last token."""
    lanes = Lanes(costs, beside_cpu=reads_on_cpu(parts, placements.decode))
    read_prompt(lanes, parts, placements, range(0, n_tokens, chunk_tokens), n_tokens, reading)
    return lanes.spent.seconds


def read_prompt(
    lanes: Lanes,
    parts: Sequence[Part],
    placements: Placements,
    firsts: range,
    n_tokens: int,
    reading: PromptReading | None = None,
) -> None:
    """Simulate reading the prompt up to n_tokens in chunks, then the head for its last token.

    Args:
        firsts: the first position of each chunk; its step is the chunk size.
        reading: cost of a draft source that reads the prompt too.
    """
    flow, begun = lanes.entered(), None
    for first in firsts:
        m = min(firsts.step, n_tokens - first)
        chunk = _Chunk(lanes, m, first + m, parts[1:-1], placements.of(m), reading)
        if begun is not None and begun.streams_late:
            begun.finish(flow)
            begun = None
        begun_flow = chunk.begin()
        if begun is not None:
            begun.finish(flow)
        begun, flow = chunk, begun_flow
    assert begun is not None, "a prompt has a token"
    flow = begun.finish(flow)
    lanes.finish_logits(lanes.through(parts[-1:], placements.decode[-1:], 1, n_tokens, flow), 1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of m prompt tokens on its way through the layers."""

    lanes: Lanes
    m: int
    context_tokens: int
    layers: Sequence[Part]
    every: Sequence[Placement]  # placements of all parts
    reading: PromptReading | None  # by a draft source

    @property
    def placements(self) -> Sequence[Placement]:
        return self.every[1:-1]

    @property
    def n_early(self) -> int:
        """Number of parts on the GPU before the first one on the CPU."""
        return next((i for i, each in enumerate(self.placements) if not each.on_gpu), len(self.placements))

    @property
    def streams_late(self) -> bool:
        """Whether parts after the first CPU part are streamed. Their copies keep the order of passes."""
        return any(placement.is_streamed for placement in self.placements[self.n_early :])

    def begin(self) -> Flow:
        """Run the chunk through the early parts."""
        self.lanes.begin(self.layers, self.placements, self.context_tokens)
        return self._through(slice(self.n_early), self.lanes.entered(self.every[0].on_gpu))

    def finish(self, flow: Flow) -> Flow:
        """Run the chunk through the remaining parts, then let the draft source read it."""
        found = self._through(slice(self.n_early, None), flow)
        if self.reading is not None:
            embedded, normed = (each.on_gpu for each in (self.every[0], self.every[-1]))
            self.lanes.read_states(
                self.reading, found, self.m, self.context_tokens, normed_on_gpu=normed, embedded_on_gpu=embedded
            )
        return found

    def _through(self, which: slice, flow: Flow) -> Flow:
        return self.lanes.through(self.layers[which], self.placements[which], self.m, self.context_tokens, flow)
