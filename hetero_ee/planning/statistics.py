"""What calibration knows of a model: how often rows exit and are right then, how good drafts are, what neurons do."""

import math
from dataclasses import dataclass
from itertools import pairwise

from hetero_ee.errors import UsageError
from hetero_ee.planning.neuron_statistics import NeuronStatistics
from hetero_ee.planning.times.rounds import ExitRates, LevelWalk, WalkRates

MAX_ACCEPTANCE_POSITIONS = 8


@dataclass(frozen=True, slots=True)
class ExitLayerRates:
    """Rates of exits in front of layer `exit_layer`, counted from 0: `exit_layer` layers have run.

    walk: of rows judged at the schedule's exit layers before this one too; None where that was not measured.
    """

    exit_layer: int
    rates: ExitRates
    walk: WalkRates | None = None


@dataclass(frozen=True, slots=True)
class ExitStatistics:
    """source: where it comes from, for people. exit_layers: ascending. survival: for each layer the chance that a token
    needs it, for modes that skip layers for good; None where every token passes every layer. schedule: the exit layers
    worth a predictor, ascending, at which the rows of each `walk` were judged on their way.
    """

    source: str
    n_layers: int
    exit_layers: tuple[ExitLayerRates, ...]
    survival: tuple[float, ...] | None = None
    schedule: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        places = [entry.exit_layer for entry in self.exit_layers]
        if not places or places != sorted(set(places)) or not 0 < places[0] <= places[-1] < self.n_layers:
            raise ValueError(f"exit layers must ascend between 1 and {self.n_layers - 1}")
        if self.survival is not None and len(self.survival) != self.n_layers:
            raise ValueError(f"survival has {len(self.survival)} values for {self.n_layers} layers")
        if self.survival is not None and not all(0 <= chance <= 1 for chance in self.survival):
            raise ValueError("survival holds chances from 0 to 1")
        if list(self.schedule) != sorted(set(self.schedule)) or not all(0 < b < self.n_layers for b in self.schedule):
            raise ValueError(f"the schedule's exit layers must ascend between 1 and {self.n_layers - 1}")

    def walk_at(self, exit_layer: int) -> WalkRates | None:
        """Of rows judged at the schedule's exit layers before this one and here; None where it was not measured."""
        return next((entry.walk for entry in self.exit_layers if entry.exit_layer == exit_layer), None)

    def level_walk(self, exit_layer: int) -> LevelWalk | None:
        """The schedule's way to this exit layer; None where no level lies before it, or a walk there was not measured
        or has no exits.

        How many are judged on average tells how many have exited: of a walk with one level more, all those that have
        not are judged once more.
        """
        places = (*(level for level in self.schedule if level < exit_layer), exit_layer)
        walks = [walk for place in places[1:] if (walk := self.walk_at(place)) is not None]
        if len(places) < 2 or len(walks) < len(places) - 1:
            return None
        judged = [1.0, *(walk.n_evaluated for walk in walks)]
        exited = [0.0, *(1 - (after - before) for before, after in pairwise(judged)), walks[-1].exit_rate]
        shares = [max(0.0, after - before) for before, after in pairwise(exited)]
        if not sum(shares):  # figures that contradict each other, or no exits
            return None
        scale = walks[-1].exit_rate / sum(shares)
        return LevelWalk(walks[-1], places, tuple(scale * share for share in shares))

    def rates_at(self, exit_layer: int) -> ExitRates:
        """Linear between the exit layers that are known; no exits before the first, the last one's rates behind it."""
        if exit_layer < self.exit_layers[0].exit_layer:
            return ExitRates(0.0, 0.0)
        later = [entry for entry in self.exit_layers if entry.exit_layer >= exit_layer]
        if not later:
            return self.exit_layers[-1].rates
        right = later[0]
        left = max(
            (entry for entry in self.exit_layers if entry.exit_layer <= exit_layer), key=lambda entry: entry.exit_layer
        )
        if left is right:
            return right.rates
        share = (exit_layer - left.exit_layer) / (right.exit_layer - left.exit_layer)
        names = ("exit_rate", "precision", "refused_precision")
        pairs = ((getattr(left.rates, name), getattr(right.rates, name)) for name in names)
        return ExitRates(*(first + share * (second - first) for first, second in pairs))


