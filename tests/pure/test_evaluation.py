"""Modes side by side: every figure against one computed by hand, and its interval."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_ee.calibration.texts import OPENINGS
from hetero_ee.errors import HeteroError, ModelError, UsageError
from hetero_ee.evaluation.material import Material, of_text, of_the_model
from hetero_ee.evaluation.metrics import Estimate, doubled_words, first_divergence, n_equal, nats_and_divergence, ratio
from hetero_ee.evaluation.open_mode import Variant, Written
from hetero_ee.evaluation.run import ModeResult, Refused, evaluate
from hetero_ee.options.sampling import SamplingParams

N_NEW = 4


@pytest.mark.parametrize(
    ("ours", "theirs", "equal", "first"),
    [
        ([1, 2, 3], [1, 2, 3], 3, None),
        ([1, 9, 3], [1, 2, 3], 2, 1),
        ([9, 2, 3], [1, 2, 3], 2, 0),
        ([1, 2], [1, 2, 3], 2, 2),
        ([], [1], 0, 0),
        ([], [], 0, None),
    ],
)
def test_tokens_that_are_equal_and_the_first_that_is_not(
    ours: list[int], theirs: list[int], equal: int, first: int | None
) -> None:
    assert n_equal(ours, theirs) == n_equal(theirs, ours) == equal
    assert first_divergence(ours, theirs) == first_divergence(theirs, ours) == first


@pytest.mark.parametrize(
    ("text", "n_doubled", "n_words"),
    [
        ("", 0, 0),
        ("the cat sat", 0, 3),
        ("the the cat", 1, 3),
        ("The the the cat", 2, 4),
        ("very, very big. Big", 0, 4),
        ("he had\nhad it", 1, 4),
        ("don't don't don", 1, 3),
        ("don\N{RIGHT SINGLE QUOTATION MARK}t say 'no no'", 1, 4),
        ("!! ?? --", 0, 0),
        ("3 3 _ _", 2, 4),
    ],
)
def test_doubled_words_stand_side_by_side(text: str, n_doubled: int, n_words: int) -> None:
    assert doubled_words(text) == (n_doubled, n_words)


def test_nats_and_divergence_by_hand() -> None:
    ours, theirs = torch.tensor([0.25, 0.75]).log(), torch.tensor([0.5, 0.5]).log()
    nats, kl = nats_and_divergence(ours + 3.0, theirs - 2.0, 0)  # logits are known but for a constant
    assert nats == pytest.approx(math.log(4), rel=1e-6)
    assert kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert nats_and_divergence(ours, ours, 1)[1] == 0.0


def test_what_is_impossible_is_infinitely_far_from_what_is_not() -> None:
    never, both = torch.tensor([0.0, -math.inf]), torch.tensor([0.0, 0.0])
    assert nats_and_divergence(never, both, 1) == (math.inf, math.inf)
    assert nats_and_divergence(both, never, 0) == (pytest.approx(math.log(2)), pytest.approx(math.log(2)))
    assert nats_and_divergence(never, never, 0) == (0.0, 0.0)
    with pytest.raises(ModelError, match="NaN"):
        nats_and_divergence(torch.tensor([0.0, math.nan]), both, 0)


def test_an_estimate_is_of_sums_and_has_an_interval_of_texts() -> None:
    found = ratio([1, 2, 6], [1, 4, 4], seed=0)
    assert found is not None and found.value == 1.0
    assert found.low is not None and found.high is not None
    assert 0.5 <= found.low < 1.0 < found.high <= 1.5  # of texts whose own ratios are 1, 0.5 and 1.5
    assert found == ratio([1, 2, 6], [1, 4, 4], seed=0)
    assert ratio([2, 4], [1, 2], seed=0) == Estimate(2.0, 2.0, 2.0)
    assert ratio([3], [2], seed=0) == Estimate(1.5)
    assert ratio([0, 0], [0, 0], seed=0) is None


def test_an_estimate_may_be_of_texts_of_which_some_count_for_nothing() -> None:
    found = ratio([1, 0, 0], [2, 0, 0], seed=0)
    assert found == Estimate(0.5, 0.5, 0.5)
    infinite = ratio([math.inf, 1], [1, 1], seed=0, of=np.exp)
    assert infinite is not None and infinite.value == infinite.high == math.inf
    assert infinite.low == pytest.approx(math.e)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(5)
    n_held = 0
    for seed in range(200):
        wholes = draw.integers(20, 60, size=40)
        found = ratio([draw.binomial(n, 0.3) for n in wholes], wholes.tolist(), seed)
        assert found is not None and found.low is not None and found.high is not None
        n_held += found.low <= 0.3 <= found.high
    assert 0.88 <= n_held / 200 <= 0.99


# What is compared.


class Words:
    """A tokenizer: a token a word, with a begin token."""

    def encode(self, text: str, *, with_special_tokens: bool = True) -> list[int]:
        return [0] * with_special_tokens + [len(word) for word in text.split()]


def test_chunks_are_the_beginnings_of_documents_and_then_what_follows() -> None:
    text = "a bb ccc dddd eeeee ffffff\n<|endoftext|>\naa\n<|endoftext|>\nbbb b b b\n"
    found = of_text(Words(), text, 3, 2, 2, "words")  # type: ignore[arg-type]
    assert found.held_out == ((0, 1, 2, 3), (0, 3, 1, 1), (0, 4, 5, 6))
    assert found.prompts == ((0, 1), (0, 3), (0, 4)) and found.description == "words"
    with pytest.raises(UsageError, match="makes 3 chunks of 4 to 4 tokens and n_prompts is 4; give a longer text"):
        of_text(Words(), text, 4, 2, 2, "words")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "\n", "<|endoftext|>\n<|endoftext|>", "one two"])
def test_a_text_without_a_chunk_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="makes 0 chunks"):
        of_text(Words(), text, 1, 2, 8, "words")  # type: ignore[arg-type]


def test_the_last_chunk_of_a_document_may_be_shorter() -> None:
    text = " ".join("a" * 200)
    found = of_text(Words(), text, 2, 10, 100, "words")  # type: ignore[arg-type]
    assert found.held_out is not None and [*map(len, found.held_out)] == [110, 92]


def test_the_model_s_own_openings_are_limited() -> None:
    assert len(of_the_model(Words(), 3).prompts) == 3  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"n_prompts is 99 and there are {len(OPENINGS)} openings"):
        of_the_model(Words(), 99)  # type: ignore[arg-type]


# Modes.


@dataclass
class Scripted:
    """An open mode that says what the script says, token after token."""

    texts: dict[tuple[int, ...], list[int]]  # by prompt
    chance: float  # of token 1, the others share the rest
    seconds: float = 1.0
    emulated_s: float | None = None
    depth: int = 3
    n_cpu_passes: float = 3.0
    asked: list[SamplingParams] | None = None
    changed: int = 0

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Written:
        if self.asked is not None:
            self.asked.append(params)
        ids = self.texts[tuple(prompt)][: params.max_new_tokens]
        text = " ".join(map(str, ids))
        n_later = len(ids) - 1
        return Written(tuple(ids), text, self.seconds, self.emulated_s, self.depth * n_later, self.n_cpu_passes)

    def score(self, token_ids: Sequence[int], n_prompt_tokens: int) -> Iterator[tuple[Tensor, int]]:
        rest = (1 - self.chance) / 3
        for _ in token_ids[n_prompt_tokens:]:
            yield torch.tensor([rest, self.chance, rest, rest]).log(), self.depth

    def n_changed(self, prompt: Sequence[int], written: Written) -> int:
        return self.changed


PROMPTS = ((1, 2), (3, 1))
MATERIAL = Material(PROMPTS, ((1, 2, 1, 1), (3, 1, 1, 0)), "words")
SAID = {PROMPTS[0]: [1, 2, 3, 0], PROMPTS[1]: [2, 2, 2, 2]}


def opener(modes: dict[str, Any]) -> Any:
    @contextmanager
    def opened(variant: Variant) -> Iterator[Any]:
        if isinstance(modes[variant.name], Exception):
            raise modes[variant.name]
        yield modes[variant.name]

    return opened


def results(modes: dict[str, Any], *variants: Variant, material: Material = MATERIAL) -> list[Any]:
    return list(evaluate(material, variants, opener(modes), N_NEW, seed=3))


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value


def test_every_figure_by_hand() -> None:
    full = Scripted(SAID, 0.5, seconds=6.0)
    other = Scripted({PROMPTS[0]: [1, 2, 0, 0], PROMPTS[1]: [2, 2, 2, 2]}, 0.25, seconds=1.5, depth=2, n_cpu_passes=1.5)
    other.changed = 1
    first, second = results({"full": full, "certified, risk 0.1": other}, Variant("certified", 0.1))
    assert (first.variant.name, second.variant.name) == ("full", "certified, risk 0.1")
    assert value(first.tokens_per_s) == pytest.approx(6 / 12) and value(second.tokens_per_s) == pytest.approx(6 / 3)
    assert first.emulated_tokens_per_s is None and value(second.speedup) == pytest.approx(4.0)
    assert value(first.identity) == 1.0 and value(second.identity) == 7 / 8
    assert first.first_divergences == (None, None) and second.first_divergences == (2, None)
    assert value(first.tokens_before_divergence) == 4.0 and value(second.tokens_before_divergence) == 3.0
    assert value(first.changed) == 0.0 and value(second.changed) == 2 / 6  # the first token is the prompt's pass's
    # Of the four scored tokens three are token 1, the last is another.
    assert value(first.perplexity) == pytest.approx(((1 / 0.5) ** 3 * 6) ** 0.25)
    assert value(second.perplexity) == pytest.approx(4.0)
    assert value(first.kl_nats) == 0.0
    assert value(second.kl_nats) == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log((1 / 6) / 0.25), rel=1e-5)
    assert value(first.doubled_words) == 3 / 8 and value(second.doubled_words) == 4 / 8
    assert value(first.mean_depth) == 3.0 and value(second.mean_depth) == value(second.scored_mean_depth) == 2.0
    assert value(first.cpu_passes_per_token) == 1.0 and value(second.cpu_passes_per_token) == 0.5


def test_an_emulated_clock_has_a_column_of_its_own() -> None:
    modes = {"full": Scripted(SAID, 0.5, 1.0, 0.5), "exact": Scripted(SAID, 0.5, 3.0, 0.125)}
    _, exact = results(modes, Variant("exact"))
    assert value(exact.tokens_per_s) == 1.0 and value(exact.emulated_tokens_per_s) == 24.0
    assert value(exact.speedup) == 4.0


def test_full_mode_is_always_first_and_once() -> None:
    modes = {"full": Scripted(SAID, 0.5), "exact": Scripted(SAID, 0.5)}
    found = results(modes, Variant("exact"), Variant("full"))
    assert [each.variant.mode for each in found] == ["full", "exact"]
    assert [each.variant.mode for each in results(modes)] == ["full"]


def test_texts_are_greedy_and_nothing_ends_them_early() -> None:
    asked: list[SamplingParams] = []
    results({"full": Scripted(SAID, 0.5, asked=asked)})
    usual = SamplingParams(max_new_tokens=N_NEW, ignore_eos=True)
    assert asked == [usual] * 3  # one of them to warm up


def test_held_out_texts_that_nobody_gave_are_full_mode_s_own_sampled_ones() -> None:
    asked: list[SamplingParams] = []
    modes = {"full": Scripted(SAID, 0.5, asked=asked), "exact": Scripted(SAID, 0.25)}
    _, exact = results(modes, Variant("exact"), material=replace(MATERIAL, held_out=None))
    assert [(each.temperature, each.seed) for each in asked[:2]] == [(1.0, 3), (1.0, 4)]
    assert value(exact.perplexity) == pytest.approx(4.0)


def test_a_mode_that_can_not_be_opened_is_left_out_and_said() -> None:
    modes = {"full": Scripted(SAID, 0.5), "certified": UsageError("no certificate."), "exact": Scripted(SAID, 0.5)}
    first, refused, last = results(modes, Variant("certified"), Variant("exact"))
    assert refused == Refused(Variant("certified"), "no certificate.")
    assert isinstance(first, ModeResult) and isinstance(last, ModeResult)
    with pytest.raises(HeteroError, match="no memory"):
        results({"full": HeteroError("no memory.")}, Variant("exact"))


def test_variants_have_names() -> None:
    assert [Variant("certified", 0.05).name, Variant("calm").name] == ["certified, risk 0.05", "calm"]
