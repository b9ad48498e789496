"""Models with recurrent layers: transformers' logits, exact rollbacks, and the tokens of full mode in exact mode."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.layers.state import KV_BYTES, LOG_TOKENS
from hetero_ee.runtime.executors.executor import Executor
from tests.e2e.test_exact_identity import Models, check_case
from tests.e2e.test_families import TOLERANCE, executor_of
from tests.exact_cases import drawn_cases
from tests.executor_support import executor_for, hidden_alone, model_of
from tests.families import random_model, save_checkpoint
from tests.mtp_models import DENSE, knowing_mtp

FAMILIES = ("qwen3.5", "qwen3.5-even", "lfm2", "nemotron-h")
TEXT = [(7 * i * i + 3) % 131 for i in range(150)]  # longer than transformers' chunks of 64
OTHER = [(5 * i + 11) % 131 for i in range(150)]
STORED = [("fp32", "fp32"), *(("int4", kind) for kind in KV_BYTES)]  # weights, keys and values


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_cut_anywhere_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT])).logits[0]
    executor, draw = executor_of(save_checkpoint(model, tmp_path)), random.Random(family)
    sequence, cuts = executor.cache.open_new(), sorted(draw.sample(range(1, len(TEXT)), 5))
    for first, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        logits = executor.logits(Batch.of_sequence(sequence, first, TEXT[first:end]), range(end - first))
        assert (logits - expected[first:end]).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.fixture(scope="module", params=[(family, *kinds) for family in FAMILIES for kinds in STORED], ids="-".join)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    family, weights, kind = request.param
    made = executor_for(model_of(family, weights, tmp_path_factory.mktemp(family)), weights, kind)
    yield made
    made.close()


class Walk:
    """A sequence that drafts, forgets and reads on at random. Hidden states of its true tokens are those `expected`."""

    text, other = TEXT, OTHER

    def __init__(self, executor: Executor, seed: int, expected: torch.Tensor) -> None:
        self.executor, self.draw, self.expected = executor, random.Random(seed), expected
        self.sequence, self.n_true, self.n_drafted = executor.cache.open_new(), 0, 0

    def step(self) -> None:
        if self.draw.random() < 0.3:
            self.executor.cache.settle(self.sequence, self.n_true)
        if self.n_true == len(self.text) or self.draw.random() < 0.15:
            self.forget()
        elif self.draw.random() < 0.3:
            self.read(self.draw.choice([1, 2, LOG_TOKENS - 1, LOG_TOKENS, LOG_TOKENS + 1, 60]))
        else:
            self.draft(
                self.draw.randint(1, min(16, self.executor.cache.max_tokens - self.n_true)),
                self.draw.randrange(self.executor.spec.n_layers),
            )

    def read(self, n_tokens: int) -> None:
        tokens = self.text[self.n_true : self.n_true + n_tokens]
        hidden = self.executor.hidden(Batch.of_sequence(self.sequence, self.n_true, tokens))
        assert torch.equal(hidden, self.expected[self.n_true : self.n_true + len(tokens)])
        self.n_true += len(tokens)

    def draft(self, n_tokens: int, exit_layer: int) -> None:
        """Draft one by one through the first layers, verify together, and forget the wrong drafts."""
        n_right = min(self.draw.randint(0, n_tokens), len(self.text) - self.n_true)
        tokens = [*self.text[self.n_true : self.n_true + n_right], *self.other[: n_tokens - n_right]]
        batch, layers = Batch.of_sequence(self.sequence, self.n_true, tokens), range(self.executor.spec.n_layers)
        hidden = None
        if exit_layer:
            alone = (Batch.of_sequence(self.sequence, self.n_true + i, [token]) for i, token in enumerate(tokens))
            hidden = torch.cat([self.executor.run(each, None, layers[:exit_layer]) for each in alone])
        found = self.executor.run(batch, hidden, layers[exit_layer:])
        assert torch.equal(found[:n_right], self.expected[self.n_true : self.n_true + n_right])
        self.n_true += n_right
        assert self.executor.cache.truncate(self.sequence, self.n_true) == self.n_true
        self.n_drafted += n_tokens - n_right

    def forget(self) -> None:
        """Forget a few tokens, which the log may still hold, or many, which begins the sequence again."""
        length = max(0, self.n_true - self.draw.choice([1, 2, 30, 100]))
        self.n_true = self.executor.cache.truncate(self.sequence, length)
        assert self.n_true in (0, length)


def test_rollbacks_are_as_if_nothing_had_been_drafted(executor: Executor) -> None:
    expected, n_drafted = hidden_alone(executor, TEXT), 0
    walks = [Walk(executor, seed, expected) for seed in range(2)]
    for _ in range(24):
        for walk in walks:
            walk.step()
            executor.cache.check()
    for walk in walks:
        n_drafted += walk.n_drafted
        executor.cache.close(walk.sequence)
    assert n_drafted > 50


def test_neighbours_change_nothing(executor: Executor) -> None:
    """Tokens of several sequences in one pass, in any order between sequences."""
    texts = [TEXT[:40], OTHER[:7], TEXT[5:30]]
    alone = [hidden_alone(executor, text) for text in texts]
    sequences = [executor.cache.open_new() for _ in texts]
    rows = [(at, number) for number, text in enumerate(texts) for at in range(len(text))]
    rows.sort()
    batch = Batch(
        tuple(texts[number][at] for at, number in rows),
        tuple(sequences[number] for _, number in rows),
        tuple(at for at, _ in rows),
    )
    for state, (at, number) in zip(executor.hidden(batch), rows, strict=True):
        assert torch.equal(state, alone[number][at])
    for sequence in sequences:
        executor.cache.close(sequence)


@pytest.fixture(scope="module")
def models(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """A hybrid, a dense model and a hybrid with experts, all with an MTP layer."""
    sizes = {"vocab_size": 2048, "max_position_embeddings": 256}
    kinds = {"hybrid": sizes, "dense": sizes | DENSE, "experts": sizes | {"family": "qwen3.5-moe"}}
    opened = Models({kind: knowing_mtp(tmp_path_factory.mktemp(kind), demo, **kinds[kind]) for kind in kinds})
    yield opened
    opened.close()


N_CASES = 500
CASES = [replace(case, model=("hybrid", "dense", "experts")[case.seed % 3]) for case in drawn_cases(N_CASES)]


@pytest.mark.parametrize("part", range(20))
@pytest.mark.few(1)
def test_exact_says_what_full_says(part: int, models: Models) -> None:
    for case in CASES[part::20][: 3 if part == 0 else None]:
        check_case(case, models, 40)


@pytest.mark.parametrize("kind", ["hybrid", "dense", "experts"])
def test_drafts_of_an_mtp_layer_are_right_and_wrong_and_change_nothing(kind: str, models: Models) -> None:
    n_right = n_checked = 0
    for case in [each for each in drawn_cases(N_CASES) if each.drafts in ("head", "n-grams and head")][:6]:
        plain = replace(case, model=kind, sampling="temperature", ending="length", grammar="", rule="always")
        counts = check_case(plain, models, 40)
        for found in counts.statistics(models.engine(plain).spec.n_layers, 0).origins:
            if found.origin == "draft head":
                n_right, n_checked = n_right + found.n_accepted, n_checked + found.n_checked
    assert 0.2 * n_checked < n_right < n_checked
