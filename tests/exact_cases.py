"""Cases for the identity of exact and full: what is drafted how, sampled how and ended by what, drawn by a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.full import generate
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.texts import Ending
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.chain_rule import ChainRule
from hetero_ee.speculation.draft_gate import AdaptiveGate, FixedGate, Gate
from hetero_ee.speculation.drafting import Drafting, ExitHead, ExitLevel, ExitLevels
from hetero_ee.speculation.exact import generate_exact
from hetero_ee.speculation.sources.candidates import DraftSource
from hetero_ee.speculation.sources.combined import CombinedSource
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.statistics import DraftCounts
from tests.draft_heads import random_head_source
from tests.draft_sources import ScriptedSource, garbage, in_turns, oracle, repetition
from tests.e2e.test_trained_models import OPENINGS

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy penalty": {"repeat_penalty": 1.3},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "all": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repeat_penalty": 1.1},
}
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": ("demo", "stories260k", "tiny12"),
    "quantizer": ("none", "codebook"),
    "is_split": (False, True),
    "source": ("exit", "n-gram", "garbage", "oracle", "combination", "n-grams and oracle", "n-grams and trimmed head"),
    "n_drafts": (1, 2, 3, 4, 5, 6, 7, 8),
    "depth": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "gate": ("always", "threshold", "adaptive"),
    "mapped": (False, True),
    "sampling": tuple(SAMPLINGS),
    "n_sequences": (1, 3),
    "ending": ("length", "stop string", "end token", "stop token", "context"),
    "levels": ("none", "some", "every"),
    "is_ahead": (False, True),
}


@dataclass(frozen=True)
class Case:
    """is_split: exact mode runs on an emulated machine, half of the layers on its GPU. depth: the exit layer's, from no
    layer to all but one. mapped: the exit head has a map. is_ahead: on a split machine rows are drafted ahead.
    levels: exit layers before it where rows exit at random: none, some and those near recent exits, or every one."""

    seed: int
    model: str
    quantizer: str
    is_split: bool
    source: str
    n_drafts: int
    depth: float
    gate: str
    mapped: bool
    sampling: str
    n_sequences: int
    ending: str
    is_ahead: bool = False
    levels: str = "none"


def drawn_cases(n_cases: int) -> list[Case]:
    """Random combinations in which each dimension's values come equally often, but for one."""
    draw = random.Random(n_cases)
    columns = {}
    for name, values in DIMENSIONS.items():
        columns[name] = [values[i % len(values)] for i in range(n_cases)]
        draw.shuffle(columns[name])
    return [Case(seed, **{name: column[seed] for name, column in columns.items()}) for seed in range(n_cases)]


@dataclass
class Run:
    """One case on one model: what both ways to decode are given."""

    engine: Engine
    prompts: list[list[int]]
    params: SamplingParams
    ending: Ending

    @classmethod
    def of(cls, case: Case, engine: Engine, n_tokens: int) -> "Run":
        """Prompts and sampling by the case; it ends where a first run has shown that its ending comes."""
        draw = random.Random(case.seed)
        prompts = [engine._tokenizer.encode(text) for text in draw.sample(OPENINGS, case.n_sequences)]
        params = SamplingParams(n_tokens, seed=draw.randrange(2**64), **SAMPLINGS[case.sampling])
        ending = Ending(engine._eos_token_ids, engine.context_tokens)
        run = cls(engine, prompts, params, ending)
        if case.ending == "length":
            return replace(run, params=params.changed(max_new_tokens=draw.randint(1, n_tokens)))
        if case.ending == "context":
            return replace(run, ending=replace(ending, context_tokens=max(map(len, prompts)) + draw.randint(1, 30)))
        first = run.full()[0]
        token_id = draw.choice(first).token_id
        if case.ending == "end token":
            return replace(run, ending=replace(ending, eos_token_ids=frozenset({token_id})))
        if case.ending == "stop token":
            return replace(run, params=params.changed(stop_token_ids=[token_id]))
        text = "".join(token.text for token in first) or "."
        start = draw.randrange(len(text))
        return replace(run, params=params.changed(stop=(text[start : start + draw.randint(1, 8)],)))

    def full(self) -> list[list[GeneratedToken]]:
        """Each prompt's tokens at full depth."""
        return self._by_prompt(generate, self.engine.executor)

    def exact(self, drafting: Drafting, executor: Executor | None = None, counts: DraftCounts | None = None) -> Any:
        """The same in exact mode."""
        return self._by_prompt(generate_exact, executor or self.engine.executor, drafting, counts)

    def _by_prompt(self, way: Any, executor: Executor, *drafting: Any) -> list[list[GeneratedToken]]:
        decode = self.engine._tokenizer.decode
        tokens = way(executor, self.prompts, self.params, self.ending, decode, lambda: 0.0, *drafting)
        by_prompt: list[list[GeneratedToken]] = [[] for _ in self.prompts]
        for token in tokens:
            by_prompt[token.sequence].append(token)
        return by_prompt


