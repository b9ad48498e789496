"""Each exit policy against its definition, written out slowly: random logits, some not finite, several texts."""

from collections.abc import Sequence
from math import exp, inf, isfinite, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_ee.decoding.requests import Ending, Request
from hetero_ee.decoding.sampling import choose_token
from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.policies.calm import CalmPolicy
from hetero_ee.speculation.policies.policy import ExitPolicy
from hetero_ee.speculation.policies.skipdecode import SkipDecodePolicy

N_LAYERS, VOCABULARY, MAX_NEW = 9, 12, 10
LAYERS = (2, 3, 5, 6, 8)  # where tokens are judged
ENDING = Ending(frozenset(), 100)
SAMPLINGS = (
    SamplingParams(MAX_NEW),
    SamplingParams(MAX_NEW, temperature=0.8, seed=5),
    SamplingParams(MAX_NEW, temperature=1.0, top_k=2, repeat_penalty=1.5),
)
Depths = list[tuple[int, int | None]]  # of each text: layers passed, and the token given out there

cases = given(st.integers(0, 2**32 - 1), st.sampled_from(SAMPLINGS), st.booleans())


class Case:
    """One step of some texts: logits (exit layers, m, vocab) of their last tokens."""

    def __init__(self, seed: int, sampling: SamplingParams, is_spoiled: bool = False) -> None:
        random = np.random.default_rng(seed)
        m = int(random.integers(1, 5))
        drawn = random.normal(size=(len(LAYERS), m, VOCABULARY)) * random.uniform(0.5, 6, (len(LAYERS), m, 1))
        drawn[:, :, :3] += 2 * random.normal(size=(1, m, 3)) * random.integers(0, 3)  # exit layers often agree
        if is_spoiled:
            drawn[random.random((len(LAYERS), m)) < 0.4, int(random.integers(VOCABULARY))] = random.choice(
                [nan, inf, -inf]
            )
        self.logits = torch.from_numpy(drawn.astype(np.float32))
        self.sampling = sampling
        self.texts = []
        for sequence in range(m):
            prompt = random.integers(0, VOCABULARY, int(random.integers(1, 6))).tolist()
            text = Request.of_prompt(sequence, prompt, sampling, ENDING, lambda ids: "")
            text.token_ids += random.integers(0, VOCABULARY, int(random.integers(1, MAX_NEW))).tolist()
            self.texts.append(text)
        self.ends = {layer: DraftEnd() for layer in LAYERS}
        self.executor: Any = SimpleNamespace(
            head_on_gpu=False, spec=SimpleNamespace(n_layers=N_LAYERS), draft_logits=self._draft_logits
        )

    def _draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        """A hidden state is the text's number and the layers passed."""
        return torch.stack([self.logits[LAYERS.index(int(layers)), int(number)] for number, layers in hidden])

    def decided(self, policy: ExitPolicy, context_tokens: int = 100) -> Depths:
        """As early_exit.py asks a policy."""
        judge = policy.judging(self.executor, DraftSampler())
        for text in self.texts:
            text.ending = Ending(frozenset(), context_tokens)
        found: Depths = [(N_LAYERS, None)] * len(self.texts)
        asked_at = [judge.exit_layers(text) for text in self.texts]
        going = list(range(len(self.texts)))
        for layer in LAYERS:
            asked = [number for number in going if layer in asked_at[number]]
            if asked:
                hidden = torch.tensor([[number, layer] for number in asked], dtype=torch.float32)
                chosen = judge.judge(layer, hidden, [self.texts[number] for number in asked])
                for number, token_id in zip(asked, chosen, strict=True):
                    if token_id is not None:
                        found[number] = layer, token_id
                        going.remove(number)
                        judge.given_out(self.texts[number], layer, hidden[0])
        return found

    def said(self, place: int, number: int) -> int | None:
        """What the text's sampling chooses there; None where the logits are not finite."""
        row, text = self.logits[place, number], self.texts[number]
        if not all(map(isfinite, row.tolist())):
            return None
        return choose_token(row, text.token_ids, self.sampling, text.index, len(text.token_ids))

    def progress(self, number: int) -> float:
        text = self.texts[number]
        return (len(text.token_ids) - text.n_prompt_tokens) / MAX_NEW


