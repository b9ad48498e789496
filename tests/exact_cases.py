"""Cases for the identity of exact and full: what is drafted how, sampled how and ended by what, drawn by a seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import hetero_ee
from hetero_ee import Engine, SamplingParams
from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.options.engine import MTP_HEAD, UNQUANTIZED
from hetero_ee.runtime.drafted import DraftEnd, StateMap
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.draft_model import DraftModelSource
from hetero_ee.speculation.sources.draft_model_opening import DraftModel, DraftModelOpener
from hetero_ee.speculation.sources.ngram import NgramSource
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold, MarginalRule, StopRule
from tests.draft_heads import random_head_source
from tests.draft_sources import Propose, ScriptedSource, ScriptedTree, alternately, garbage, oracle, repetition
from tests.drafted_generation import generate_exact
from tests.e2e.test_trained_models import OPENINGS

DEMO_HEAD = Path(hetero_ee.__file__).parent / "assets" / "demo" / "draft_head"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy penalty": {"repeat_penalty": 1.3},
    "added penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "logit_bias": {3: 4.0, 11: -100.0}},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "all": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repeat_penalty": 1.1},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "": {},
    "schema": {
        "json_schema": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["story", "storage"]},
                "title": {"type": "string", "maxLength": 12},
                "pages": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            },
            "required": ["kind", "title", "pages"],
            "additionalProperties": False,
        }
    },
    "tags": {"grammar": 'start: TEXT "<said by=\\"" ("Tom"|"Lily") "\\">" /[a-z ]{4,}/ "</said>"\nTEXT: /[^<]{3,9}/'},
}
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": ("demo", "stories260k", "tiny12"),
    "quantizer": ("none", "codebook"),
    "is_split": (False, True),
    "drafts": (
        *["exit"] * 4,
        "alternately",
        "n-grams",
        "garbage",
        "oracle",
        "n-grams and oracle",
        "head",
        "n-grams and head",
        "n-grams, head and oracle",
        "draft model",
        "n-grams and draft model",
        *("tree", "tree of duplicates", "n-grams and tree", "tree and oracle", "n-grams, tree and head"),
    ),
    "tree_width": (1, 2, 7),
    "n_drafts": (1, 2, 3, 4, 5, 6, 8, 15),
    "depth": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "rule": ("always", "threshold", "marginal"),
    "mapped": (False, True),
    "sampling": tuple(SAMPLINGS),
    "n_sequences": (1, 3),
    "ending": ("length", "stop string", "end token", "stop token", "context"),
    "is_async": (False, True),
    "kv_type": tuple(KV_BYTES),
    "grammar": ("", "", "", "schema", "tags"),
    "activations": ("int8", "int16"),
}
MIXED = ("drafts", "tree_width", "ending")  # their numbers of values have no common divisor: all mixtures are drawn


@dataclass(frozen=True)
class Case:
    """One way to draft, sample and end."""

    seed: int
    model: str
    quantizer: str
    is_split: bool  # exact mode runs on an emulated machine, half of the layers on its GPU
    drafts: str
    n_drafts: int
    depth: float  # of exits: from the first layer to all but one
    rule: str
    mapped: bool  # the exit head has a map
    sampling: str
    n_sequences: int
    ending: str
    is_async: bool = False  # on a split machine guesses begin while the CPU verifies
    kv_type: str = KV_TYPE  # in either mode
    grammar: str = ""  # of GRAMMARS, that the texts keep to
    activations: str = "int8"
    tree_width: int = 1  # most drafts after the same token, from sources that can draft trees


def drawn_cases(n_cases: int) -> list[Case]:
    """Random combinations in which each dimension's values come equally often, but for one, and every mixture of
    sources, widths of trees and endings once in 285 cases."""
    draw = random.Random(n_cases)
    columns = {}
    for name, values in DIMENSIONS.items():
        columns[name] = [values[i % len(values)] for i in range(n_cases)]
        if name not in MIXED:
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
        params = SamplingParams(
            n_tokens, seed=draw.randrange(2**64), **SAMPLINGS[case.sampling], **GRAMMARS[case.grammar]
        )
        ending = Ending(engine._eos_token_ids, engine.context_tokens, constrain=engine.grammars.constraint)
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
    rules: dict[str, StopRule] = {
        "always": FixedThreshold(0.0),
        "threshold": FixedThreshold(0.3),
        "marginal": MarginalRule(0.2 if case.drafts == "exit" else 0.0, lambda m: 1 + 0.1 * m),
    }
    n_layers, rule = run.engine.spec.n_layers, rules[case.rule]
    if case.drafts != "exit":
        sources = sources_of(case, run, texts)
        return Drafting(0, case.n_drafts + 1, rule, None, sources, tree_width=case.tree_width)
    exit_layer = 1 + round(case.depth * (n_layers - 2))
    spec, compiled = run.engine.spec, run.engine.executor.weights.quantizer != UNQUANTIZED
    head = DraftEnd(state_map=nearly_itself(spec.hidden_size, compiled=compiled) if case.mapped else None)
    return Drafting(exit_layer, case.n_drafts + 1, rule, head, async_layers=exit_layer if case.is_async else 0)


def sources_of(case: Case, run: Run, texts: Sequence[Sequence[int]]) -> tuple[DraftSource, ...]:
    """Each says at random how sure it is."""
    spec, draw = run.engine.spec, random.Random(case.seed)
    rubbish = garbage(case.seed, spec.vocab_size)

    def scripted(propose: Propose, *, is_free: bool = case.seed % 2 == 0) -> ScriptedSource:
        draft_s = 0.0 if is_free else 0.1
        return ScriptedSource(propose, spec.hidden_size, draw.random, is_free=is_free, draft_s=draft_s)

    def tree() -> ScriptedTree:
        return ScriptedTree(several(texts, case.seed, draw.random()), spec.hidden_size, case.seed)

    sources: dict[str, Callable[[], tuple[DraftSource, ...]]] = {
        "alternately": lambda: (scripted(alternately(repetition, oracle(texts), rubbish, lambda _: [])),),
        "n-grams": lambda: (NgramSource(),),
        "garbage": lambda: (scripted(rubbish),),
        "oracle": lambda: (scripted(oracle(texts, case.seed, error_rate=0.1)),),
        "n-grams and oracle": lambda: (
            NgramSource(), scripted(oracle(texts, case.seed, error_rate=0.3), is_free=False), scripted(repetition)
        ),
        "head": lambda: (_head(case, run),),
        "n-grams and head": lambda: (NgramSource(), _head(case, run)),
        "n-grams, head and oracle": lambda: (
            NgramSource(), _head(case, run), scripted(oracle(texts, case.seed, error_rate=0.3), is_free=False),
        ),
        "draft model": lambda: (_itself(run.engine),),
        "n-grams and draft model": lambda: (NgramSource(), _itself(run.engine)),
        "tree": lambda: (tree(),),
        "tree of duplicates": lambda: (ScriptedTree(lambda history: [history[-1]] * 3, spec.hidden_size, case.seed),),
        "n-grams and tree": lambda: (NgramSource(), tree()),
        "tree and oracle": lambda: (tree(), scripted(oracle(texts, case.seed, error_rate=0.3))),
        "n-grams, tree and head": lambda: (NgramSource(), tree(), _head(case, run)),
    }  # fmt: skip
    return sources[case.drafts]()


def several(texts: Sequence[Sequence[int]], seed: int, right: float, width: int = 4) -> Propose:
    """Drafts of which one is right with this chance, at any place, with duplicates among the others."""
    draw = random.Random(seed)

    def propose(history: Sequence[int]) -> list[int]:
        known = [text[len(history)] for text in texts if list(text[: len(history)]) == list(history) < list(text)]
        drafts = [draw.choice([at for at in range(60) if at not in known]) for _ in range(draw.randint(1, width))]
        drafts += drafts[: draw.randint(0, 1)]
        if known and draw.random() < right:
            drafts[draw.randrange(len(drafts))] = known[0]
        return drafts

    return propose


def _head(case: Case, run: Run) -> DraftSource:
    """The model's MTP layer, the demo model's draft head, or, as for half of its cases, a head that knows nothing."""
    executor = run.engine.executor
    if executor.spec.mtp is not None:
        return open_draft_head(MTP_HEAD, executor)
    if case.model == "demo" and case.seed % 2:
        return open_draft_head(DEMO_HEAD, executor)
    return random_head_source(executor, case.seed)


def _itself(engine: Engine) -> DraftSource:
    """The model as its own draft model, which differs only in its KV cache, of fp16."""
    tokenizer: Any = None
    model = DraftModel("itself", engine.spec, engine.executor.weights, tokenizer)
    return DraftModelSource(DraftModelOpener(model, engine.executor, None, print), print)


def nearly_itself(hidden_size: int, *, compiled: bool) -> StateMap:
    """A map that is no identity and spoils little."""
    shifted = 0.05 * torch.eye(hidden_size).roll(1, dims=0)
    return ExitMap(None, shifted, torch.zeros(hidden_size)).packed(compiled=compiled)


def check_identity(expected: list[list[GeneratedToken]], found: list[list[GeneratedToken]]) -> None:
    """Tokens, their texts, places and finish reasons are the same."""
    for full, exact in zip(expected, found, strict=True):
        assert [token.token_id for token in exact] == [token.token_id for token in full]
        assert exact == full  # the clock stands still
