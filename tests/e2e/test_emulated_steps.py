"""What exact mode's rounds are predicted to take is what the emulated machine takes for their passes."""

from statistics import median

import numpy as np
import pytest
import torch

from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending, Text
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.schedule import Chain, chain_of
from hetero_ee.planning.times.rounds import ExitRates, LevelWalk, WalkRates, expected_rounds
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.speculation.draft_gate import FixedGate
from hetero_ee.speculation.drafter import Drafter
from hetero_ee.speculation.drafting import Drafting, ExitHead, ExitLevel, ExitLevels
from hetero_ee.speculation.exact import generate_exact
from hetero_ee.speculation.statistics import DraftCounts, DraftStatistics
from hetero_ee_profiles.reference import reference_profile
from tests.drawn_plans import Drawn, drawn, roomy
from tests.emulation import dummy

N_KNOWN, MAX_ROWS = 64, 8
N_DRAWN, NEVER = 400, 10**6
PROMISED, USUAL, CLOSE, MEDIAN = 0.05, 0.02, 0.01, 1e-3


def rounds_s(case: Drawn, exit_layer: int, m: int) -> tuple[float, float]:
    """Emulated seconds of m drafts, and of their verification, of the third of such rounds."""
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
            executor.lm_head(executor.final_norm(torch.stack([hidden])))
        drafts_s, middle_s = timeline.now_s - start_s, timeline.now_s
        batch = Batch.of_sequence(sequence, N_KNOWN, [0] * m)
        executor.lm_head(
            executor.final_norm(executor.run(batch, torch.stack(waiting), range(exit_layer, spec.n_layers)))
        )
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
    exit_layer = 1 + (7 * seed + m) % (case.spec.n_layers - 1)
    drafts_s, verify_s = rounds_s(case, exit_layer, m)
    chain, n_parts = predicted(case, m), 1 + 2 * exit_layer
    assert m * chain.draft_s(n_parts) == pytest.approx(drafts_s, rel=USUAL), case.name
    assert chain.verify_s(n_parts, m) == pytest.approx(verify_s, rel=USUAL), case.name


@pytest.mark.parametrize("first, n_plans", [(0, 30), pytest.param(30, 300, marks=pytest.mark.slow)])
def test_rounds_of_plans_drawn_at_random(first: int, n_plans: int) -> None:
    """Copies run ahead from drafts into their verification and back: a round has its time as a whole."""
    found = []
    for seed in range(first, first + n_plans):
        case = drawn(seed)
        exit_layer, m = 1 + seed % (case.spec.n_layers - 1), 1 + seed % MAX_ROWS
        drafts_s, verify_s = rounds_s(case, exit_layer, m)
        chain, n_parts = predicted(case, m), 1 + 2 * exit_layer
        expected_s = m * chain.draft_s(n_parts) + chain.verify_s(n_parts, m)
        found.append(abs(expected_s / (drafts_s + verify_s) - 1))
        assert found[-1] < PROMISED, f"{case.name}, exit layer {exit_layer}, {m} rows: {found[-1]:.3f}"
    print(f"{len(found)} rounds: worst difference {max(found):.2e}, median {median(found):.1e}")
    assert max(found) < USUAL and median(found) < MEDIAN


