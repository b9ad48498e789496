"""Replies of gpt-oss, which consist of messages on channels: thoughts on "analysis", the answer on "final".

A reply is "<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...". The markers are
special tokens, which have no text.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.text.tokenizer import Tokenizer

CHANNEL, MESSAGE, START, ANALYSIS = "<|channel|>", "<|message|>", "<|start|>", "analysis"
END, CONSTRAIN = "<|end|>", "<|constrain|>"  # followed by another message, and by the format of a call's arguments
THINK, THINK_END = "<think>", "</think>"
THOUGHTS = re.compile(rf"{THINK}.*?(?:{THINK_END}\n|\Z)", re.DOTALL)


def channel_ids(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the markers by their token ids; empty unless all are special tokens."""
    found = {tokenizer.special_token_id(marker): marker for marker in (CHANNEL, MESSAGE, START)}
    return {} if None in found else {each: marker for each, marker in found.items() if each is not None}


def with_thoughts(tokens: Iterable[GeneratedToken], markers: dict[int, str]) -> Iterator[GeneratedToken]:
    """Yield the tokens with the text that other models have: thoughts between THINK and THINK_END, no messages' heads.

    Args:
        markers: see channel_ids.
    """
    head: str | None = None  # of a message, as far as it has been read; None inside of a message
    is_thinking = False
    for token in tokens:
        marker, text = markers.get(token.token_id), token.text
        if marker == MESSAGE and head is not None:
            was_thinking, is_thinking, head = is_thinking, head.startswith(ANALYSIS), None
            text = "" if is_thinking == was_thinking else THINK if is_thinking else f"{THINK_END}\n"
        elif marker is not None:
            head = ""
        elif head is not None:
            head, text = head + text, ""
        yield replace(token, text=text)


def answer(text: str) -> str:
    """Return a reply's text without its thoughts."""
    return THOUGHTS.sub("", text)