@dataclass(frozen=True, slots=True)
class DraftRates:
    """Of drafts that need none of the model's layers. source: where it comes from, for people. acceptance: for each
    position of a chain the chance that its draft is right where all before it are; the last one's holds behind it.
    draft_s: seconds to draft a token.
    """

    source: str
    acceptance: tuple[float, ...]
    draft_s: float

    def __post_init__(self) -> None:
        if not 1 <= len(self.acceptance) <= MAX_ACCEPTANCE_POSITIONS:
            raise ValueError(f"acceptance has {len(self.acceptance)} values, expected 1 to {MAX_ACCEPTANCE_POSITIONS}")
        if not all(0 <= chance <= 1 for chance in self.acceptance):
            raise ValueError("acceptance holds chances from 0 to 1")
        if not 0 <= self.draft_s < math.inf:
            raise ValueError(f"draft_s is {self.draft_s}, expected seconds from 0")

    def acceptance_at(self, position: int) -> float:
        """Of the draft at this position of a chain, counted from 0."""
        return self.acceptance[min(position, len(self.acceptance) - 1)]


@dataclass(frozen=True, slots=True)
class Statistics:
    """All that may be known of a model."""

    exits: ExitStatistics | None = None
    drafts: DraftRates | None = None
    neurons: NeuronStatistics | None = None


AnyStatistics = Statistics | ExitStatistics | None


def gathered(statistics: AnyStatistics) -> Statistics:
    """Exit statistics alone, or none, as all that is known."""
    return statistics if isinstance(statistics, Statistics) else Statistics(exits=statistics)


# Llama-2-7B-chat, 25 K rows a layer: layer after which the exit is taken, the share of rows whose argmax there is the
# final token and among the draft's four (percent), precision and recall of a trained predictor at threshold 0.5.
# Source: the independent replication of SpecEE in w28ahmad/EarlyExitLLM.
PUBLISHED_LAYERS = 32
PUBLISHED_ROWS = (
    (10, 3.3, 0.34, 0.98),
    (15, 9.7, 0.44, 0.94),
    (17, 24.2, 0.65, 0.88),
    (19, 32.6, 0.71, 0.82),
    (21, 40.9, 0.74, 0.85),
    (24, 52.1, 0.82, 0.81),
    (26, 61.8, 0.88, 0.82),
    (28, 73.8, 0.93, 0.83),
    (30, 85.7, 0.98, 0.85),
)


def published_statistics(n_layers: int) -> ExitStatistics:
    """The published rates of Llama-2-7B-chat, at the same relative depth of a model with n_layers layers.

    Raises UsageError for a model with too few.
    """
    exit_layers: dict[int, ExitRates] = {}
    for layer, oracle_percent, precision, recall in PUBLISHED_ROWS:
        exit_layer = round((layer + 1) * n_layers / PUBLISHED_LAYERS)
        if 0 < exit_layer < n_layers:
            # A share `recall` of the right rows exit, and they are a share `precision` of all that do.
            right = oracle_percent / 100
            exit_rate = min(1.0, right * recall / precision)
            refused = min(1.0, max(0.0, (right - exit_rate * precision) / (1 - exit_rate))) if exit_rate < 1 else 0.0
            exit_layers[exit_layer] = ExitRates(exit_rate, precision, refused)
    if not exit_layers:
        raise UsageError(f"a model with {n_layers} layers has none to exit from; drop --published-exits.")
    return ExitStatistics(
        source="published rates of Llama-2-7B-chat (w28ahmad/EarlyExitLLM), scaled by depth",
        n_layers=n_layers,
        exit_layers=tuple(ExitLayerRates(exit_layer, rates) for exit_layer, rates in sorted(exit_layers.items())),
    )
