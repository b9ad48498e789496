"""Statistics of drafting: sums of steps, and what is known of no step at all."""

import pytest

from hetero_ee.speculation.exit_drafter import EXIT
from hetero_ee.speculation.statistics import DraftCounts, OriginCounts
from hetero_ee_cli.reports.run_report import draft_lines, drafts_document

HEAD = "draft head"


def test_steps_add_up() -> None:
    counts = DraftCounts(n_passes=3)
    counts.add_step([EXIT, EXIT, EXIT], 3, 4)  # all right, and a token more
    counts.add_step([HEAD, EXIT, EXIT], 1, 2)  # the second was wrong, the third not judged
    counts.add_step([], 0, 1)
    counts.add_step([HEAD, HEAD], 1, 1)  # the text ended with a right draft
    found = counts.statistics(n_layers=12, exit_layer=4)
    assert (found.n_passes, found.n_steps, found.n_verified, found.n_tokens) == (3, 4, 12, 8)
    assert (found.n_drafted, found.n_accepted) == (8, 5)
    assert found.acceptance == 5 / 8 and found.tokens_per_pass == pytest.approx(8 / 3)
    assert found.drafted_runs == (1, 0, 1, 2) and found.accepted_runs == (1, 2, 0, 1)
    assert found.origins == (OriginCounts(EXIT, 5, 4, 3), OriginCounts(HEAD, 3, 2, 2))
    assert [counts.precision for counts in found.origins] == [0.75, 1.0]
    assert found.known_after == {4: 3, 12: 5}
    assert found.mean_exit_depth == (3 * 4 + 5 * 12) / 8


def test_guesses_are_told_where_there_were_any() -> None:
    counts = DraftCounts(n_passes=1, n_ahead=8, n_ahead_kept=6)
    counts.add_step([EXIT], 1, 2)
    found = counts.statistics(12, 4)
    assert any(line.endswith(", 75% right") for line in draft_lines(found))
    document = drafts_document(found)
    assert document is not None and (document["n_ahead"], document["n_ahead_kept"]) == (8, 6)
    assert not any(line.endswith("% right") for line in draft_lines(DraftCounts().statistics(12, 4)))


def test_nothing_drafted_is_no_division_by_zero() -> None:
    empty = DraftCounts().statistics(12, 4)
    assert (empty.acceptance, empty.tokens_per_pass, empty.mean_exit_depth, empty.n_steps) == (0, 0, 0, 0)
    assert not any(empty.known_after.values()) and empty.drafted_runs == empty.accepted_runs == empty.origins == ()
    assert OriginCounts(EXIT, 2, 0, 0).precision == 0


@pytest.mark.parametrize("origins", [[], [HEAD] * 3])
def test_without_exits_every_token_was_known_after_all_layers(origins: list[str]) -> None:
    counts = DraftCounts(n_passes=1)
    counts.add_step(origins, len(origins), len(origins) + 1)
    assert counts.statistics(12, 4).mean_exit_depth == counts.statistics(12, 0).mean_exit_depth == 12
