"""Rounds of drafts and their verification where weights are streamed: copies run ahead from each pass into the next."""

from collections.abc import Sequence
from copy import copy

from hetero_ee.planning.parts import Part
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.lanes import Flow, Lanes


class StreamedRounds:
    """A draft takes what the last of several in a row takes, a verification what is left of its round's time.

    max_rows: of one round. Rounds are taken to follow one of so many rows.
    """

    def __init__(
        self, costs: Costs, parts: Sequence[Part], places: Sequence[str], context_tokens: int, max_rows: int
    ) -> None:
        self._costs, self._parts, self._places = costs, parts, places
        self._context_tokens, self._max_rows = context_tokens, max_rows
        self._known: dict[int, tuple[float, list[float]]] = {}

    def draft_s(self, n_parts: int) -> float:
        """One row through the first parts and the exit head."""
        return self._times(n_parts)[0]

    def verify_s(self, n_parts: int, m: int) -> float:
        """m rows through the parts behind, head and the way back included."""
        draft_s, rounds_s = self._times(n_parts)
        return rounds_s[m - 1] - m * draft_s

    def _times(self, n_parts: int) -> tuple[float, list[float]]:
        """Seconds of a draft, and of rounds of 1, 2, ... rows."""
        if n_parts not in self._known:
            self._known[n_parts] = self._computed(n_parts)
        return self._known[n_parts]

    def _computed(self, n_parts: int) -> tuple[float, list[float]]:
        lanes = Lanes(self._costs)
        for _ in range(self._max_rows):
            flow = self._draft(lanes, n_parts)
        self._verify(lanes, n_parts, self._max_rows, flow)
        ends_s, rounds_s = [lanes.spent.seconds], []
        for m in range(1, self._max_rows + 1):
            flow = self._draft(lanes, n_parts)
            ends_s.append(lanes.spent.seconds)
            verified = copy(lanes)
            self._verify(verified, n_parts, m, flow)
            rounds_s.append(verified.spent.seconds - ends_s[0])
        return ends_s[-1] - ends_s[-2], rounds_s

    def _draft(self, lanes: Lanes, n_parts: int) -> Flow:
        """One row to the exit layer, where it is found afterwards, and through the exit head."""
        flow = self._through(lanes, slice(n_parts), 1, lanes.entered())
        if n_parts:
            head = self._through(lanes, slice(-1, None), 1, flow)
            lanes.finish_logits(head, 1)
        return flow

    def _verify(self, lanes: Lanes, n_parts: int, m: int, flow: Flow) -> None:
        waiting = Flow(lanes.spent.seconds, flow.on_gpu)
        lanes.finish_logits(self._through(lanes, slice(n_parts, None), m, waiting), m)

    def _through(self, lanes: Lanes, which: slice, m: int, flow: Flow) -> Flow:
        parts, places = self._parts[which], self._places[which]
        lanes.begin(parts, places, self._context_tokens)
        return lanes.through(parts, places, m, self._context_tokens, flow)
