"""Replies of gpt-oss in conversations: thoughts are shown as other models show them, and only answers are kept."""

from typing import Any

import pytest

from hetero_ee.decoding.channels import CHANNEL, MESSAGE, START, answer, channel_ids, with_thoughts
from hetero_ee.decoding.result import GeneratedToken

MARKERS = {1: CHANNEL, 2: MESSAGE, 3: START}
IDS = {marker: token_id for token_id, marker in MARKERS.items()}
AGAIN = (START, CHANNEL, "analysis", MESSAGE, "Oh.", START, CHANNEL, "final", MESSAGE, "No.")


class Marked:
    """A tokenizer with some special tokens."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers

    def special_token_id(self, text: str) -> int | None:
        return IDS[text] if text in self._markers else None


def tokens_of(*texts: str) -> list[GeneratedToken]:
    made: list[Any] = [(IDS.get(text, 9), "" if text in IDS else text) for text in texts]
    return [GeneratedToken(text, token_id, 0, place, None, 0.0) for place, (token_id, text) in enumerate(made)]


@pytest.mark.parametrize(
    ("texts", "shown", "kept"),
    [
        (
            (CHANNEL, "analysis", MESSAGE, "Hm", ".", START, "assistant", CHANNEL, "final", MESSAGE, "Yes", "."),
            "<think>Hm.</think>\nYes.",
            "Yes.",
        ),
        (
            (CHANNEL, "analysis", MESSAGE, "Hm.", START, CHANNEL, "commentary", MESSAGE, "First.", *AGAIN),
            "<think>Hm.</think>\nFirst.<think>Oh.</think>\nNo.",
            "First.No.",
        ),
        ((CHANNEL, "analy", "sis", MESSAGE, "Cut", " off"), "<think>Cut off", ""),
        ((CHANNEL, "final", MESSAGE, "Yes."), "Yes.", "Yes."),
        (("Yes", "."), "Yes.", "Yes."),
    ],
)
def test_thoughts_are_shown_and_answers_are_kept(texts: tuple[str, ...], shown: str, kept: str) -> None:
    given = tokens_of(*texts)
    found = list(with_thoughts(given, MARKERS))
    assert [each.token_id for each in found] == [each.token_id for each in given]
    text = "".join(each.text for each in found)
    assert text == shown and answer(text) == kept


def test_only_tokenizers_with_all_markers_have_channels() -> None:
    assert channel_ids(Marked(CHANNEL, MESSAGE, START)) == MARKERS  # type: ignore[arg-type]
    assert channel_ids(Marked(CHANNEL, START)) == {}  # type: ignore[arg-type]
