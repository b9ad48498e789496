"""Statistics of drafting: sums of rounds, and what is known of no round at all."""

import pytest

from hetero_ee.planning.plan import EXIT, SEQUENCE
from hetero_ee.speculation.statistics import DraftCounts, OriginCounts


def test_rounds_add_up() -> None:
    counts = DraftCounts(n_passes=3)
    counts.add_round([EXIT, EXIT, EXIT], [4, 3, 4], 3, 4)  # all right, and a token more
    counts.add_round([SEQUENCE, EXIT, EXIT], [12, 2, 1], 1, 2)  # the second was wrong, the third not judged
    counts.add_round([], [], 0, 1)
    counts.add_round([SEQUENCE, SEQUENCE], [12, 12], 1, 1)  # the text ended with a right draft
    found = counts.statistics(n_layers=12, exit_layer=4)
    assert (found.n_passes, found.n_rounds, found.n_rows, found.n_tokens) == (3, 4, 12, 8)
    assert (found.n_drafted, found.n_accepted) == (8, 5)
    assert found.acceptance == 5 / 8 and found.tokens_per_pass == pytest.approx(8 / 3)
    assert found.drafted_runs == (1, 0, 1, 2) and found.accepted_runs == (1, 2, 0, 1)
    assert found.checked_runs == (1, 1, 1, 1)
    assert found.origins == (OriginCounts(EXIT, 5, 4, 3), OriginCounts(SEQUENCE, 3, 2, 2))
    assert [counts.precision for counts in found.origins] == [0.75, 1.0]
    assert found.known_after == (0, 0, 0, 1, 2, *[0] * 7, 5)
    assert found.mean_exit_depth == (3 + 2 * 4 + 5 * 12) / 8


def test_asynchronous_drafts_are_told_if_there_were_any() -> None:
    from hetero_ee_cli.reports.run_report import draft_lines, drafts_document

    counts = DraftCounts(n_passes=1, n_ahead=8, n_ahead_kept=6)
    counts.add_round([EXIT], [4], 1, 2)
    found = counts.statistics(12, 4)
    assert "              asynchronous: 8 tokens drafted early, 75% right" in draft_lines(found)
    document = drafts_document(found)
    assert document is not None and (document["n_ahead"], document["n_ahead_kept"]) == (8, 6)
    assert not any("asynchronous" in line for line in draft_lines(DraftCounts().statistics(12, 4)))


def test_nothing_drafted_is_no_division_by_zero() -> None:
    empty = DraftCounts().statistics(12, 4)
    assert (empty.acceptance, empty.tokens_per_pass, empty.mean_exit_depth, empty.n_rounds) == (0, 0, 0, 0)
    assert not any(empty.known_after) and empty.drafted_runs == empty.accepted_runs == () and empty.origins == ()
    counts = DraftCounts(n_passes=1)
    counts.add_round([], [], 0, 1)
    assert counts.statistics(12, 4).mean_exit_depth == 12


def test_accepted_chains_passed_every_layer() -> None:
    counts = DraftCounts(n_passes=1)
    counts.add_round([SEQUENCE] * 3, [12] * 3, 3, 4)
    assert counts.statistics(12, 4).mean_exit_depth == 12
    assert OriginCounts(EXIT, 2, 0, 0).precision == 0
