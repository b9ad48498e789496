"""Statistics of a model from calibration: exit rates, how often exits are right, and acceptance of drafts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import SEQUENCE, Plan
from hetero_ee.planning.times.memory import DRAFT_HEAD

MAX_ACCEPTANCE_POSITIONS = 8


@dataclass(frozen=True, slots=True)
class ExitRates:
    """How often tokens exit at one exit layer, and how often their drafts are right."""

    exit_rate: float  # chance that a token exits
    precision: float  # chance that an exited token's draft is the full model's token
    refused_precision: float = 0.0  # the same for a token that does not exit; 0 if unknown
    map_rank: int = 0  # of the exit map, 0 without one

    def __post_init__(self) -> None:
        for name in ("exit_rate", "precision", "refused_precision"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 to 1")


@dataclass(frozen=True, slots=True)
class ExitStatistics:
    """Exit rates by exit layer. A token at exit layer n has passed n layers."""

    source: str  # of the statistics, for people
    n_layers: int
    rates: Mapping[int, ExitRates]  # by exit layer, ascending

    def __post_init__(self) -> None:
        exit_layers = list(self.rates)
        if (
            not exit_layers
            or exit_layers != sorted(exit_layers)
            or not 0 < exit_layers[0] <= exit_layers[-1] < self.n_layers
        ):
            raise ValueError(f"exit layers must ascend between 1 and {self.n_layers - 1}")

    @property
    def map_ranks(self) -> Mapping[int, int]:
        return {exit_layer: each.map_rank for exit_layer, each in self.rates.items() if each.map_rank}

    def rates_at(self, exit_layer: int) -> ExitRates:
        """Interpolate rates between known exit layers: no exits before the first, constant rates after the last."""
        if exit_layer in self.rates:
            return self.rates[exit_layer]
        known = list(self.rates)
        columns = zip(
            *((each.exit_rate, each.precision, each.refused_precision) for each in self.rates.values()), strict=True
        )
        found = [float(np.interp(exit_layer, known, column, left=0.0)) for column in columns]
        return ExitRates(found[0], found[1], found[2])


@dataclass(frozen=True, slots=True)
class DepthStatistics:
    """How deep tokens go in an early-exit mode that judges them at these exit layers."""

    mode: str  # of EARLY_EXIT_MODES
    source: str  # of the statistics, for people
    exit_layers: tuple[int, ...]  # ascending
    shares: tuple[float, ...]  # share of all tokens that exit at each layer; the rest pass all layers
    is_partial: bool = False  # after the first exit layer, candidates' logits judge first
    is_drafted: bool = False  # also at the first exit layer, with candidates from the draft head
    judged: tuple[float, ...] = ()  # chance that a token that reaches each exit layer is judged; (): 1
    schedule: tuple[int, ...] = ()  # exit layers that a plan names; (): all
    threshold: float | None = None  # of the confidence, if one holds at all exit layers

    def __post_init__(self) -> None:
        ascend = all(before < each for before, each in zip((0, *self.exit_layers), self.exit_layers, strict=False))
        if not ascend or not len(self.exit_layers) == len(self.shares) > 0:
            raise ValueError("exit layers must ascend from 1, with a share for each")
        if not all(0 <= share <= 1 for share in self.shares) or not sum(self.shares) <= 1 + 1e-9:
            raise ValueError(f"shares of tokens are {self.shares}, expected 0 to 1 each and together")

    @property
    def planned(self) -> tuple[int, ...]:
        """Exit layers that the plan's `exit_layers` must list."""
        return self.schedule or self.exit_layers

    def looks(self, number: int) -> bool:
        """Return whether the exit layer with this index judges by the logits of a few candidates."""
        return self.is_partial and (self.is_drafted or number > 0)

    def judging(self, number: int) -> float:
        """Return the chance that a token that reaches the exit layer with this index is judged there."""
        return self.judged[number] if self.judged else 1.0

    @property
    def deeper(self) -> tuple[float, ...]:
        """Shares of tokens that have not exited after 0, 1, ... exit layers."""
        return tuple(max(0.0, 1 - exited) for exited in accumulate(self.shares, initial=0.0))