def walked_s(case: Drawn, levels: tuple[int, int], exit_layer: int, m: int, *, is_full: bool) -> float:
    """Emulated seconds until m rows wait, of the third of such rounds: all but the last exit at the second level; the
    last is refused everywhere, or is judged at the exit layer alone because no row has room behind it."""
    timeline = Timeline()
    executor = dummy(case.spec, case.plan, case.profile, timeline)
    sequence = executor.cache.open_new()
    for position in range(N_KNOWN):
        executor.cache.admit(Batch.of_sequence(sequence, position, [0]))
    answers = [0.0, 1.0] * (m - 1) + [0.0] * 3
    said = iter(3 * answers if not is_full else 3 * answers[:-3])
    exit_head = ExitHead(None, lambda *_: next(said))
    level = ExitLevel(exit_head, 0.5, lambda *_: next(said), 0.5)
    how = Drafting(
        exit_layer, m + (not is_full), FixedGate(0.5), exit_head, drafts_ahead=True,
        levels=ExitLevels(dict.fromkeys(levels, level), levels),
    )  # fmt: skip
    params, ending = SamplingParams(), Ending(frozenset(), 2 * N_KNOWN)
    text = Text.of_prompt(0, [0] * (N_KNOWN + 1), params, str, cached_as=sequence)
    drafter, seconds = Drafter(executor, how, params, ending), 0.0
    for _ in range(3):
        start_s = timeline.now_s
        (found,) = drafter.draft([text], {})
        seconds = timeline.now_s - start_s
        assert found.passed == [exit_layer] * m and found.depths == [levels[1]] * (m - 1)
        layers = range(exit_layer, case.spec.n_layers)
        executor.head(executor.run(found.rows(0), torch.stack(found.hidden), layers))
        executor.cache.truncate(sequence, N_KNOWN)
        drafter.settle(found, 0, 1)
    return seconds


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_exit_at_levels_through_split_plans(seed: int, is_full: bool) -> None:
    case = drawn(seed, ("gpu", "cpu"))
    first = 1 + seed % 4
    levels, exit_layer = (first, first + 5), first + 6 + (5 * seed) % (case.spec.n_layers - first - 6)
    walk = LevelWalk(WalkRates(0.5, 1.0, 0.0, levels[1], 2.5), (*levels, exit_layer), (0.0, 0.5, 0.0))
    for m in (1, 2, 5, MAX_ROWS):
        chain = predicted(case, m)
        costs = chain.walk_costs(walk)
        expected_s = (m - 1) * costs.exit_s + costs.last_s(m) + (costs.head_s if is_full else costs.refused_s)
        found_s = walked_s(case, levels, exit_layer, m, is_full=is_full)
        assert expected_s == pytest.approx(found_s, rel=CLOSE), f"{case.name}, {m} rows"


def rate(case: Drawn, exit_layer: int, m: int, layers_ahead: int) -> float:
    """Emulated tokens a second of rounds of m rows whose drafts and guesses are all right."""
    timeline = Timeline()
    executor = dummy(case.spec, case.plan, case.profile, timeline)
    how = Drafting(exit_layer, m, FixedGate(0.0), ExitHead(), drafts_ahead=layers_ahead > 0, layers_ahead=layers_ahead)
    params, n_known = SamplingParams(6 * m + 1), N_KNOWN - 2 * m
    ending = Ending(frozenset(), case.plan.context_tokens)
    tokens = generate_exact(executor, [[0] * n_known], params, ending, str, lambda: timeline.now_s, how)
    at = [token.elapsed_s for token in tokens]
    return 4 * m / (at[5 * m] - at[m])  # the last round's queue is cut short by the text's end


@pytest.mark.parametrize(("exit_layer", "is_whole"), [(6, True), (10, True), (26, False)])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_rows_that_begin_while_the_cpu_verifies(m: int, exit_layer: int, is_whole: bool) -> None:
    """Layers before the exit layer on the GPU, those behind on the CPU; is_whole: a row passes all of the first in the
    time of the others."""
    spec, profile = known_spec("llama-2-7b"), roomy(reference_profile("rtx-4060-laptop-8gb"))
    limits = Limits(context_tokens=512, gpu_layers=exit_layer, mode="full")
    case = Drawn("split", spec, profile, limits, plan(spec, profile, limits))
    chain, n_parts = predicted(case, m), 1 + 2 * exit_layer
    ahead_s, layers_ahead = chain.ahead_s(exit_layer), chain.layers_ahead(exit_layer)
    assert layers_ahead == exit_layer if is_whole else 0 < layers_ahead < exit_layer
    expected = expected_rounds(
        ExitRates(1.0, 1.0, 1.0), m, chain.draft_s(n_parts), lambda n: chain.verify_s(n_parts, n), ahead_s
    )  # fmt: skip
    found = rate(case, exit_layer, m, layers_ahead)
    assert 1 / expected[-1].seconds_per_token == pytest.approx(found, rel=CLOSE)
    assert found > rate(case, exit_layer, m, 0)


