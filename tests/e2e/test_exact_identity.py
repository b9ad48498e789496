"""Exact mode says what full mode says, token for token, whatever drafts and however it is sampled and ended."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from hetero_ee import Engine
from hetero_ee.hub.config_file import read_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee_profiles.reference import reference_profile
from tests.conftest import SHARED_MODELS
from tests.emulation import LAPTOP, emulated, planned
from tests.exact_cases import DIMENSIONS, MIXED, Case, Run, check_identity, drafting_of, drawn_cases
from tests.placements import split_at

N_SLOW_CASES, SLOW_TOKENS = 500, 128
N_CASES, TOKENS = 20, 40


class Models:
    """Engines of every model, quantizer and type of keys, values and activations, and emulated machines of the same
    weights, opened when first asked for."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._engines: dict[tuple[str, ...], Engine] = {}
        self._splits: dict[tuple[str, ...], Executor] = {}

    def engine(self, case: Case) -> Engine:
        key, folder = self._key(case), self._folders[case.model]
        if not folder.is_dir():
            pytest.skip(f"shared/models/{folder.name} is not beside the repository")
        if key not in self._engines:
            self._engines[key] = Engine.from_pretrained(
                folder,
                quantizer=case.quantizer,
                activations=case.activations,
                threads=1,
                context_tokens=read_spec(folder).max_context_tokens,
                profile=reference_profile(LAPTOP),
                limits=Limits(gpu_layers=0, mode="full", kv_type=case.kv_type),
            )
        return self._engines[key]

    def executor(self, case: Case) -> Executor:
        """What runs the case in exact mode."""
        key, engine = self._key(case), self.engine(case)
        if not case.is_split:
            return engine.executor
        if key not in self._splits:
            pins = split_at(engine.spec.n_layers // 2)
            n_tokens = engine.context_tokens
            plan = planned(engine.spec, overrides=pins, context_tokens=n_tokens, kv_type=case.kv_type)
            self._splits[key] = emulated(engine.spec, engine.executor.weights, plan)
        return self._splits[key]

    def _key(self, case: Case) -> tuple[str, ...]:
        return case.model, case.quantizer, case.kv_type, case.activations

    def close(self) -> None:
        for opened in (*self._splits.values(), *self._engines.values()):
            opened.close()


@pytest.fixture(scope="module")
def models(demo: Path) -> Iterator[Models]:
    opened = Models({"demo": demo, "stories260k": SHARED_MODELS / "stories260K", "tiny12": SHARED_MODELS / "tiny12"})
    yield opened
    opened.close()


def check_case(case: Case, models: Models, n_tokens: int) -> DraftCounts:
    """Raises AssertionError where exact and full differ in anything; what was counted."""
    return check_run(Run.of(case, models.engine(case), n_tokens), case, models)


def check_run(run: Run, case: Case, models: Models) -> DraftCounts:
    """The same of a run that may be a little different."""
    executor = models.executor(case)
    expected = run.full()
    texts = [
        prompt + [token.token_id for token in tokens] for prompt, tokens in zip(run.prompts, expected, strict=True)
    ]
    counts = DraftCounts()
    check_identity(expected, run.exact(drafting_of(case, run, texts), executor, counts))
    assert executor.cache.n_bytes == 0
    assert counts.n_tokens == sum(len(tokens) - 1 for tokens in expected)
    return counts


@pytest.mark.parametrize("case", drawn_cases(N_CASES), ids=lambda case: f"{case.seed}-{case.model}-{case.drafts}")
@pytest.mark.sample(3)
def test_exact_says_what_full_says(case: Case, models: Models) -> None:
    check_case(case, models, TOKENS)


ASYNC = Case(7, "demo", "codebook", True, "exit", 1, 0.45, "threshold", False, "greedy", 1, "length", is_async=True)


@pytest.mark.few(5)
@pytest.mark.parametrize("depth", [0.1, 0.55, 0.8])  # before the end of the GPU's layers, at it, and after it
@pytest.mark.parametrize("n_drafts", [1, 3])
@pytest.mark.parametrize(("rule", "sampling", "n_sequences"), [("threshold", "greedy", 3), ("always", "top-p", 1)])
def test_asynchronous_drafting_changes_nothing(
    models: Models, depth: float, n_drafts: int, rule: str, sampling: str, n_sequences: int
) -> None:
    case = replace(ASYNC, depth=depth, n_drafts=n_drafts, rule=rule, sampling=sampling, n_sequences=n_sequences)
    run = Run.of(case, models.engine(case), TOKENS)
    counts = check_run(replace(run, params=run.params.changed(max_new_tokens=TOKENS)), case, models)
    assert 0 < counts.n_ahead_kept < counts.n_ahead  # right and wrong guesses both


@pytest.mark.parametrize("ending", DIMENSIONS["ending"])
@pytest.mark.sample(1)
def test_guesses_end_with_the_text(models: Models, ending: str) -> None:
    n_ahead = 0
    for seed in range(4):
        case = replace(ASYNC, seed=seed, ending=ending, n_drafts=1 + seed % 3, n_sequences=1 + 2 * (seed % 2))
        n_ahead += check_case(case, models, TOKENS).n_ahead
    assert n_ahead > 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_exact_says_what_full_says_in_many_cases(part: int, models: Models) -> None:
    for case in drawn_cases(N_SLOW_CASES)[part::20]:
        check_case(case, models, SLOW_TOKENS)


def test_every_value_of_each_dimension_is_drawn_often() -> None:
    for name, values in DIMENSIONS.items():
        counts = Counter(getattr(case, name) for case in drawn_cases(N_SLOW_CASES))
        assert set(counts) == set(values) and min(counts.values()) >= 20
        assert {getattr(case, name) for case in drawn_cases(N_CASES)} == set(values)
    mixtures = {tuple(getattr(case, name) for name in MIXED) for case in drawn_cases(N_SLOW_CASES)}
    assert mixtures == set(product(*(DIMENSIONS[name] for name in MIXED)))