@dataclass(frozen=True, slots=True)
class PromptReading:
    """Cost of a draft source that must also process prompts."""

    chunk_s: Callable[[int, int], float]  # (m, context_tokens) -> seconds of a chunk of m tokens
    on_gpu: bool = False  # the GPU computes it
    own_embedding: bool = False  # on the CPU, in place of the model's


@dataclass(frozen=True, slots=True)
class DraftRates:
    """Acceptance and cost of drafts from a source that runs none of the model's layers."""

    source: str  # of the statistics, for people
    acceptance: tuple[float, ...]  # by position: the chance that a draft is right if all before it are
    draft_s: float  # seconds per draft, with the model's head and embedding on the CPU
    reading: PromptReading | None = None  # None if the source reads no prompts
    memory_bytes: Callable[[int, int], int] | None = None  # context_tokens, n_sequences -> bytes of the source
    head_rows_bytes: int = 0  # on the GPU with the model's head, if the source is on the CPU
    by_gpu: "DraftRates | None" = None  # the same drafts computed by the GPU
    placed_draft_s: Callable[[bool, bool], float] | None = (
        None  # (head, embedding on the GPU) -> seconds; None: always draft_s
    )
    verified_s: Callable[[Sequence[Placement], int], float] | None = None  # see after_verification_s
    memory_term: str = DRAFT_HEAD  # name of the term of memory_bytes
    others: tuple[float, ...] = ()  # if a draft is wrong, the chances of its alternatives; () if there are no trees
    placed_level_s: Callable[[bool, bool, int], float] | None = None  # placed_draft_s of the drafts of several tokens

    def __post_init__(self) -> None:
        if not 1 <= len(self.acceptance) <= MAX_ACCEPTANCE_POSITIONS:
            raise ValueError(f"acceptance has {len(self.acceptance)} values, expected 1 to {MAX_ACCEPTANCE_POSITIONS}")
        if not all(0 <= chance <= 1 for chance in self.acceptance):
            raise ValueError("acceptance holds chances from 0 to 1")
        if not 0 <= self.draft_s < math.inf:
            raise ValueError(f"draft_s is {self.draft_s}, expected seconds from 0")

    def seconds(self, placements: Sequence[Placement]) -> float:
        """Return the seconds per draft if the model's parts have these placements."""
        if self.placed_draft_s is None:
            return self.draft_s
        return self.placed_draft_s(placements[-1].on_gpu, placements[0].on_gpu)

    def level_s(self, placements: Sequence[Placement], m: int) -> float:
        """Return the seconds of a tree's level that is drafted after m tokens together."""
        if self.placed_level_s is None:
            return m * self.seconds(placements)
        return self.placed_level_s(placements[-1].on_gpu, placements[0].on_gpu, m)

    def after_verification_s(self, placements: Sequence[Placement], m: int) -> float:
        """Return the seconds that the source needs between a verification of m tokens and its next draft."""
        return 0.0 if self.verified_s is None else self.verified_s(placements, m)

    def acceptance_at(self, position: int) -> float:
        """Return the chance that the draft at this position (from 0) is right if all before it are."""
        return self.acceptance[min(position, len(self.acceptance) - 1)]


@dataclass(frozen=True, slots=True)
class Statistics:
    exits: ExitStatistics | None = None
    drafts: DraftRates | None = None
    depths: tuple[DepthStatistics, ...] = ()  # of early-exit modes; the planner chooses the fastest of a mode

    def depths_of(self, made: Plan) -> DepthStatistics | None:
        """Return the depth statistics that match a plan's mode and exit layers, None if unknown."""
        found = (each for each in self.depths if each.mode == made.mode and each.planned == made.exit_layers)
        return next(found, None)

    def of_plan(self, made: Plan) -> "Statistics":
        """Return the statistics with draft costs for the device on which this plan computes drafts."""
        if self.drafts is None or self.drafts.by_gpu is None or made.draft_device != "gpu":
            return self
        return replace(self, drafts=self.drafts.by_gpu)

    def reading(self, drafts: str | None) -> PromptReading | None:
        """Return the cost of processing prompts for drafts of this kind, None if they need none."""
        return self.drafts.reading if drafts == SEQUENCE and self.drafts is not None else None
