"""Stories of the demo model in exact and full mode, token by token the same, on an emulated machine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from exit_rows import EMULATED, Row, StepCounts, Timed, described_row, full_row, planned_costs, row, timed

from hetero_ee import Engine
from hetero_ee.config import demo_model_folder
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.opening import Opened, open_planned
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.opening import DRAFT_HEAD_FOLDER, DraftKnowledge, open_drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee_profiles.hardware import HardwareProfile
from tests.drafted_generation import generate_exact

OPENINGS = (
    "One morning, a rabbit",
    "There was once a little boat that",
    "Anna had a new kite. She",
    "The old man sat on a bench and",
    '"Where is my hat?" asked the bear.',
    "It was very cold outside, so",
    "Two friends were playing in the garden when",
    "Jack wanted to bake a cake for his mom.",
)
SAMPLINGS = {"greedy": 0.0, "temperature 0.8": 0.8}
EXITS, HEAD, PLANNER = "exit drafts", "draft head", "the planner's choice"
KINDS = (EXITS, HEAD, PLANNER)


@dataclass(frozen=True, slots=True)
class Stories:
    """The demo model, opened, with what it can draft with, and the stories it is to tell."""

    engine: Engine
    calibration: Calibration
    n_texts: int
    n_tokens: int

    @classmethod
    def opened(cls, n_texts: int, n_tokens: int) -> "Stories":
        """`engine` is the caller's to close."""
        engine = Engine.from_pretrained(demo_model_folder(), quantizer="codebook", threads=1, profile="off")
        assert engine.calibrations is not None, "a converted model has a store"
        calibration = engine.calibrations.find()
        assert calibration is not None, "the demo model ships calibrated"
        return cls(engine, calibration, n_texts, n_tokens)

    @property
    def prompts(self) -> list[list[int]]:
        return [self.engine._tokenizer.encode(opening) for opening in OPENINGS[: self.n_texts]]

    @property
    def mean_context_tokens(self) -> int:
        """Halfway through an average story."""
        return sum(map(len, self.prompts)) // self.n_texts + self.n_tokens // 2

    def knowledge(self, kind: str) -> DraftKnowledge:
        """What may be drafted with: one of KINDS."""
        head = demo_model_folder() / DRAFT_HEAD_FOLDER
        return DraftKnowledge(
            self.calibration if kind in (EXITS, PLANNER) else None, head if kind in (HEAD, PLANNER) else None
        )

    def told(
        self, opened: Opened, sampling: str, drafting: Drafting | None = None, counts: DraftCounts | None = None
    ) -> Timed:
        """All stories, one after the other; in full mode without `drafting`."""
        return self.told_by(opened.executor, opened, sampling, drafting, counts)

    def told_by(
        self,
        executor: Executor,
        opened: Opened,
        sampling: str,
        drafting: Drafting | None,
        counts: DraftCounts | None = None,
    ) -> Timed:
        params = SamplingParams(self.n_tokens, temperature=SAMPLINGS[sampling], seed=5)
        ending = Ending(self.engine._eos_token_ids, self.engine.context_tokens)

        def texts() -> Iterator[Iterator[GeneratedToken]]:
            for prompt in self.prompts:
                common = executor, [prompt], params, ending, self.engine._tokenizer.decode, opened.clock
                yield generate(*common) if drafting is None else generate_exact(*common, drafting, counts)

        return timed(texts())


def emulated_rows(stories: Stories, profile: HardwareProfile, gpu_layers: int) -> Iterator[Row]:
    """Each kind of drafts and each sampling, the first layers being on the profile's GPU."""
    spec = stories.engine.spec
    limits = Limits(gpu_layers=gpu_layers, context_tokens=stories.engine.context_tokens)
    full_opened = _opened(stories, profile, replace(limits, mode="full"), DraftKnowledge())
    full = {sampling: stories.told(full_opened, sampling) for sampling in SAMPLINGS}
    full_opened.executor.close()
    for kind in KINDS:
        knowledge = stories.knowledge(kind)
        for sampling in SAMPLINGS:
            opened = _opened(stories, profile, replace(limits, mode=None if kind == PLANNER else "exact"), knowledge)
            drafting = open_drafting(knowledge, opened, profile, _fail)
            cpu_share = 1 - gpu_layers / spec.n_layers
            machine = f"{profile.name}, emulated"
            described = described_row(EMULATED, "demo", machine, cpu_share, kind, sampling, opened.plan)
            yield _row(stories, profile, opened, drafting, described, full[sampling])
            opened.executor.close()


def _row(
    stories: Stories,
    profile: HardwareProfile,
    opened: Opened,
    drafting: Drafting | None,
    described: Row,
    full: Timed,
) -> Row:
    spec, plan = stories.engine.spec, opened.plan
    knowledge = stories.knowledge(described.asked)
    known = knowledge.statistics(spec, profile, plan.threads).of_plan(plan)
    draft_s = known.drafts.seconds(plan.decode_placements) if known.drafts else 0.0
    costs = planned_costs(spec, profile, plan, stories.mean_context_tokens, draft_s, known.exits)
    if drafting is None or plan.drafts is None:
        return full_row(described, costs, full)
    counts = StepCounts()
    exact = stories.told(opened, described.sampling, drafting, counts)
    return row(described, counts, costs, full, exact)


def _opened(stories: Stories, profile: HardwareProfile, limits: Limits, knowledge: DraftKnowledge) -> Opened:
    engine = stories.engine
    statistics = knowledge.statistics(engine.spec, profile, 0)
    placement = PlanRequest(profile, limits, statistics=statistics, emulates=True)
    opened = open_planned(engine.spec, engine.executor.weights, placement, 1, lambda: 0.0, _fail)
    return replace(opened, request=placement)


def _fail(warn: str) -> None:
    raise AssertionError(warn)
