"""Expected time of exact decoding: draft-verify steps, with drafts that exit early or come from elsewhere.

A step by early exit: tokens 1, 2, ... run through the layers before the exit layer. Each but the last exits there, and
its draft is the next token. The last does not exit, or the step is full. Then one pass takes all of them through the
later layers and the head. It keeps the drafts up to the first wrong one and yields one token more. Drafts from an
n-gram source or a draft head form a sequence of a fixed length, which passes every layer at once.
Source: derived; the gated form of Leviathan-style self-speculation with the batch cost measured (docs/planning.md).
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from hetero_ee.planning.parts import Part, layer_placements, layer_starts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.statistics import DraftRates, ExitRates
from hetero_ee.planning.times.costs import Costs, reads_on_cpu
from hetero_ee.planning.times.lanes import Flow, Lanes
from hetero_ee.planning.times.overlap import overlap


@dataclass(frozen=True, slots=True)
class Step:
    """Averages of a draft-verify step."""

    seconds: float
    tokens: float  # that it generates
    batch: float  # tokens that its verification takes

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens


def exit_steps(
    rates: ExitRates, max_length: int, draft_s: float, verify_s: Callable[[int], float], ahead_s: float = 0.0
) -> list[Step]:
    """Return the average steps with at most 1, 2, ... max_length tokens in their verification.

    Args:
        draft_s: seconds of one token through the layers before the exit layer, including the exit head.
        verify_s: verify_s(m) is the seconds of m tokens through the rest and the full head.
        ahead_s: seconds saved if the first token was drafted while the step before was verified, and was right.
    """
    p, q = rates.exit_rate, rates.precision
    seconds = tokens = batch = kept = 0.0
    found = []
    for m in range(1, max_length + 1):
        reached = p ** (m - 1)  # chance to get here; without another exit the step ends
        kept += q ** (m - 1)  # j drafts right in a row give j + 1 tokens
        step_s = m * draft_s + verify_s(m)
        full_s = step_s - ahead_s * hit_chance(rates, m, is_full=True)
        ended_s = step_s - ahead_s * hit_chance(rates, m, is_full=False)
        found.append(Step(seconds + reached * full_s, tokens + reached * kept, batch + reached * m))
        ends = reached * (1 - p)
        seconds, tokens, batch = seconds + ends * ended_s, tokens + ends * kept, batch + ends * m
    return found


def hit_chance(rates: ExitRates, m: int, *, is_full: bool) -> float:
    """Return the chance that all drafts of a step of m tokens are right and so is its last token's; 0 if unknown.

    Args:
        is_full: the step had as many tokens as allowed, so that the last one was not judged.
    """
    p, q, refused = rates.exit_rate, rates.precision, rates.refused_precision
    if not refused:
        return 0.0
    last: float = p * q + (1 - p) * refused if is_full else refused
    return float(q ** (m - 1) * last)


def sequence_step(
    m: int, acceptance_at: Callable[[int], float], draft_s: float, pass_s: Callable[[int], float]
) -> Step:
    """Return the average step of m - 1 drafts and the token they follow.

    It is a lower bound: sequences that end at a doubtful draft, and n-grams around them, are faster.

    Args:
        acceptance_at: acceptance_at(j) is the chance that draft j is right if all before it are.
        pass_s: pass_s(m) is the seconds of m tokens through all layers.
    """
    tokens = right = 1.0
    for position in range(m - 1):
        right *= acceptance_at(position)
        tokens += right
    return Step((m - 1) * draft_s + pass_s(m), tokens, float(m))


class StepTimes:
    """Seconds of drafts and of their verification with given placements, at one context length.

    Args:
        max_tokens: of one verification.
        copies_ahead: simulate that copies of streamed weights run ahead from pass to pass. Otherwise each part costs
            the longer of copy and computing, which is much faster to compute for many exit layers.
        map_ranks: of exit maps, by exit layer.
    """

    def __init__(
        self,
        costs: Costs,
        parts: Sequence[Part],
        placements: Sequence[Placement],
        context_tokens: int,
        max_tokens: int,
        *,
        copies_ahead: bool = True,
        map_ranks: Mapping[int, int] | None = None,
    ) -> None:
        self._costs, self._parts, self.placements = costs, parts, placements
        self._context_tokens, self._max_tokens = context_tokens, max_tokens
        self._map_ranks = map_ranks or {}
        self.has_streams = any(placement.is_streamed for placement in placements)
        self._is_simulated = self.has_streams and copies_ahead
        on_gpu = [placement.on_gpu for placement in placements]
        self._on_gpu = [on_gpu[0], *on_gpu]  # before each part, and at the end: tokens enter on the embedding's device
        self._starts = layer_starts(parts)
        self._overlap = overlap(layer_placements(parts, placements))
        self._beside_cpu = reads_on_cpu(parts, placements)
        alone_s = (
            0.0 if placement.on_gpu else costs.part_s(part, placement, 1, context_tokens)
            for part, placement in zip(parts[::-1], placements[::-1], strict=True)
        )
        self._cpu_s = [*accumulate(alone_s, initial=0.0)][::-1]  # one token through the CPU's parts from each one on
        self._known_sums: dict[int, list[float]] = {}
        self._simulated: dict[int, tuple[float, list[float]]] = {}

    def draft_s(self, exit_layer: int) -> float:
        """Return the seconds of one token through the layers before the exit layer and the exit head."""
        if self._is_simulated:
            return self._simulation(exit_layer)[0]
        return self.layers_s(exit_layer) + self.exit_head_s(exit_layer)

    def before_s(self, exit_layer: int) -> float:
        """Return the seconds of one token through the layers before the exit layer, without the exit head."""
        return self.draft_s(exit_layer) - self.exit_head_s(exit_layer)

    def verify_s(self, exit_layer: int, m: int) -> float:
        """Return the seconds of m tokens through the layers after the exit layer, the head and the transfer back.

        An exit layer of 0 means all layers. Beyond max_tokens, as in shared passes, each token costs as
        much as the last half of those on average.
        """
        most, half = self._max_tokens, self._max_tokens // 2
        if m > most:
            most_s = self.verify_s(exit_layer, most)
            return most_s + (m - most) * (most_s - self.verify_s(exit_layer, half)) / (most - half)
        if self._is_simulated:
            draft_s, steps_s = self._simulation(exit_layer)
            return steps_s[m - 1] - m * draft_s
        sums = self._sums(m)
        return sums[-1] - sums[self._n_parts(exit_layer)]

    def exit_steps(self, exit_layer: int, rates: ExitRates, most: int) -> list[Step]:
        """Return the average steps of drafts by exit, with at most 1, 2, ... `most` tokens."""
        verify_s = partial(self.verify_s, exit_layer)
        return exit_steps(rates, most, self.draft_s(exit_layer), verify_s, self.ahead_s(exit_layer))

    def sequence_step(self, drafts: DraftRates, m: int) -> Step:
        """Return the average step of draft sequences with m tokens in a verification."""
        after_s = drafts.after_verification_s(self.placements, m)
        draft_s = drafts.seconds(self.placements)
        return sequence_step(m, drafts.acceptance_at, draft_s, lambda m: self.verify_s(0, m) + after_s)

    def layers_s(self, exit_layer: int) -> float:
        """Return the seconds of one token through the layers before the exit layer."""
        return self._sums(1)[self._n_parts(exit_layer)]

    def exit_head_s(self, exit_layer: int, *, is_partial: bool = False) -> float:
        """Return the seconds of exit map, head and judging of one token, including transfers.

        The hidden state moves to the head's device. The draft's id and confidence come back to the CPU, which costs as
        much as one hidden state. Partial judging takes a few rows of the head.
        """
        head_on_gpu = self._on_gpu[-1]
        n_transfers = (self._on_gpu[self._n_parts(exit_layer)] != head_on_gpu) + head_on_gpu
        return self._end_s(exit_layer, is_partial=is_partial) + n_transfers * self._costs.transfer_s(1)

    def _end_s(self, exit_layer: int, *, is_partial: bool = False) -> float:
        rank = self._map_ranks.get(exit_layer, 0)
        return self._costs.exit_end_s(self._parts[-1], self.placements[-1], rank, is_partial=is_partial)

    def layers_ahead(self, exit_layer: int) -> int:
        """Return how many layers the GPU computes for one token while the CPU verifies those before it.

        Layers that took longer than the verification would delay it, whether the token is right or not.
        """
        if self._overlap is None or self.has_streams:
            return 0
        cpu_s = self._cpu_s[self._n_parts(self._overlap.layers_behind(exit_layer))]
        return sum(self.layers_s(n) <= cpu_s for n in range(1, self._overlap.layers_ahead(exit_layer) + 1))

    def ahead_s(self, exit_layer: int) -> float:
        """Return the seconds of one token through the layers ahead, 0 for none."""
        n_layers = self.layers_ahead(exit_layer)
        return self.layers_s(n_layers) if n_layers else 0.0

    def _sums(self, m: int) -> list[float]:
        """Return the seconds of m tokens through the first 0, 1, ... parts, at last with the transfer of logits."""
        if m not in self._known_sums:
            costs, transfer_s, seconds = self._costs, self._costs.transfer_s(m), []
            for part, placement, devices in zip(self._parts, self.placements, pairwise(self._on_gpu), strict=True):
                part_s = costs.part_s(part, placement, m, self._context_tokens)
                if placement == "stream":
                    part_s = max(part_s, costs.copy_s(part, beside_cpu=self._beside_cpu))
                seconds.append(part_s + (transfer_s if devices[0] != devices[1] else 0.0))
            seconds.append(costs.logits_transfer_s(m) if self._on_gpu[-1] else 0.0)
            self._known_sums[m] = [*accumulate(seconds, initial=0.0)]
        return self._known_sums[m]

    def _simulation(self, exit_layer: int) -> tuple[float, list[float]]:
        """Return the seconds of a draft, and of steps of 1, 2, ... tokens, each after a step of max_tokens.

        A draft costs what the last of several costs, a verification the rest of its step.
        """
        if exit_layer not in self._simulated:
            n_parts, lanes = self._n_parts(exit_layer), Lanes(self._costs, beside_cpu=self._beside_cpu)
            for _ in range(self._max_tokens):
                flow = self._draft(lanes, exit_layer)
            self._verify(lanes, n_parts, self._max_tokens, flow)
            ends_s, steps_s = [lanes.spent.seconds], []
            for m in range(1, self._max_tokens + 1):
                flow = self._draft(lanes, exit_layer)
                ends_s.append(lanes.spent.seconds)
                verified = copy(lanes)
                self._verify(verified, n_parts, m, flow)
                steps_s.append(verified.spent.seconds - ends_s[0])
            self._simulated[exit_layer] = ends_s[-1] - ends_s[-2], steps_s
        return self._simulated[exit_layer]

    def _draft(self, lanes: Lanes, exit_layer: int) -> Flow:
        """Move one token to the exit layer, where it waits, and through the exit head."""
        n_parts = self._n_parts(exit_layer)
        flow = self._through(lanes, slice(n_parts), 1, lanes.entered())
        if n_parts:
            lanes.finish_draft(flow, self._end_s(exit_layer), on_gpu=self._on_gpu[-1])
        return flow

    def _verify(self, lanes: Lanes, n_parts: int, m: int, flow: Flow) -> None:
        waiting = Flow(lanes.spent.seconds, flow.on_gpu)
        lanes.finish_logits(self._through(lanes, slice(n_parts, None), m, waiting), m)

    def _through(self, lanes: Lanes, which: slice, m: int, flow: Flow) -> Flow:
        parts, placements = self._parts[which], self.placements[which]
        lanes.begin(parts, placements, self._context_tokens)
        return lanes.through(parts, placements, m, self._context_tokens, flow)

    def _n_parts(self, exit_layer: int) -> int:
        """Return the number of parts before the exit layer, with the embedding; 0 if drafts need no layers."""
        return self._starts[exit_layer] if exit_layer else 0