def drafting_of(case: Case, run: Run, texts: Sequence[Sequence[int]]) -> Drafting:
    """texts: prompts with what follows them, for sources that know."""
    spec = run.engine.spec
    exit_layer = round(case.depth * (spec.n_layers - 1))
    propose = {
        "exit": None,
        "n-gram": repetition,
        "garbage": garbage(case.seed, spec.vocab_size),
        "oracle": oracle(texts, case.seed, error_rate=0.1),
        "combination": in_turns(repetition, oracle(texts), garbage(case.seed, spec.vocab_size), lambda *_: []),
        "n-grams and oracle": oracle(texts, case.seed, error_rate=0.3),
        "n-grams and trimmed head": None,
    }[case.source]
    source: DraftSource | None = ScriptedSource(propose, spec.hidden_size) if propose else None
    if case.source == "n-grams and trimmed head":
        source = random_head_source(run.engine.executor, case.seed)
    if source is not None and case.source.startswith("n-grams and"):
        source = CombinedSource(NgramSource(), source)
    gates: dict[str, Gate] = {
        "always": FixedGate(0.0),
        "threshold": FixedGate(0.3),
        "adaptive": AdaptiveGate(0.2, lambda m: 1 + 0.1 * m),
    }
    exits = case.source in ("exit", "combination") or case.seed % 2 == 0  # chains with and without pruning
    return Drafting(
        exit_layer,
        case.n_drafts + 1,
        gates[case.gate],
        ExitHead(nearly_itself if case.mapped else None) if exits else None,
        source,
        drafts_ahead=case.is_ahead,
        levels=levels_of(case, exit_layer),
        chain_rule=ChainRule(AdaptiveGate(0.0, lambda m: 1 + 0.1 * m), 0.1) if case.gate == "adaptive" else None,
    )


def levels_of(case: Case, exit_layer: int) -> ExitLevels | None:
    """Predictors that let a third of the rows exit, whatever they look like."""
    if case.levels == "none":
        return None
    draw, places = random.Random(case.seed), range(1, exit_layer)
    head = ExitHead(nearly_itself if case.mapped else None, lambda *_: draw.random())
    level = ExitLevel(head, 2 / 3, lambda *_: draw.random(), 2 / 3)
    scheduled = places if case.levels == "every" else draw.sample(places, len(places) // 2)
    return ExitLevels(dict.fromkeys(places, level), tuple(sorted(scheduled)))


def nearly_itself(normed: torch.Tensor) -> torch.Tensor:
    """A map that is no identity and spoils little."""
    return normed + 0.05 * normed.roll(1, dims=1)


def check_identity(expected: list[list[GeneratedToken]], found: list[list[GeneratedToken]]) -> None:
    """Tokens, their texts, places and finish reasons are the same."""
    for full, exact in zip(expected, found, strict=True):
        assert [token.token_id for token in exact] == [token.token_id for token in full]
        assert exact == full  # the clock stands still
