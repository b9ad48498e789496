"""Stories of the demo model, opened from a plan, with its draft head as the only source of drafts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from exit_rows import Timed, timed
from specee_subjects import OPENINGS

from hetero_ee import Engine
from hetero_ee.config import demo_model_folder
from hetero_ee.decoding.requests import Ending
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.opening import Opened, open_planned
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.opening import DRAFT_HEAD_FOLDER, DraftKnowledge
from hetero_ee_profiles.hardware import HardwareProfile
from tests.drafted_generation import generate_exact

KNOWLEDGE = DraftKnowledge(None, demo_model_folder() / DRAFT_HEAD_FOLDER)


@dataclass(frozen=True, slots=True)
class Stories:
    """The demo model, opened, and the number and length of the stories that it writes. The caller closes `engine`."""

    engine: Engine
    n_texts: int
    n_tokens: int

    @classmethod
    def opened(cls, n_texts: int, n_tokens: int) -> "Stories":
        engine = Engine.from_pretrained(demo_model_folder(), quantizer="codebook", threads=1, profile="off")
        return cls(engine, n_texts, n_tokens)

    def written(self, opened: Opened, drafting: Drafting) -> Timed:
        """Write all stories in exact mode, greedily, one after another."""
        params, tokenizer = SamplingParams(self.n_tokens), self.engine.tokenizer
        ending = Ending(frozenset(), self.engine.context_tokens)

        def texts() -> Iterator[Iterator[GeneratedToken]]:
            for opening in OPENINGS[: self.n_texts]:
                common = opened.executor, [tokenizer.encode(opening)], params, ending, tokenizer.decode, opened.clock
                yield generate_exact(*common, drafting, None)

        return timed(texts())


def opened_on(stories: Stories, profile: HardwareProfile, limits: Limits) -> Opened:
    """Open the demo model on an emulated machine."""
    engine = stories.engine
    placement = PlanRequest(profile, limits, statistics=KNOWLEDGE.statistics(engine.spec, profile, 0), emulates=True)
    opened = open_planned(engine.spec, engine.executor.weights, placement, 1, lambda: 0.0, _fail)
    return replace(opened, request=placement)


def _fail(warn: str) -> None:
    raise AssertionError(warn)
