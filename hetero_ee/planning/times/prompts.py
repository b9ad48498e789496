"""A prompt in chunks: the parts that the GPU computes before any of the CPU's begin a chunk ahead of its turn, while
the chunk before is in its later parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_ee.planning.parts import Part
from hetero_ee.planning.times.costs import MAX_DECODE_TOKENS, ON_GPU, STREAMED, Costs
from hetero_ee.planning.times.lanes import Flow, Lanes


@dataclass(frozen=True, slots=True)
class Ways:
    """Places of all parts for a chunk of a prompt, and for few rows: when decoding, and for a short last chunk."""

    prefill: Sequence[str]
    decode: Sequence[str]

    def of(self, m: int) -> Sequence[str]:
        return self.decode if m <= MAX_DECODE_TOKENS else self.prefill


def prompt_s(costs: Costs, parts: Sequence[Part], ways: Ways, n_tokens: int, chunk_tokens: int) -> float:
    """Seconds of a prompt of a text of its own, the head for its last token alone."""
    lanes = Lanes(costs)
    read_prompt(lanes, parts, ways, range(0, n_tokens, chunk_tokens), n_tokens)
    return lanes.spent.seconds


def read_prompt(lanes: Lanes, parts: Sequence[Part], ways: Ways, firsts: range, n_tokens: int) -> None:
    """Chunks that begin at these tokens, the last one up to n_tokens; then the head."""
    begun: tuple[_Chunk, Flow] | None = None
    for first in firsts:
        m = min(firsts.step, n_tokens - first)
        chunk = _Chunk(m, first + m, parts[1:-1], ways.of(m)[1:-1])
        if begun is not None and begun[0].streams_behind:
            begun[0].behind(lanes, begun[1])
            begun = None
        flow = chunk.leading(lanes)
        if begun is not None:
            begun[0].behind(lanes, begun[1])
        begun = chunk, flow
    assert begun is not None, "a prompt has a token"
    flow = begun[0].behind(lanes, begun[1])
    lanes.finish_logits(lanes.through(parts[-1:], ways.decode[-1:], 1, n_tokens, flow), 1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """m rows of a prompt, context_tokens with those before them, on their way through the layers."""

    m: int
    context_tokens: int
    layers: Sequence[Part]
    places: Sequence[str]

    @property
    def n_leading(self) -> int:
        """Parts before the first of the CPU."""
        return next((i for i, place in enumerate(self.places) if place not in ON_GPU), len(self.places))

    def leading(self, lanes: Lanes) -> Flow:
        """Through these."""
        lanes.begin(self.layers, self.places, self.context_tokens)
        return self._through(lanes, slice(self.n_leading), lanes.entered())

    def behind(self, lanes: Lanes, flow: Flow) -> Flow:
        """Through the others."""
        return self._through(lanes, slice(self.n_leading, None), flow)

    @property
    def streams_behind(self) -> bool:
        """Whether later parts wait for copies: those come in the order of a pass, so that no chunk begins ahead."""
        return any(place in STREAMED for place in self.places[self.n_leading :])

    def _through(self, lanes: Lanes, which: slice, flow: Flow) -> Flow:
        return lanes.through(self.layers[which], self.places[which], self.m, self.context_tokens, flow)
