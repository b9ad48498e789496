"""The schedule: chosen where judging pays in bytes read, and never of exit layers that can't follow another."""

from dataclasses import replace

import numpy as np
import pytest

from hetero_ee.calibration.predictor_quality import NO_EXIT
from hetero_ee.calibration.schedule_fitting import ReadBytes, fit_schedule
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.speculation.exits.calibration import FittedExitLayer
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.predictors import ThresholdPredictor
from hetero_ee.speculation.exits.schedule import NO_SCHEDULE
from hetero_ee.speculation.exits.sliced_logits import SlicedLogits, n_pairs
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.families import random_model, save_checkpoint

N_LAYERS, M = 16, 400
SURE = ThresholdPredictor(4, 0.9, 0.8)
READ = ReadBytes((1000.0,) * N_LAYERS, 400.0, 4.0)


def fits() -> list[FittedExitLayer]:
    """Each opens where the likeliest candidate is nearly certain."""
    whole = [FittedExitLayer(exit_layer, None, SURE, 0.5, SURE, 0.5) for exit_layer in range(1, N_LAYERS)]
    return [replace(whole[0], sliced_predictor=None, sliced_threshold=NO_EXIT), *whole[1:]]


def logits(known_from: dict[int, float], covered: dict[int, float] | None = None) -> SlicedLogits:
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
    return SlicedLogits(values, rank)


def test_boundaries_are_where_tokens_begin_to_be_known() -> None:
    found = fit_schedule(fits(), logits({4: 0.3, 9: 0.3, 13: 0.2}), READ)
    assert found.exit_layers == (4, 9, 13)
    judged = 4 + sum(array.nbytes for array in SURE.arrays().values())
    saved = 0.3 * 12_000 + 0.3 * 7000 + 0.2 * 3000 - 400 - judged * (1 + 0.7 + 0.4)
    assert found.saved == pytest.approx(saved)
    assert all(worth > 0 for worth in found.worth)


@pytest.mark.parametrize("change", [{"head": 20_000.0}, {"layers": (0.0,) * N_LAYERS}])
def test_none_where_judging_reads_more_than_it_saves(change: dict[str, object]) -> None:
    read = replace(READ, **change)  # type: ignore[arg-type]
    assert fit_schedule(fits(), logits({4: 0.3, 9: 0.3}), read) == NO_SCHEDULE


def test_none_where_nothing_exits_rightly() -> None:
    known = logits({2: 0.8})
    assert fit_schedule(fits(), SlicedLogits(known.values, np.full_like(known.rank, 4)), READ) == NO_SCHEDULE


def test_candidates_are_not_taken_where_they_lack_the_token() -> None:
    """Boundary 2 knows a few tokens early, but takes candidates that few others are among."""
    known_from = {2: 0.1, 6: 0.6}
    assert fit_schedule(fits(), logits(known_from), READ).exit_layers == (2, 6)
    covered = dict.fromkeys(range(1, 6), 0.2)
    assert fit_schedule(fits(), logits(known_from, covered), READ).exit_layers == (6,)


def test_a_boundary_without_a_sliced_predictor_follows_no_other() -> None:
    whole = fits()
    for exit_layer in (9, 13):
        whole[exit_layer - 1] = replace(whole[exit_layer - 1], sliced_predictor=None, sliced_threshold=NO_EXIT)
    found = fit_schedule(whole, logits({4: 0.3, 9: 0.3, 13: 0.2}), READ)
    assert found.exit_layers == (4, 10, 14)
    alone = [replace(each, sliced_predictor=None, sliced_threshold=NO_EXIT) for each in whole]
    assert fit_schedule(alone, logits({4: 0.3, 9: 0.3, 13: 0.2}), READ) == NO_SCHEDULE


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
