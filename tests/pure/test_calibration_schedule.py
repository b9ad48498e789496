"""The schedule: better than every other choice, where judging pays in bytes read, of exit layers that can follow."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.calibration.schedule import (
    ExitCosts,
    ReadBytes,
    choose_exit_layers,
    exit_histogram,
    fit_schedule,
)
from hetero_ee.calibration.traces import PartialLogits, n_pairs
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.speculation.exits.calibration import NO_EXIT, FittedExitLayer
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.predictor import ExitPredictor
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.families import random_model, save_checkpoint

N_LAYERS, M = 16, 400
# Certain where the likeliest candidate's probability is above 0.9.
WEIGHTS = np.eye(1, 12, 4, dtype=np.float32), *(np.full(1, value, np.float32) for value in (0, 100, -90))
SURE = ExitPredictor(*WEIGHTS)
READ = ReadBytes((1000.0,) * N_LAYERS, 400.0, 4.0)


def fits() -> list[FittedExitLayer]:
    """Each opens where the likeliest candidate is nearly certain."""
    whole = [FittedExitLayer(exit_layer, None, SURE, 0.5, SURE, 0.5) for exit_layer in range(1, N_LAYERS)]
    return [replace(whole[0], partial_predictor=None, partial_threshold=NO_EXIT), *whole[1:]]


def logits(known_from: dict[int, float], covered: dict[int, float] | None = None) -> PartialLogits:
    """known_from: share of tokens that an exit layer and all behind are certain of, rightly; the rest stays uncertain.
    covered: share of tokens that are among the candidates taken at an exit layer, of all where it is not named."""
    n_exit_layers = N_LAYERS - 1
    values = np.zeros((n_pairs(n_exit_layers), M, 4), np.float32)
    rank = np.zeros((n_exit_layers, M), np.uint8)
    since = np.full(M, N_LAYERS)
    n_before = 0
    for exit_layer, share in known_from.items():
        since[n_before : n_before + round(share * M)] = exit_layer
        n_before += round(share * M)
    for first in range(1, N_LAYERS):
        lacks = np.arange(M) % 100 >= 100 * (covered or {}).get(first, 1.0)
        rank[first - 1, lacks] = 4
        for exit_layer in range(first, N_LAYERS):
            values[n_pairs(exit_layer - 1) + first - 1, :, 0] = np.where((since <= exit_layer) & ~lacks, 9.0, 0.0)
    return PartialLogits(values, rank)


def test_exit_layers_are_where_tokens_begin_to_be_known() -> None:
    found = fit_schedule(fits(), logits({4: 0.3, 9: 0.3, 13: 0.2}), READ)
    assert found.exit_layers == (4, 9, 13)
    judged = 4 + 4 * (12 + 1 + 1)
    saved = 0.3 * 12_000 + 0.3 * 7000 + 0.2 * 3000 - 400 - judged * (1 + 0.7 + 0.4)
    assert found.saved == pytest.approx(saved)


@pytest.mark.parametrize("change", [{"head": 20_000.0}, {"layers": (0.0,) * N_LAYERS}])
def test_if_judging_reads_more_than_it_saves_a_mode_still_has_the_cheapest_exit_layers(
    change: dict[str, object],
) -> None:
    read = replace(READ, **change)  # type: ignore[arg-type]
    found = fit_schedule(fits(), logits({4: 0.3, 9: 0.3}), read)
    assert found.saved < 0 and found.exit_layers


def test_if_nothing_exits_rightly_one_exit_layer_is_left() -> None:
    known = logits({2: 0.8})
    found = fit_schedule(fits(), PartialLogits(known.values, np.full_like(known.rank, 4)), READ)
    assert found.saved < -READ.head and found.exit_layers == (N_LAYERS - 1,)


def test_candidates_are_not_taken_where_they_lack_the_token() -> None:
    """Exit layer 2 knows a few tokens early, but takes candidates that few others are among."""
    known_from = {2: 0.1, 6: 0.6}
    assert fit_schedule(fits(), logits(known_from), READ).exit_layers == (2, 6)
    covered = dict.fromkeys(range(1, 6), 0.2)
    assert fit_schedule(fits(), logits(known_from, covered), READ).exit_layers == (6,)


def test_a_boundary_without_a_partial_predictor_follows_no_other() -> None:
    whole = fits()
    for exit_layer in (9, 13):
        whole[exit_layer - 1] = replace(whole[exit_layer - 1], partial_predictor=None, partial_threshold=NO_EXIT)
    found = fit_schedule(whole, logits({4: 0.3, 9: 0.3, 13: 0.2}), READ)
    assert found.exit_layers == (4, 10, 14)
    alone = [replace(each, partial_predictor=None, partial_threshold=NO_EXIT) for each in whole]
    assert fit_schedule(alone, logits({4: 0.3, 9: 0.3, 13: 0.2}), READ).exit_layers == (9,)


def test_a_map_is_read_as_well() -> None:
    torch = pytest.importorskip("torch")
    whole = fits()
    whole[3] = replace(whole[3], exit_map=ExitMap(None, torch.zeros(64, 64), torch.zeros(64)))  # 16,640 bytes
    assert fit_schedule(whole, logits({4: 0.3, 9: 0.3}), READ).exit_layers[0] != 4


def test_at_most_a_quarter_of_the_layers() -> None:
    known = logits(dict.fromkeys(range(2, 14), 0.08))
    assert len(fit_schedule(fits(), known, READ).exit_layers) == N_LAYERS // 4


def test_bytes_are_those_of_the_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_checkpoint(random_model("llama", num_hidden_layers=2), tmp_path_factory.mktemp("model"))
    spec = read_spec(folder)
    weights = load_dense(Checkpoint(folder, spec))
    read = ReadBytes.of(decoder_blocks(spec), weights)
    assert read.head == 4 * spec.vocab_size * spec.hidden_size and read.candidates == 16 * spec.hidden_size
    per_layer = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size + 3 * spec.ffn_size)
    assert read.layers == (4 * per_layer,) * 2


SHARES = st.integers(2, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 5), min_size=n, max_size=n),
        st.lists(st.integers(0, 9), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 0.1, 1.0, 4.0]), min_size=n, max_size=n),
        st.integers(0, 10),
        st.sampled_from([0.0, 0.5, 6.0]),
    )
)
Shares = tuple[list[int], list[int], list[float], int, float]


def simulated_saving(costs: ExitCosts, chosen: tuple[int, ...]) -> float:
    """Each token passes the layers: it pays for every predictor that it meets, at the first for the whole head as well,
    and stops at the first it may exit at."""
    total = 0.0
    firsts = [*enumerate(costs.histogram), (len(costs.histogram), 1 - sum(costs.histogram))]
    for first, share in firsts:
        for exit_layer in sorted(chosen):
            total -= share * (costs.predictor[exit_layer] + (costs.first if exit_layer == min(chosen) else 0.0))
            if exit_layer >= first:
                total += share * sum(costs.layer[exit_layer:])
                break
    return total


def costs_of(shares: Shares) -> ExitCosts:
    counts, layers, predictors, n_deep, first = shares
    n = max(1, sum(counts) + n_deep)
    return ExitCosts(tuple(count / n for count in counts), tuple(map(float, layers)), tuple(predictors), first)


@given(shares=SHARES, n_most=st.integers(1, 7), first=st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_no_other_choice_saves_more(shares: Shares, n_most: int, first: int) -> None:
    costs = costs_of(shares)
    n_layers = len(costs.histogram)
    first = min(first, n_layers - 1)
    choices = [c for n in range(1, n_most + 1) for c in combinations(range(1, n_layers), n) if c[0] == first]
    found = choose_exit_layers(costs, n_most, first)
    assert found.exit_layers in choices
    assert found.saved == pytest.approx(max(simulated_saving(costs, choice) for choice in choices), abs=1e-9)
    assert found.saved == pytest.approx(simulated_saving(costs, found.exit_layers), abs=1e-9)


def test_exit_layers_where_many_exit_are_chosen_and_expensive_predictors_are_not() -> None:
    histogram = (0, 0, 0.3, 0, 0, 0.01, 0, 0.3)
    cheap = ExitCosts(histogram, (1.0,) * 8, (0.05,) * 8)
    assert choose_exit_layers(cheap, 8, 2).exit_layers == (2, 7)
    assert choose_exit_layers(cheap, 1, 2).exit_layers == (2,)
    assert choose_exit_layers(ExitCosts(histogram, (1.0,) * 8, (3.0,) * 8), 8, 2).exit_layers == (2,)


def test_many_layers_take_no_time() -> None:
    costs = ExitCosts((0.012,) * 80, (1.0,) * 80, (0.05,) * 80)
    found = choose_exit_layers(costs, 80, 1)
    assert 10 < len(found.exit_layers) < 80 and found.saved > 0


@pytest.mark.parametrize(
    "parts", [((0.5, 0.6), (1, 1), (1, 1)), ((-0.1, 0), (1, 1), (1, 1)), ((0.1,), (1, 1), (1, 1)), ((), (), ())]
)
def test_costs_that_do_not_fit_together_are_refused(parts: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError):
        ExitCosts(*parts)


def test_a_token_can_exit_once_it_agrees_for_good() -> None:
    agrees = np.array(
        [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 0]],
        bool,
    )
    before = agrees.copy()
    assert exit_histogram(agrees) == (0.0, 0.2, 0.2, 0.2)
    np.testing.assert_array_equal(agrees, before)
    assert exit_histogram(np.zeros((0, 3), bool)) == (0.0, 0.0, 0.0)