class Fates:
    """Where each row exits, drawn by a seed; one that comes by later exits where it is judged first."""

    def __init__(self, walk: LevelWalk, seed: int) -> None:
        chances = [*walk.exit_shares, 1 - walk.rates.exit_rate]
        drawn_places = np.random.default_rng(seed).choice([*walk.places, NEVER], size=2 * N_DRAWN, p=chances)
        self._places, self._row = drawn_places.tolist(), 0

    def judged_at(self, place: int, is_last: bool) -> float:
        """Whether the present row exits; the next one is judged after it."""
        exits = self._places[self._row] <= place
        self._row += exits or is_last
        return float(exits)


@pytest.mark.parametrize(("n_on_gpu", "close"), [(0, CLOSE), (8, USUAL)])
def test_texts_whose_rows_exit_at_random(n_on_gpu: int, close: float) -> None:
    """On the CPU alone; and with layers on the GPU, which a row may have passed when its round begins."""
    spec, profile = known_spec("tinyllama-1.1b"), roomy(reference_profile("rtx-4060-laptop-8gb"))
    limits = Limits(context_tokens=512, gpu_layers=n_on_gpu, mode="full")
    made = plan(spec, profile, limits)
    case = Drawn("walk", spec, profile, limits, made)
    walk = LevelWalk(WalkRates(0.8, 1.0, 1.0, 9.4, 2.2), (5, 9, 14), (0.3, 0.2, 0.3))
    fates = Fates(walk, seed=n_on_gpu)

    def level(place: int) -> ExitLevel:
        def confidence(*_: object) -> float:
            return fates.judged_at(place, is_last=place == walk.places[-1])

        return ExitLevel(ExitHead(None, confidence), 0.5, confidence, 0.5)

    *levels, end = (level(place) for place in walk.places)
    how = Drafting(
        walk.places[-1], 4, FixedGate(0.5), end.head, drafts_ahead=True,
        levels=ExitLevels(dict(zip(walk.levels, levels, strict=True)), walk.levels),
    )  # fmt: skip
    timeline, counts = Timeline(), DraftCounts()
    executor = dummy(spec, made, profile, timeline)
    ending = Ending(frozenset(), made.context_tokens)
    tokens = generate_exact(executor, [[0]], SamplingParams(N_DRAWN), ending, str, lambda: timeline.now_s, how, counts)
    at = [token.elapsed_s for token in tokens]
    found = counts.statistics(spec.n_layers, walk.places[-1])
    expected_s = rounds_told_s(predicted(case, N_DRAWN // 2 - N_KNOWN), walk.places, found)
    assert at[-1] - at[0] == pytest.approx(expected_s, rel=close)
    assert (found.n_ahead_kept > 100) == (n_on_gpu > 0)


def rounds_told_s(chain: Chain, places: tuple[int, ...], found: DraftStatistics) -> float:
    """Expected seconds of as many rounds of each length, of rows that exit as often at each place."""
    n_exits = [found.known_after[place] for place in places]
    *refused, full = found.drafted_runs
    n_judged = sum(n_exits) + sum(refused)
    shares = tuple(n / n_judged for n in n_exits)
    walk = LevelWalk(WalkRates(sum(shares), 1.0, 1.0, 0.0, 0.0), places, shares)
    costs, seconds = chain.walk_costs(walk), -found.n_ahead_kept * chain.walk_ahead_s(walk)
    for n_drafts, n_rounds in enumerate((*refused, full)):
        judging_s = costs.refused_s if n_drafts < len(refused) else costs.head_s
        verify_s = chain.verify_s(1 + 2 * places[-1], n_drafts + 1)
        seconds += n_rounds * (n_drafts * costs.exit_s + costs.last_s(n_drafts + 1) + judging_s + verify_s)
    return seconds
