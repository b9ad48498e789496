"""The check of the project's English: scripts/check_english.py."""

import pytest

from scripts.check_english import Finding, findings, lowered, too_many, tracked_files

CLEAN = '''"""Plans placements."""


def plan(budget: int) -> int | None:
    """Return the plan with the least expected time, or None if nothing fits.

    Raises:
        UsageError: if `budget` is negative.
    """
    message = "the plan needs more memory than the budget allows"
    return len(message) + budget  # so that callers see both
'''


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("Return the plan", "Of the plans the one", 5),
        ("Plans placements.", "What the planner does.", 1),
        ("or None if", "None where", 5),
        ("    Raises:\n        UsageError: if `budget` is negative.", "    Raises UsageError where it is negative.", 5),
        ("than the budget allows", "than there is beside the budget", 10),
        ("so that callers see both", "whoever calls", 11),
    ],
)
def test_a_phrase_to_rewrite_is_found_in_docstrings_messages_and_comments(before: str, after: str, line: int) -> None:
    assert findings("hetero_ee/planning/plan.py", CLEAN) == []
    (found,) = findings("hetero_ee/planning/plan.py", CLEAN.replace(before, after))
    assert (found.path, found.room) == ("hetero_ee/planning/plan.py", "hetero_ee/planning")
    assert abs(found.line - line) <= 2


@pytest.mark.parametrize(
    "sentence", ["For one token, list the neurons.", "A part, 0 if there is none.", "It is no longer open."]
)
def test_plain_sentences_pass(sentence: str) -> None:
    assert findings("hetero_ee/planning/plan.py", CLEAN.replace("Plans placements.", sentence)) == []


def test_pages_are_checked_line_by_line_without_code_and_quotations() -> None:
    page = 'The GPU beside it.\n\n```console\n$ beside\n```\nThe name `beside`, and "beside the CPU".\n\nAnd so many.'
    assert [found.line for found in findings("docs/page.md", page)] == [1, 8]


def test_a_room_may_not_get_more_phrases_and_a_new_room_may_have_none() -> None:
    found = [Finding("a/x.py", 1, ""), Finding("a/y.py", 1, ""), Finding("b/x.py", 1, "")]
    assert too_many(found, {"a": 2, "b": 1}) == {}
    assert too_many(found, {"a": 1}) == {"a": 2, "b": 1}


def test_updating_never_allows_more() -> None:
    found = [Finding("a/x.py", 1, "")] * 3 + [Finding("c/x.py", 1, "")]
    assert lowered(found, {"a": 2, "b": 4}) == {"a": 2}
    assert lowered(found, {"a": 9, "c": 1}) == {"a": 3, "c": 1}


def test_generated_pages_and_model_cards_are_left_out() -> None:
    files = tracked_files()
    assert {"README.md", "docs/ARCHITECTURE.md", "hetero_ee/engine.py", "scripts/stories.py"} <= {*files}
    assert not [name for name in files if name == "docs/cli.md" or name.startswith(("tests/", "hetero_ee/assets"))]
