"""What draft-verify steps are predicted to take is what the emulated machine takes for their passes."""

from functools import partial
from statistics import median

import numpy as np
import pytest
import torch

from hetero_ee.decoding.requests import Ending
from hetero_ee.kv.batch import Batch
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.statistics import ExitRates, Statistics
from hetero_ee.planning.times.steps import StepTimes, exit_steps
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee_profiles.reference import reference_profile
from tests.drafted_generation import generate_exact
from tests.drawn_plans import Drawn, drawn, roomy
from tests.emulation import dummy
from tests.scripted_model import Says

N_KNOWN, MAX_TOKENS = 64, 8
GREEDY, END = DraftNoise(0.0, 0, 0, 0), DraftEnd(judge=Says(1.0))
N_DRAWN = 400
PROMISED, USUAL, CLOSE, MEDIAN = 0.05, 0.02, 0.01, 1e-3


def steps_s(case: Drawn, exit_layer: int, m: int) -> tuple[float, float]:
    """Emulated seconds of m drafts, and of their verification, of the third of such steps."""
    timeline, spec = Timeline(), case.spec
    executor = dummy(spec, case.plan, case.profile, timeline)
    sequence = executor.cache.open_new()
    for position in range(N_KNOWN):
        executor.cache.admit(Batch.of_sequence(sequence, position, [0]))
    drafts_s = verify_s = 0.0
    for _ in range(3):
        start_s, waiting = timeline.now_s, []
        for row in range(m):
            (hidden,) = executor.run(Batch.of_sequence(sequence, N_KNOWN + row, [0]), None, range(exit_layer))
            waiting.append(hidden)
            executor.draft(torch.stack([hidden]), [GREEDY], END)
        drafts_s, middle_s = timeline.now_s - start_s, timeline.now_s
        batch = Batch.of_sequence(sequence, N_KNOWN, [0] * m)
        executor.lm_head(
            executor.final_norm(executor.run(batch, torch.stack(waiting), range(exit_layer, spec.n_layers)))
        )
        verify_s = timeline.now_s - middle_s
        executor.cache.truncate(sequence, N_KNOWN)
    return drafts_s, verify_s


