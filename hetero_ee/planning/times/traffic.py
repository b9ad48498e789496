"""Predicts the bytes that a token moves over the link and the weights that the CPU reads for it.

They follow from the placements and from how often layers are passed. Runs count the same bytes for comparison.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_ee.costs.head_cost import HeadCost
from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.models.blocks import BlockKind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import Part, layer_starts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.statistics import DepthStatistics
from hetero_ee.planning.times.costs import N_CANDIDATES, exit_end, part_work, split_work
from hetero_ee.planning.times.early_exits import Passes
from hetero_ee.planning.times.steps import Step

WEIGHTS, KV, HIDDEN, LOGITS, DRAFTS = "weights", "keys and values", "hidden states", "logits", "drafts"
CPU_WEIGHTS = "weights read by the CPU"
DRAFT_BYTES = 2 * FLOAT_BYTES  # id and confidence


def over_link(kind: str, *, to_gpu: bool) -> str:
    """Return the name under which bytes of this kind and direction are counted."""
    return f"{kind} to the {'GPU' if to_gpu else 'CPU'}"


@dataclass(frozen=True, slots=True)
class Traversal:
    """Average passes per token in each range of layers between exit layers."""

    exit_layers: tuple[int, ...] = ()
    passes: tuple[float, ...] = (1.0,)  # each reads the weights once
    rows: tuple[float, ...] = (1.0,)  # tokens in all these passes
    logits: float = 1.0  # rows of logits at the end
    known: DepthStatistics | None = None  # of an early-exit mode

    def behind(self, layer: int) -> int:
        """Return how many exit layers come before this layer (counted from 0)."""
        return bisect_right(self.exit_layers, layer)

    @classmethod
    def of_exits(cls, known: DepthStatistics, most: int) -> "Traversal":
        """Return the passes of an early-exit mode in which at most `most` tokens catch up together."""
        found = Passes.of(known, most)
        rows = tuple(sum(m * n for m, n in enumerate(batch, 1)) for batch in found.batches)
        return cls(known.exit_layers, tuple(found.chances), rows, found.chances[-1], known)

    @classmethod
    def of_step(cls, exit_layer: int, step: Step) -> "Traversal":
        """Return the passes of exact mode: drafts up to the exit layer (0 for none), then one verification."""
        rows = step.batch / step.tokens
        if not exit_layer:
            return cls((), (1 / step.tokens,), (rows,), rows)
        return cls((exit_layer,), (rows, 1 / step.tokens), (rows, rows), rows)


class _Moved(Counter[str]):
    """Counter of bytes, by the name under which they are counted."""

    def over_link(self, kind: str, n_bytes: float, *, to_gpu: bool) -> None:
        self.add(over_link(kind, to_gpu=to_gpu), n_bytes)

    def add(self, name: str, n_bytes: float) -> None:
        self[name] += n_bytes  # type: ignore[assignment]


def token_bytes(
    spec: ModelSpec,
    parts: Sequence[Part],
    placements: Sequence[Placement],
    traversal: Traversal,
    map_ranks: Mapping[int, int],
) -> dict[str, float]:
    """Return the bytes per token by kind and direction. Draft heads and n-gram sources are not included."""
    found, on_gpu = _Moved(), [placement.on_gpu for placement in placements]
    row_bytes = FLOAT_BYTES * spec.hidden_size
    for place, (part, placement) in enumerate(zip(parts, placements, strict=True)):
        outside = spec.n_layers if place else -1
        behind = traversal.behind(outside if part.layer is None else part.layer)
        if placement.is_streamed:
            found.over_link(WEIGHTS, traversal.passes[behind] * part.weight_bytes, to_gpu=True)
        elif placement.is_split:
            work = split_work(spec, part, placement, 1)
            found.add(CPU_WEIGHTS, traversal.passes[behind] * work.cold.read_bytes)
            found.over_link(HIDDEN, traversal.rows[behind] * FLOAT_BYTES * work.input_values, to_gpu=False)
            found.over_link(HIDDEN, traversal.rows[behind] * row_bytes, to_gpu=True)
        elif not placement.on_gpu:
            found.add(CPU_WEIGHTS, traversal.passes[behind] * part_work(spec, part, 1).read_bytes)
        if place and on_gpu[place - 1] != on_gpu[place]:
            rows = traversal.logits if part.kind is BlockKind.HEAD else traversal.rows[behind]
            found.over_link(HIDDEN, rows * row_bytes, to_gpu=on_gpu[place])
    if on_gpu[-1]:
        found.over_link(LOGITS, traversal.logits * FLOAT_BYTES * spec.vocab_size, to_gpu=False)
    starts = layer_starts(parts)
    for number, exit_layer in enumerate(traversal.exit_layers):
        crosses = on_gpu[starts[exit_layer] - 1] != on_gpu[-1]
        end = exit_end(spec, parts[-1], map_ranks.get(exit_layer, 0))
        _add_judging(found, spec, end, traversal, number, head_on_gpu=on_gpu[-1], crosses=crosses)
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes}


def _add_judging(
    found: _Moved,
    spec: ModelSpec,
    end: HeadCost,
    traversal: Traversal,
    number: int,
    *,
    head_on_gpu: bool,
    crosses: bool,
) -> None:
    """Add the bytes of judging tokens at the exit layer with index `number`.

    If the mode has candidates but no draft head, the first exit layer sends all logits to the CPU to choose them. Later
    ones send only the candidates' logits, and the whole head judges a token again before it exits.
    """
    known, judged = traversal.known, traversal.passes[number]
    exits, takes, looks = judged - traversal.passes[number + 1], False, False
    if known is not None:
        judged, looks = judged * known.judging(number), known.looks(number)
        takes = known.is_partial and not looks
    whole = exits if looks else judged
    if crosses:
        rows = judged + whole if looks else judged
        found.over_link(HIDDEN, rows * FLOAT_BYTES * spec.hidden_size, to_gpu=head_on_gpu)
    if head_on_gpu:
        n_logits = spec.vocab_size if takes else N_CANDIDATES if looks else 0
        found.over_link(LOGITS, judged * FLOAT_BYTES * n_logits, to_gpu=False)
        found.over_link(DRAFTS, 0.0 if takes else whole * DRAFT_BYTES, to_gpu=False)
        return
    found.add(CPU_WEIGHTS, whole * sum(work.read_bytes for work in end.logits(1)))
    if looks:
        found.add(CPU_WEIGHTS, judged * sum(work.read_bytes for work in end.candidates(1, N_CANDIDATES)))
