"""SpecEE's policy on the demo model: judged as the paper says, and alike wherever the model runs."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hetero_ee import Engine, UsageError
from hetero_ee.calibration.certify import MAX_PENDING, NEW_TOKENS, PROMPT_TOKENS, specee_depths
from hetero_ee.decoding.requests import Ending, Request
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.early_exit import EarlyExits
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.recent_exits import RecentExits
from hetero_ee.speculation.policies.exit_head import exit_heads
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.speculation.statistics import ExitCounts
from hetero_ee_profiles.reference import reference_profile
from tests.drafted_generation import generate_early
from tests.emulation import LAPTOP

PROMPT = "Once upon a time, there was a little dog"
N_NEW = 48


@pytest.fixture
def engine(converted_demo: None) -> Iterator[Engine]:
    limits = Limits(mode="specee", gpu_layers=0)
    with Engine.from_pretrained(threads=1, profile=reference_profile(LAPTOP), limits=limits) as engine:
        yield engine


def test_it_exits_and_says_so(engine: Engine) -> None:
    text = engine.generate(PROMPT, max_new_tokens=N_NEW)
    found = engine.exit_statistics
    assert found is not None
    assert found.n_tokens == text.n_generated_tokens - 1
    assert 0.2 < found.n_exited / found.n_tokens <= 1
    assert found.mean_depth < engine.spec.n_layers
    assert found.judged_per_token > 0
    assert engine.draft_statistics is None


def test_the_same_tokens_on_a_split_machine(converted_demo: None, engine: Engine) -> None:
    """On the emulated one the head, the draft head's end and half of the layers are on the GPU."""
    alone = engine.generate(PROMPT, max_new_tokens=N_NEW, temperature=0.7, seed=3)
    split = Limits(mode="specee", gpu_layers=engine.spec.n_layers // 2, draft_length=engine.plan.draft_length)
    with Engine.from_pretrained(profile=reference_profile(LAPTOP), limits=split, emulate=True) as other:
        assert other.plan is not None
        assert other.plan.gpu_layers == engine.spec.n_layers // 2
        assert other.generate(PROMPT, max_new_tokens=N_NEW, temperature=0.7, seed=3).token_ids == alone.token_ids
        assert other.exit_statistics == engine.exit_statistics


@pytest.mark.parametrize("with_draft_head", [False, True])
def test_judged_as_the_paper_says(converted_demo: None, engine: Engine, with_draft_head: bool) -> None:
    """By the definition, one token and layer at a time: candidates, features, predictor, and the whole head's word."""
    calibration = engine.calibrations.find_or_warn(pytest.fail)  # type: ignore[union-attr]
    assert calibration is not None
    executor, n_layers = engine.executor, engine.spec.n_layers
    first = calibration.schedule[0]
    heads = exit_heads(calibration, range(1 if with_draft_head else first, n_layers), compiled=True)
    ids = [token.token_id for token in engine.stream(PROMPT, max_new_tokens=N_NEW)]
    prompt = engine._prompt_ids(PROMPT)
    stub = _Known([calibration, executor]) if with_draft_head else None
    policy = SpecEE(heads, calibration.schedule, n_layers, stub)  # type: ignore[arg-type]
    params = SamplingParams()
    judge = policy.judging(executor, DraftSampler())
    text = Request.of_prompt(0, prompt, params, Ending(frozenset(), 512), lambda ids: "")
    recent, n_exits = RecentExits(calibration.schedule, n_layers), 0
    sequence = executor.cache.open_new()
    for token_id in ids:
        expected_layers = [layer for layer in recent.active() if layer in heads]
        assert list(judge.exit_layers(text)) == expected_layers
        candidates, softmax = (stub.ids, np.zeros((1, 4), np.float32)) if stub else (None, np.zeros((1, 4), np.float32))
        start = executor.cache.length(sequence)
        depth, hidden = n_layers, None
        batch = Batch.of_sequence(sequence, start, text.token_ids[start:])
        for layer in range(n_layers):
            hidden = executor.run(batch, hidden, range(layer, layer + 1))
            exit_layer = layer + 1
            if exit_layer not in expected_layers or depth < n_layers:
                continue
            last = hidden[-1:]
            [found] = judge.judge(exit_layer, last, [text])
            fitted, logits = calibration.at(exit_layer), judge.logits(exit_layer, last)
            best = int(logits.argmax())
            if candidates is None:
                candidates = logits[0].sort(descending=True, stable=True).indices[:4]
                features = exit_features(logits[:, candidates].numpy(), softmax)
                is_sure = fitted.opens(features, is_partial=False)[0]
            else:
                features = exit_features(logits[:, candidates].numpy(), softmax)
                is_sure = fitted.opens(features, is_partial=True)[0]
            assert found == (best if is_sure and best in candidates.tolist() else None), (
                len(text.token_ids),
                exit_layer,
            )
            if found is not None:
                depth, n_exits = exit_layer, n_exits + 1
        judge.given_out(text, depth, last[0])
        recent.append(depth)
        text.token_ids.append(token_id)
    executor.cache.close(sequence)
    assert n_exits > 5


def test_followed_texts_are_those_of_one_at_a_time(engine: Engine) -> None:
    calibration = engine.calibrations.find_or_warn(pytest.fail)  # type: ignore[union-attr]
    assert calibration is not None
    executor, n_layers = engine.executor, engine.spec.n_layers
    chunks = [tuple(engine._tokenizer.encode(each)) for each in (PROMPT, "The dog")]
    ending = engine._ending(executor)
    policy = SpecEE(exit_heads(calibration, range(4, n_layers), compiled=True), calibration.schedule, n_layers)
    alone = np.zeros(n_layers + 1, int)
    for chunk in chunks:
        counts, params = ExitCounts(), SamplingParams(max_new_tokens=NEW_TOKENS)
        exits = EarlyExits(policy, MAX_PENDING)
        asked = [list(chunk[:PROMPT_TOKENS])]
        assert [*generate_early(executor, asked, params, ending, lambda ids: "", lambda: 0.0, exits, counts)]
        alone += np.array(counts.statistics(n_layers).depths)
    assert specee_depths(executor, ending, calibration, chunks) == tuple(alone[1:])
    assert sum(alone) > alone[-1] > 0


class _Known:
    """Stands for a draft head: the same four candidates for every token."""

    def __init__(self, kept: list[object]) -> None:
        self.ids = torch.tensor([13, 15, 267, 282])

    def of(self, executor: object, sequence: int, token_ids: list[int]) -> torch.Tensor:
        return self.ids


def test_without_a_calibration_it_is_refused(cache: object, tiny: object) -> None:
    with pytest.raises(UsageError, match="hetero-ee calibrate"):
        Engine.from_pretrained(tiny, limits=Limits(mode="specee", gpu_layers=0), profile=reference_profile(LAPTOP))  # type: ignore[arg-type]