def predicted(case: Drawn, m: int) -> StepTimes:
    problem = resolve(case.spec, case.profile, case.limits, Statistics())
    return StepTimes(problem.costs, problem.parts, case.plan.decode_placements, N_KNOWN + m, MAX_TOKENS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("m", range(1, MAX_TOKENS + 1))
def test_drafts_and_their_verification_through_split_plans(m: int, seed: int) -> None:
    case = drawn(seed, ("gpu", "cpu"))
    exit_layer = 1 + (7 * seed + m) % (case.spec.n_layers - 1)
    drafts_s, verify_s = steps_s(case, exit_layer, m)
    times = predicted(case, m)
    assert m * times.draft_s(exit_layer) == pytest.approx(drafts_s, rel=USUAL), case.name
    assert times.verify_s(exit_layer, m) == pytest.approx(verify_s, rel=USUAL), case.name


@pytest.mark.sample(0)
@pytest.mark.parametrize("first, n_plans", [(0, 30), pytest.param(30, 300, marks=pytest.mark.slow)])
def test_steps_of_plans_drawn_at_random(first: int, n_plans: int) -> None:
    """Copies run ahead from drafts into their verification and back: a step has its time as a whole."""
    found = []
    for seed in range(first, first + n_plans):
        case = drawn(seed)
        exit_layer, m = 1 + seed % (case.spec.n_layers - 1), 1 + seed % MAX_TOKENS
        drafts_s, verify_s = steps_s(case, exit_layer, m)
        times = predicted(case, m)
        expected_s = m * times.draft_s(exit_layer) + times.verify_s(exit_layer, m)
        found.append(abs(expected_s / (drafts_s + verify_s) - 1))
        assert found[-1] < PROMISED, f"{case.name}, exit layer {exit_layer}, {m} tokens: {found[-1]:.3f}"
    print(f"{len(found)} steps: worst difference {max(found):.2e}, median {median(found):.1e}")
    assert max(found) < USUAL and median(found) < MEDIAN


def rate(case: Drawn, exit_layer: int, m: int, layers_ahead: int) -> float:
    """Emulated tokens a second of steps of m tokens whose drafts and guesses are all right."""
    timeline = Timeline()
    executor = dummy(case.spec, case.plan, case.profile, timeline)
    how = Drafting(exit_layer, m, FixedThreshold(0.0), DraftEnd(judge=Says(1.0)), async_layers=layers_ahead)
    params, n_known = SamplingParams(6 * m + 1), N_KNOWN - 2 * m
    ending = Ending(frozenset(), case.plan.context_tokens)
    tokens = generate_exact(executor, [[0] * n_known], params, ending, str, lambda: timeline.now_s, how)
    at = [token.elapsed_s for token in tokens]
    return 4 * m / (at[5 * m] - at[m])  # the last step's queue is cut short by the text's end


@pytest.mark.parametrize(("exit_layer", "is_whole"), [(6, True), (10, True), (26, False)])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_tokens_that_begin_while_the_cpu_verifies(m: int, exit_layer: int, is_whole: bool) -> None:
    """Layers before the exit layer on the GPU, the later ones on the CPU; is_whole: a token passes all of the first in
    the time of the others."""
    spec, profile = known_spec("llama-2-7b"), roomy(reference_profile("rtx-4060-laptop-8gb"))
    limits = Limits(context_tokens=512, gpu_layers=exit_layer, mode="full")
    case = Drawn("split", spec, profile, limits, plan(spec, profile, limits))
    times = predicted(case, m)
    ahead_s, layers_ahead = times.ahead_s(exit_layer), times.layers_ahead(exit_layer)
    assert layers_ahead == exit_layer if is_whole else 0 < layers_ahead < exit_layer
    verify_s = partial(times.verify_s, exit_layer)
    expected = exit_steps(ExitRates(1.0, 1.0, 1.0), m, times.draft_s(exit_layer), verify_s, ahead_s)
    found = rate(case, exit_layer, m, layers_ahead)
    assert 1 / expected[-1].seconds_per_token == pytest.approx(found, rel=CLOSE)
    assert found > rate(case, exit_layer, m, 0)


class Fates:
    """Whether each token exits, drawn by a seed."""

    def __init__(self, exit_rate: float, seed: int) -> None:
        self._exits = iter((np.random.default_rng(seed).random(4 * N_DRAWN) < exit_rate).tolist())

    network = Says(0.0).network

    def of_row(self, logits: torch.Tensor) -> float:
        return float(next(self._exits))


@pytest.mark.parametrize(("n_on_gpu", "close"), [(0, CLOSE), (8, USUAL)])
def test_texts_whose_tokens_exit_at_random(n_on_gpu: int, close: float) -> None:
    """On the CPU alone; and with layers on the GPU, which a token may have passed when its step begins."""
    spec, profile = known_spec("tinyllama-1.1b"), roomy(reference_profile("rtx-4060-laptop-8gb"))
    limits = Limits(context_tokens=512, gpu_layers=n_on_gpu, mode="full")
    made = plan(spec, profile, limits)
    case, exit_layer = Drawn("exits", spec, profile, limits, made), 14
    end = DraftEnd(judge=Fates(0.8, seed=n_on_gpu))
    how = Drafting(exit_layer, 4, FixedThreshold(0.5), end, async_layers=exit_layer)
    timeline, counts = Timeline(), DraftCounts()
    executor = dummy(spec, made, profile, timeline)
    ending = Ending(frozenset(), made.context_tokens)
    tokens = generate_exact(executor, [[0]], SamplingParams(N_DRAWN), ending, str, lambda: timeline.now_s, how, counts)
    at = [token.elapsed_s for token in tokens]
    found, times = counts.statistics(spec.n_layers, exit_layer), predicted(case, N_DRAWN // 2 - N_KNOWN)
    expected_s = -found.n_ahead_kept * times.ahead_s(exit_layer)
    for n_drafts, n_steps in enumerate(found.drafted_runs):
        step_s = (n_drafts + 1) * times.draft_s(exit_layer) + times.verify_s(exit_layer, n_drafts + 1)
        expected_s += n_steps * step_s
    assert at[-1] - at[0] == pytest.approx(expected_s, rel=close)
    assert (found.n_ahead_kept > 100) == (n_on_gpu > 0)
