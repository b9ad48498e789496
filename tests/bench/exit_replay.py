"""Texts of a big model's shape on an emulated machine, with every exit and every draft's fate replayed from a seed.

Hidden states hold no numbers but a row's position, how deep it has come and whether a draft head has guessed it; the
head makes of them the token that the replay has there. The loop, the executor and the time line are the real ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from exit_rows import REPLAYED, Row, StepCounts, Timed, described_row, full_row, planned_costs, row, timed
from torch import Tensor

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.kv.batch import Batch
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT, Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.statistics import DraftRates, ExitRates, Statistics
from hetero_ee.planning.times.prediction import step_times
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.devices.emulated import emulated_machine
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.drafted import DraftEnd, StateMap
from hetero_ee.runtime.execution import open_plan
from hetero_ee.runtime.executors.dummy import DummyExecutor, dummy_weights
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee.weights.weight import DenseWeight
from hetero_ee_profiles.hardware import HardwareProfile
from tests.drafted_generation import generate_exact

POSITION, DEPTH, GUESSES = 0, 1, 2  # columns of a hidden state; GUESSES: by the draft head since the last verified row
PROMPT_TOKENS = 16
SURE = 2.0  # the likeliest logit of a row that exits


class Fates:
    """What becomes of the rows and drafts of one text, drawn once from a seed.

    rates: of exits at the exit layer, and of rows that are refused there. acceptance_at: of a chain's positions.
    """

    def __init__(
        self, seed: int, n_tokens: int, rates: ExitRates, acceptance_at: Callable[[int], float], n_drafts: int
    ) -> None:
        draw = np.random.default_rng(seed)
        self._exits = draw.random(n_tokens) < rates.exit_rate
        self._right = draw.random(n_tokens) < np.where(self._exits, rates.precision, rates.refused_precision)
        chances = [acceptance_at(place) for place in range(n_drafts)]
        self._accepted = draw.random((n_tokens, n_drafts)) < chances

    def exits(self, position: int) -> bool:
        """Whether the row there exits."""
        return bool(self._exits[position])

    def exit_is_right(self, position: int) -> bool:
        """Whether its likeliest token at the exit layer is the full model's."""
        return bool(self._right[position])

    def guess_is_right(self, position: int, place: int) -> bool:
        """Whether the draft behind the row there is, as the chain's place-th."""
        return bool(self._accepted[position, place])


class ReplayedRunner(DummyExecutor):
    """Its head says what the fates have in store. They are changed between texts."""

    fates: Fates

    def embed(self, batch: Batch) -> Tensor:
        """See Executor.embed."""
        hidden = torch.zeros(len(batch), self.spec.hidden_size)
        hidden[:, POSITION] = torch.tensor(batch.positions)
        return hidden

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        """See Executor.forward."""
        deeper = hidden.clone()
        deeper[:, DEPTH] = max(block.layer + 1 for block in blocks if block.layer is not None)
        return deeper

    def lm_head(self, normed: Tensor) -> Tensor:
        """See Executor.lm_head."""
        logits = torch.zeros(len(normed), self.spec.vocab_size)
        for index, state in enumerate(normed):
            logits[index, self._token(state)] = SURE if self.fates.exits(int(state[POSITION])) else 1.0
        return logits

    def _token(self, state: Tensor) -> int:
        position, depth, n_guesses = (int(state[column]) for column in (POSITION, DEPTH, GUESSES))
        true_id = (7 * (position + 1)) % self.spec.vocab_size
        if n_guesses:
            is_right = self.fates.guess_is_right(position, n_guesses - 1)
        else:
            is_right = depth == self.spec.n_layers or self.fates.exit_is_right(position)
        return true_id if is_right else true_id ^ 1


class ReplayedJudge:
    """Says 1 of a row that exits, else 0, for the time that a predictor takes."""

    network = torch.zeros(64, 12), torch.zeros(64), torch.zeros(64), torch.zeros(1)

    def of_row(self, logits: Tensor) -> float:
        """See Judge.of_row."""
        return float(logits.max() == SURE)


