"""The demo model ships certified: small, found with its calibration, and its promise kept by prompts left out."""

from pathlib import Path

import numpy as np
import pytest

from hetero_ee import Engine
from hetero_ee.calibration.certify import N_PROMPTS, PARAMS, RISKS, TOKENS_A_PROMPT, CertificateRun, by_group, followed
from hetero_ee.kv.batch import Batch
from hetero_ee.speculation.exits.certificate import DELTA, Certificate, levels_of
from hetero_ee.speculation.policies.certified import Certified
from hetero_ee.weights.store.calibration_files import CERTIFICATE_FILE
from tests.certificates import part_of
from tests.e2e.test_demo_calibration import place

N_SPLITS = 200
MAX_BYTES = 1_000_000
EXIT_LAYERS = (4, 8, 11)


@pytest.fixture(scope="module")
def certificate(demo: Path) -> Certificate:
    found = place(demo, Path("no store"))
    calibration = found.find()
    assert calibration is not None
    shipped = found.certificate(calibration)
    assert shipped is not None
    return shipped


def test_it_is_small_and_of_enough_prompts(demo: Path, certificate: Certificate) -> None:
    assert (demo / "calibration" / CERTIFICATE_FILE).stat().st_size < MAX_BYTES
    assert certificate.n_prompts == N_PROMPTS and certificate.exit_layers == tuple(range(1, 12))
    assert len(certificate.judgements) > 0.99 * N_PROMPTS * TOKENS_A_PROMPT
    assert certificate.kv_type == "fp16"


def test_at_five_percent_almost_half_of_the_tokens_exit_after_a_third_of_the_layers(certificate: Certificate) -> None:
    assert certificate.certified_exit((4,), 0.05).shares[0] > 0.4
    together = certificate.certified_exit((3, 8), 0.05).shares
    assert sum(together) > 0.6


@pytest.mark.sample(0)
@pytest.mark.parametrize("risk", RISKS)
def test_the_other_half_of_the_prompts_keeps_the_promise(certificate: Certificate, risk: float) -> None:
    """200 random halves certify; on the other half, of any of these exit layers, the mean loss is at most the risk."""
    random, broken = np.random.default_rng(7), 0
    for _ in range(N_SPLITS):
        order = random.permutation(N_PROMPTS)
        ours, others = (part_of(certificate, half) for half in np.split(order, 2))
        broken += any(
            loss_at(others, each, ours.certified_exit((each,), risk).threshold) > risk for each in EXIT_LAYERS
        )
    assert broken <= DELTA * N_SPLITS


def test_along_its_own_texts_hardly_more_tokens_change_than_are_certified(certificate: Certificate) -> None:
    assert [(each.risk, each.exit_layer) for each in certificate.on_policy] == [(risk, 6) for risk in RISKS]
    for each in certificate.on_policy:
        assert each.n_tokens > 4000 and each.n_exited / each.n_tokens > 0.25 and each.changed < each.risk


def test_a_token_is_changed_where_the_full_model_would_choose_another(certificate: Certificate) -> None:
    """The slow reference: each token that was given out, against the full model's after all before it."""
    with Engine.from_pretrained(threads=1, profile="off") as engine:
        assert engine.calibrations is not None
        calibration, executor = engine.calibrations.find(), engine.executor
        assert calibration is not None
        ending = engine._ending(executor)
        prompts = [tuple(engine._tokenizer.encode(each)) for each in ("Once upon", "The dog")]
        run = CertificateRun(executor, ending, calibration, None, lambda: 0.0)
        found = [*run._on_policy(certificate, by_group(prompts))][-1]
        allowed = certificate.certified_exit([6], 0.05)
        policy = Certified({6: run._heads[6].end}, allowed)
        texts, known = followed(executor, ending, policy, prompts, PARAMS)
        n_changed = 0
        for text, prompt in zip(texts, prompts, strict=True):
            for n in range(len(prompt), len(text)):
                sequence = executor.cache.open_new()
                said = executor.logits(Batch.of_sequence(sequence, 0, text[:n]), [n - 1])[0].argmax()
                executor.cache.close(sequence)
                n_changed += int(said) != text[n]
    assert (found.n_tokens, found.n_exited) == (known.n_tokens, known.n_exited)
    assert found.n_changed == n_changed > 0


def loss_at(certificate: Certificate, exit_layer: int, threshold: float) -> float:
    wrong, _ = certificate._by_level([certificate.exit_layers.index(exit_layer)])
    level = int(levels_of(np.array([threshold]))[0])
    return float((wrong[level] / np.maximum(certificate.n_tokens, 1)).mean())
