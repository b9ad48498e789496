"""What exact mode's rounds are predicted to take is what the emulated machine takes for their passes."""

from statistics import median

import pytest
import torch

from hetero_ee.planning.plan import Plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.schedule import Chain, chain_of
from hetero_ee.runtime.rows import Rows
from hetero_ee.runtime.timeline import Timeline
from tests.drawn_plans import Drawn, drawn
from tests.emulation import hollow

N_KNOWN, MAX_ROWS = 64, 8
PROMISED, USUAL, MEDIAN = 0.05, 0.02, 1e-3


def rounds_s(case: Drawn, boundary: int, m: int) -> tuple[float, float]:
    """Emulated seconds of m drafts, and of their verification, of the third of such rounds."""
    timeline, spec = Timeline(), case.spec
    executor = hollow(spec, case.plan, case.profile, timeline)
    sequence = executor.cache.open_new()
    for position in range(N_KNOWN):
        executor.cache.admit(Rows.of_sequence(sequence, position, [0]))
    drafts_s = verify_s = 0.0
    for _ in range(3):
        start_s, waiting = timeline.now_s, []
        for row in range(m):
            (hidden,) = executor.run(Rows.of_sequence(sequence, N_KNOWN + row, [0]), None, range(boundary))
            waiting.append(hidden)
            executor.project(executor.final_norm(torch.stack([hidden])))
        drafts_s, middle_s = timeline.now_s - start_s, timeline.now_s
        rows = Rows.of_sequence(sequence, N_KNOWN, [0] * m)
        executor.project(executor.final_norm(executor.run(rows, torch.stack(waiting), range(boundary, spec.n_layers))))
        verify_s = timeline.now_s - middle_s
        executor.cache.truncate(sequence, N_KNOWN)
    return drafts_s, verify_s


def predicted(case: Drawn, m: int) -> Chain:
    problem = resolve(case.spec, case.profile, case.limits, None)
    return chain_of(problem, _places(case.plan), N_KNOWN + m, MAX_ROWS)


def _places(plan: Plan) -> list[str]:
    return [part.decode_place for part in plan.parts]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("m", range(1, MAX_ROWS + 1))
def test_drafts_and_their_verification_through_split_plans(m: int, seed: int) -> None:
    case = drawn(seed, ("gpu", "cpu"))
    boundary = 1 + (7 * seed + m) % (case.spec.n_layers - 1)
    drafts_s, verify_s = rounds_s(case, boundary, m)
    chain, n_parts = predicted(case, m), 1 + 2 * boundary
    assert m * chain.draft_s(n_parts) == pytest.approx(drafts_s, rel=USUAL), case.name
    assert chain.verify_s(n_parts, m) == pytest.approx(verify_s, rel=USUAL), case.name


@pytest.mark.parametrize("first, n_plans", [(0, 30), pytest.param(30, 300, marks=pytest.mark.slow)])
def test_rounds_of_plans_drawn_at_random(first: int, n_plans: int) -> None:
    """Copies run ahead from drafts into their verification and back: a round has its time as a whole."""
    found = []
    for seed in range(first, first + n_plans):
        case = drawn(seed)
        boundary, m = 1 + seed % (case.spec.n_layers - 1), 1 + seed % MAX_ROWS
        drafts_s, verify_s = rounds_s(case, boundary, m)
        chain, n_parts = predicted(case, m), 1 + 2 * boundary
        expected_s = m * chain.draft_s(n_parts) + chain.verify_s(n_parts, m)
        found.append(abs(expected_s / (drafts_s + verify_s) - 1))
        assert found[-1] < PROMISED, f"{case.name}, boundary {boundary}, {m} rows: {found[-1]:.3f}"
    print(f"{len(found)} rounds: worst difference {max(found):.2e}, median {median(found):.1e}")
    assert max(found) < USUAL and median(found) < MEDIAN
