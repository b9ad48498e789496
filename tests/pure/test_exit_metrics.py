"""Metrics of early exit, against ones counted by hand and by the plain definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.calibration.fitting import depth_metrics, exit_layer_metrics
from hetero_ee.speculation.exits.calibration import MAX_DRAFTS, DepthMetrics, ExitLayerMetrics

SHARES = (
    "agreement",
    "mapped_agreement",
    "exit_rate",
    "precision",
    "recall",
    "acceptance",
    "refused_precision",
)


def flags(text: str) -> np.ndarray:
    """'1' is True."""
    return np.array([c == "1" for c in text])


def test_shares_are_those_counted_by_hand() -> None:
    found = exit_layer_metrics([flags("1101"), flags("100")], [flags("1011"), flags("110")], 0.25, 0.5)
    assert (found.exit_rate, found.precision, found.recall) == (5 / 7, 3 / 5, 3 / 4)
    assert found.refused_precision == 1 / 2
    assert (found.agreement, found.mapped_agreement, found.drafted_agreement) == (0.25, 0.5, 0.5)


@pytest.mark.parametrize(
    ("is_right", "gate", "kept", "acceptance"),
    [
        ("1111", "0000", {0: 4}, 0.0),  # never drafts: a round for each token
        ("1111", "1111", {4: 1}, 1.0),
        ("0000", "1111", {0: 4}, 0.0),  # drafts 4, 3, 2, 1, keeps none
        ("1101", "1111", {2: 1, 1: 1}, 3 / 5),  # 4 drafted, 2 kept; behind the wrong one 1 of 1
        ("1" * 10, "1" * 10, {MAX_DRAFTS: 1, 1: 1}, 1.0),  # the queue is full; then one token more, then one draft
        ("11011", "11101", {2: 1, 0: 1, 1: 1}, 3 / 4),
    ],
)
def test_rounds_draft_until_the_gate_closes_and_keep_up_to_the_first_wrong(
    is_right: str, gate: str, kept: dict[int, int], acceptance: float
) -> None:
    found = exit_layer_metrics([flags(is_right)], [flags(gate)], 0.5, None)
    assert {length: count for length, count in enumerate(found.kept_drafts) if count} == kept
    assert found.acceptance == pytest.approx(acceptance)


def test_nothing_that_exits_gives_zeros() -> None:
    found = exit_layer_metrics([flags("000")], [flags("000")], 0.0, None)
    assert (found.exit_rate, found.precision, found.recall, found.acceptance) == (0, 0, 0, 0)
    found = exit_layer_metrics([flags("100")], [flags("111")], 0.0, None)
    assert (found.precision, found.refused_precision) == (1 / 3, 0)  # of none


def test_a_round_ends_with_its_chunk() -> None:
    together = exit_layer_metrics([flags("111111")], [flags("111111")], 1.0, None)
    apart = exit_layer_metrics([flags("111"), flags("111")], [flags("111"), flags("111")], 1.0, None)
    assert (together.kept_drafts[6], apart.kept_drafts[3]) == (1, 2)


def test_depths_are_those_of_the_first_open_gate() -> None:
    gates = np.array([flags("1000"), flags("1100"), flags("0010")])  # exit layers 1, 2, 3 of 4 layers
    found = depth_metrics([gates], [gates])
    assert found.histogram == (1, 1, 1, 1)
    assert found.mean_depth == found.oracle_mean_depth == 2.5


def test_locality_looks_at_the_last_five_of_the_same_chunk() -> None:
    n_layers = 12

    def exits(*depths: int) -> np.ndarray:
        return np.array([[depth == exit_layer for depth in depths] for exit_layer in range(1, n_layers)])

    far = exits(1, 1, 1, 1, 1, 8)
    found = depth_metrics([far], [far])
    assert found.locality == 4 / 5
    assert found.near_share == 3 / n_layers  # depths 1 to 3
    remembered = exits(8, 1, 1, 1, 1, 8)
    assert depth_metrics([remembered], [remembered]).locality == 4 / 5  # 1 is far from 8, the last 8 is remembered
    forgotten = exits(8, 1, 1, 1, 1, 1, 8)
    assert depth_metrics([forgotten], [forgotten]).locality == 4 / 6
    between = [exits(5, 7, 10), exits(5, 9, 9, 9, 9, 7, 5, 1)]  # 1 of 2 and 5 of 7
    assert depth_metrics(between, between).locality == 6 / 9
    alone = [exits(3), exits(11)]
    assert depth_metrics(alone, alone).locality == 0.0  # chunks don't remember each other


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_rounds_cover_every_token_once(rows: list[tuple[bool, bool]]) -> None:
    is_right, gate = (np.array(column) for column in zip(*rows, strict=True))
    found = exit_layer_metrics([is_right], [gate], 0.5, None)
    n_rounds = sum(found.kept_drafts)
    n_kept = sum(length * count for length, count in enumerate(found.kept_drafts))
    assert len(rows) <= n_rounds + n_kept <= len(rows) + 1  # a round's own token may lie behind the chunk's end
    assert 0 <= found.acceptance <= 1


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_shares_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="share"):
        ExitLayerMetrics(**(dict.fromkeys(SHARES, 0.5) | {name: value}), kept_drafts=(0,) * (MAX_DRAFTS + 1))


@pytest.mark.parametrize(
    "change",
    [{"histogram": (0, 0, 0)}, {"histogram": ()}, {"histogram": (1, -1, 1)}, {"mean_depth": 0.5}, {"locality": 1.5}],
)
def test_depths_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    whole: dict[str, object] = {"histogram": (1, 2, 3), "mean_depth": 2.0, "oracle_mean_depth": 2.0}
    whole |= {"locality": 0.5, "near_share": 0.5}
    DepthMetrics(**whole)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        DepthMetrics(**(whole | change))  # type: ignore[arg-type]