def first(case: Case, number: int, opens: Sequence[bool]) -> tuple[int, int | None]:
    """The first exit layer that opens, and what is said there."""
    place = next((place for place, is_open in enumerate(opens) if is_open), None)
    return (N_LAYERS, None) if place is None else (LAYERS[place], case.said(place, number))


@settings(deadline=None)
@cases
def test_calm_by_its_definition(seed: int, sampling: SamplingParams, is_spoiled: bool) -> None:
    case = Case(seed, sampling, is_spoiled)
    found = case.decided(CalmPolicy(case.ends, threshold=0.6, decay=2.0))
    for number, each in enumerate(found):
        threshold, opens = 0.9 * 0.6 + 0.1 * exp(-2.0 * case.progress(number)), []
        for place in range(len(LAYERS)):
            exps = sorted(np.exp(case.logits[place, number].double().numpy() - 20))
            margin = nan if case.said(place, number) is None else (exps[-1] - exps[-2]) / sum(exps)
            opens.append(margin >= threshold)
        assert each == first(case, number, opens)


@settings(deadline=None)
@cases
def test_skipdecode_by_its_definition(seed: int, sampling: SamplingParams, is_spoiled: bool) -> None:
    """All texts of a step at the layer of the one that is to go deepest; where its logits are spoiled, the next."""
    case = Case(seed, sampling, is_spoiled)
    deepest = max(N_LAYERS * (0.9 + (0.2 - 0.9) * case.progress(number)) for number in range(len(case.texts)))
    for number, each in enumerate(case.decided(SkipDecodePolicy(case.ends, first=0.9, last=0.2))):
        opens = [layer >= deepest and case.said(place, number) is not None for place, layer in enumerate(LAYERS)]
        assert each == first(case, number, opens)


def test_skipdecode_asks_for_one_layer_that_falls_and_forgets_texts_that_ended() -> None:
    case = Case(3, SAMPLINGS[0])
    case.texts = [Request.of_prompt(n, [1] * (1 + n), SAMPLINGS[0], ENDING, lambda ids: "") for n in range(2)]
    policy = SkipDecodePolicy(case.ends, first=1.0, last=0.2)
    judge = policy.judging(case.executor, DraftSampler())
    asked = []
    for step in range(MAX_NEW - 1):
        for text in case.texts:
            text.token_ids.append(0)
        asked.append([list(judge.exit_layers(text)) for text in case.texts])
        assert step == 0 or (asked[-1][0] == asked[-1][1] and len(asked[-1][0]) <= 1)
    assert [layers[0] for layers in asked[1:]] == [[8], [8], [8], [6], [5], [5], [5], [3]]
    behind = Request.of_prompt(2, [1], SAMPLINGS[0], ENDING, lambda ids: "")
    behind.token_ids.append(0)
    judge.exit_layers(behind)
    assert judge.exit_layers(case.texts[0]) == []  # the text behind has to pass every layer
    behind.finished = True
    assert judge.exit_layers(case.texts[0]) == [3]


@pytest.mark.parametrize("value", [nan, inf, -0.1, 1.5, True, "0.5", None])
def test_parameters_out_of_range_are_refused(value: Any) -> None:
    ends: dict[int, DraftEnd] = {}
    makers: list[Any] = [
        lambda: CalmPolicy(ends, threshold=value),
        lambda: CalmPolicy(ends, decay=-1.0 if value == 1.5 else value),
        lambda: SkipDecodePolicy(ends, first=value),
        lambda: SkipDecodePolicy(ends, last=value),
    ]
    for make in makers:
        with pytest.raises(UsageError, match="expected a number"):
            make()


def test_depths_that_rise_are_refused() -> None:
    with pytest.raises(UsageError, match="depths have to fall"):
        SkipDecodePolicy({}, first=0.4, last=0.6)


def test_nothing_is_remembered_of_a_position_whose_token_is_given_out() -> None:
    sampler = DraftSampler()
    case = Case(7, SAMPLINGS[1])
    judge = CalmPolicy(case.ends, threshold=0.0).judging(case.executor, sampler)
    for text in case.texts:
        judge.exit_layers(text)
        judge.judge(2, torch.tensor([[text.index, 2.0]]), [text])
        judge.given_out(text, 2, torch.zeros(2))
    assert not sampler.noise._kept
