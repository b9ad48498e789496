"""SpecEE's tables on the demo model: what schedules and candidates bring, what is right, what judging takes.

    python tests/bench/bench_early_exit.py [--texts 8] [--tokens 128] [--json]

Each text is full mode's own, greedy, and is followed token for token (teacher-forced), so that every row sees the same
tokens: an exit is right where it gives out the token that full mode did. Depth: mean layers after which a token was
given out; judged: exit layers that judged a token, on average; share of judging: of the processor time. The demo model
is a toy of 12 layers that overstates what exits gain.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from exit_demo import Stories
from torch import Tensor

from hetero_ee import Engine, SamplingParams
from hetero_ee.config import demo_model_folder
from hetero_ee.decoding.requests import Request
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.early_exit import EarlyExits, score_early
from hetero_ee.speculation.opening import DRAFT_HEAD_FOLDER
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.exit_head import exit_heads
from hetero_ee.speculation.policies.policy import ExitJudge
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.statistics import ExitCounts

SCHEDULES = ("every layer", "offline", "online", "both")
CANDIDATES = ("first layer", "draft head")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to take candidates and to choose who judges."""

    candidates: str
    schedule: str
    depth: float
    exits: float  # share of tokens
    precision: float  # share of exits
    judged: float  # a token
    judging: float  # share of processor time


class Timed:
    """A policy whose judge's time is counted. The judge of every call is itself."""

    def __init__(self, policy: SpecEE) -> None:
        self._policy, self.seconds = policy, 0.0
        self._judge: ExitJudge | None = None

    def judging(self, executor: Executor, sampler: DraftSampler) -> "Timed":
        self._judge = self._policy.judging(executor, sampler)
        return self

    def begin(self, text: Request) -> None:
        pass

    def exit_layers(self, text: Request) -> Sequence[int]:
        start_s = time.process_time()
        found = self._known.exit_layers(text)
        self.seconds += time.process_time() - start_s
        return found

    def judge(self, exit_layer: int, hidden: Tensor, texts: Sequence[Request]) -> list[int | None]:
        start_s = time.process_time()
        found = self._known.judge(exit_layer, hidden, texts)
        self.seconds += time.process_time() - start_s
        return found

    def logits(self, exit_layer: int, hidden: Tensor) -> Tensor:
        return self._known.logits(exit_layer, hidden)

    def given_out(self, text: Request, depth: int, hidden: Tensor) -> None:
        start_s = time.process_time()
        self._known.given_out(text, depth, hidden)
        self.seconds += time.process_time() - start_s

    @property
    def _known(self) -> ExitJudge:
        assert self._judge is not None, "judging() comes first"
        return self._judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measured(asked.texts, asked.tokens)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print("| candidates | judged at | depth of 12 | exits | right | judged a token | share of judging |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.candidates} | {row.schedule} | {row.depth:.2f} | {row.exits:.0%} | {row.precision:.1%} "
            f"| {row.judged:.1f} | {row.judging:.0%} |"
        )


def measured(n_texts: int, n_tokens: int) -> list[Row]:
    """All rows, in SCHEDULES' order for each of CANDIDATES."""
    stories = Stories.opened(n_texts, n_tokens)
    with stories.engine as engine:
        texts = [(prompt, told(engine, prompt, n_tokens)) for prompt in stories.prompts]
        return [row(stories, texts, taken, schedule) for taken in CANDIDATES for schedule in SCHEDULES]


def told(engine: Engine, prompt: list[int], n_tokens: int) -> list[int]:
    return engine.generate(prompt, SamplingParams(max_new_tokens=n_tokens, ignore_eos=True)).token_ids


def row(stories: Stories, texts: Sequence[tuple[list[int], list[int]]], taken: str, schedule: str) -> Row:
    """Of every text, one after the other."""
    engine, calibration = stories.engine, stories.calibration
    executor, n_layers = engine.executor, engine.spec.n_layers
    draft = None
    if taken == "draft head":
        head = open_draft_head(demo_model_folder() / DRAFT_HEAD_FOLDER, executor, None, print)
        draft = DraftCandidates(head, print)
    first = 1 if taken == "draft head" or schedule == "online" else calibration.schedule[0]
    chosen = {"every layer": tuple(range(first, n_layers)), "online": ()}.get(schedule, calibration.schedule)
    heads = exit_heads(calibration, range(first, n_layers) if schedule != "offline" else chosen, compiled=True)
    policy, counts = Timed(SpecEE(heads, chosen, n_layers, draft)), ExitCounts()
    exits = EarlyExits(policy, 8, draft)
    n_right = n_exits = 0
    start_s = time.process_time()
    for prompt, text in texts:
        scored = list(score_early(executor, [*prompt, *text], len(prompt), exits, counts))
        for (logits, depth), token_id in zip(scored, text, strict=True):
            n_exits += depth < n_layers
            n_right += depth < n_layers and int(logits.argmax()) == token_id
    seconds, found = time.process_time() - start_s, counts.statistics(n_layers)
    return Row(
        taken,
        schedule,
        found.mean_depth,
        n_exits / found.n_tokens,
        n_right / max(1, n_exits),
        found.judged_per_token,
        policy.seconds / seconds,
    )


if __name__ == "__main__":
    main()