class ReplayedHead(DummyExecutor):
    """A draft head that counts how far it is from what was verified."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See BlockExecutor.linear: fc, which leaves the state."""
        return x[:, x.shape[1] // 2 :]

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        """See BlockExecutor.forward."""
        guessed = hidden.clone()
        guessed[:, POSITION] += 1
        guessed[:, GUESSES] += 1
        return guessed


@dataclass(frozen=True, slots=True)
class Replay:
    """Texts of a model's shape on a machine. limits: the first layers on its GPU, and the context."""

    spec: ModelSpec
    model: str
    profile: HardwareProfile
    limits: Limits
    n_texts: int
    n_tokens: int

    @property
    def cpu_share(self) -> float:
        return 1 - (self.limits.gpu_layers or 0) / self.spec.n_layers

    def row(self, asked: str, statistics: Statistics, mode: str | None = None) -> Row:
        """One line: full mode, and what the planner makes of these statistics, or exact mode where it is the mode."""
        plan = make_plan(self.spec, self.profile, replace(self.limits, mode=mode), statistics)
        machine = f"{self.profile.name}, emulated"
        described = described_row(REPLAYED, self.model, machine, self.cpu_share, asked, "greedy", plan)
        drafts = statistics.of_plan(plan).drafts
        draft_s = drafts.seconds(plan.decode_placements) if drafts else 0.0
        costs = planned_costs(
            self.spec, self.profile, plan, PROMPT_TOKENS + self.n_tokens // 2, draft_s, statistics.exits
        )
        full = self._run(plan, statistics, None)
        if plan.drafts is None:
            return full_row(described, costs, full)
        counts = StepCounts()
        exact = self._run(plan, statistics, counts)
        return row(described, counts, costs, full, exact)

    def _run(self, plan: Plan, statistics: Statistics, counts: DraftCounts | None) -> Timed:
        """In exact mode where `counts` is to be told, else in full mode."""
        timeline, runners = Timeline(), []

        def runner(layers: tuple[int, ...]) -> ReplayedRunner:
            runners.append(ReplayedRunner(self.spec, plan.context_tokens, layers))
            return runners[-1]

        machine = emulated_machine(self.profile, self.spec, plan, timeline)
        executor = open_plan(self.spec, dummy_weights(self.spec), plan, machine, runner)
        params, ending = SamplingParams(self.n_tokens), Ending(frozenset(), plan.context_tokens)
        common = executor, [[1] * PROMPT_TOKENS], params, ending, _decode, lambda: timeline.now_s

        def texts() -> Iterator[Iterator[GeneratedToken]]:
            for seed in range(self.n_texts):
                fates = self._fates(seed, plan, statistics)
                for each in runners:
                    each.fates = fates
                if counts is None:
                    yield generate(*common)
                else:
                    yield generate_exact(*common, self._drafting(plan, executor, statistics), counts)

        found = timed(texts())
        executor.close()
        return found

    def _fates(self, seed: int, plan: Plan, statistics: Statistics) -> Fates:
        rates = ExitRates(0.0, 0.0)
        if statistics.exits is not None and plan.exit_layer:
            rates = statistics.exits.rates_at(plan.exit_layer)
        at = statistics.drafts.acceptance_at if statistics.drafts is not None else lambda place: 0.0
        return Fates(seed, PROMPT_TOKENS + self.n_tokens, rates, at, plan.draft_length)

    def _drafting(self, plan: Plan, executor: PlannedExecutor, statistics: Statistics) -> Drafting:
        if plan.drafts == EXIT and plan.exit_layer is not None and statistics.exits is not None:
            map_rank = statistics.exits.map_ranks.get(plan.exit_layer, 0)
            end = DraftEnd(state_map=_map_of(self.spec.hidden_size, map_rank), judge=ReplayedJudge())
            n_layers = step_times(self.spec, self.profile, plan).layers_ahead(plan.exit_layer)
            rule = FixedThreshold(0.5)
            return Drafting(plan.exit_layer, plan.draft_length, rule, end, async_layers=n_layers)
        head_spec, on_gpu = draft_head_spec(self.spec), plan.draft_device == GPU
        head = ReplayedHead(head_spec, plan.context_tokens)
        layer = DraftHeadLayer(head, head_spec, None, executor.machine, on_gpu=on_gpu)
        source = DraftHeadSource(lambda: layer, executor)
        return Drafting(0, plan.draft_length, FixedThreshold(0.0), None, (source,))


def _map_of(hidden_size: int, rank: int) -> StateMap | None:
    """A map of this rank that does nothing."""
    nothing = torch.zeros(1)
    up, down = (DenseWeight(nothing.expand(shape)) for shape in ((hidden_size, rank), (rank, hidden_size)))
    return StateMap(up, None if rank == hidden_size else down, nothing) if rank else None


def head_rates(
    spec: ModelSpec, profile: HardwareProfile, acceptance: tuple[float, ...], source: str = "published"
) -> DraftRates:
    """Of a draft head of the model's shapes."""
    facts = DraftHeadFacts(draft_head_spec(spec), spec.vocab_size, False, acceptance)
    return HeadCosts(facts, spec, profile, 0).rates(source)


def draft_head_spec(spec: ModelSpec) -> ModelSpec:
    """A draft head of the model's shapes: one of its layers."""
    return replace(spec, n_layers=1, sliding_windows=(None,))


def _decode(token_ids: Sequence[int]) -> str:
    return "." * len(token_ids)
