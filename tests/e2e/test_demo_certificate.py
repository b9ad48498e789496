"""The demo model ships certified: small, found with its calibration, and its promise kept by prompts left out."""

from pathlib import Path

import numpy as np
import pytest

from hetero_ee.calibration.certify import N_PROMPTS, TOKENS_A_PROMPT
from hetero_ee.speculation.exits.certificate import DELTA, Certificate, levels_of
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


@pytest.mark.parametrize("risk", [0.01, 0.02, 0.05])
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


def loss_at(certificate: Certificate, exit_layer: int, threshold: float) -> float:
    wrong, _ = certificate._by_level([certificate.exit_layers.index(exit_layer)])
    level = int(levels_of(np.array([threshold]))[0])
    return float((wrong[level] / np.maximum(certificate.n_tokens, 1)).mean())
