"""Convert prompts, given as text or token ids, to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hetero_ee.errors import UsageError, shown
from hetero_ee.models.context_limit import beyond_context
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.option import is_whole
from hetero_ee.text.tokenizer import Tokenizer


class TokenArray(Protocol):
    """Array of token ids from NumPy, torch or another library: one prompt, or one prompt per row."""

    def tolist(self) -> Any: ...


Prompt = str | list[int] | TokenArray  # text, or token ids
PromptList = list[str] | list[list[int]] | list[Prompt] | tuple[Prompt, ...]


def listed(prompt: Prompt | PromptList) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether the caller gave a single one. Raises UsageError."""
    given = _plain(prompt)
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray) or (not given and given != ""):
        raise UsageError(f"prompt is {shown(given)}; expected text, a list of token ids, or a list of several.")
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [cast(Prompt, given)] if is_one else list(given), is_one


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Converts prompts to the token ids of one model."""

    tokenizer: Tokenizer
    spec: ModelSpec

    def ids(self, prompt: Prompt, most_tokens: int) -> list[int]:
        """Return the prompt's token ids. Raises UsageError if most_tokens, the context length, leaves no new token."""
        ids = self._encoded(prompt) if isinstance(prompt, str) else self._checked(_plain(prompt))
        if len(ids) >= most_tokens:
            raise UsageError(beyond_context(f"the prompt has {len(ids)} tokens", most_tokens, self.spec))
        return ids

    def _encoded(self, text: str) -> list[int]:
        if not text:
            raise UsageError("the prompt is empty; give some text to continue.")
        ids = self.tokenizer.encode(text)
        if not ids:
            raise UsageError(f"the prompt {shown(text)} has no token this model knows; give other text.")
        return ids

    def _checked(self, given: Any) -> list[int]:
        ids = list(given) if isinstance(given, list | tuple) else []
        if not ids or not all(is_whole(each, 0, self.spec.vocab_size - 1) for each in ids):
            expected = f"text, or a list of token ids from 0 to {self.spec.vocab_size - 1}"
            raise UsageError(f"prompt is {shown(given)}; expected {expected}.")
        return ids


def _plain(given: Any) -> Any:
    """Convert arrays and NumPy numbers, also inside a list, to plain lists and numbers. Return others unchanged."""
    if hasattr(given, "tolist"):
        return given.tolist()
    return [_plain(each) for each in given] if isinstance(given, list | tuple) else given
