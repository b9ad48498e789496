"""Text from tokens while they come: never half a character, never part of a stop string."""

from collections.abc import Callable

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet
CONTEXT_TOKENS = 8  # tokens decoded before the new ones, so that spacing comes out as in the whole text
MAX_HELD_TOKENS = 16  # an unfinished character has at most 4 bytes; what stays broken longer is not one


class TextStream:
    """Turns one sequence's tokens into text piece by piece; the pieces joined are the text of all tokens.

    The last prompt tokens are decoded with the new ones: decoders strip a leading space at the start of a text, and a
    character may even begin in the prompt.
    """

    def __init__(self, decode: Decode, prompt_ids: list[int], stop: tuple[str, ...] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._n_read = len(self._ids)  # tokens whose text has been taken
        self._held = ""  # text that may yet turn out to begin a stop string
        self.stopped = False

    def add(self, token_id: int) -> str:
        """The text that is certain now; sets `stopped` when a stop string is complete."""
        self._ids.append(token_id)
        return self._release(self._new_text(final=False))

    def finish(self) -> str:
        """The rest, when no more tokens will come."""
        text = self._release(self._new_text(final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _new_text(self, final: bool) -> str:
        """Text of the tokens not yet read, or nothing while their last character is incomplete."""
        first = max(0, self._n_read - CONTEXT_TOKENS)
        before = self._decode(self._ids[first : self._n_read])
        whole = self._decode(self._ids[first:])
        n_waiting = len(self._ids) - self._n_read
        if not final and whole.endswith(REPLACEMENT) and n_waiting < MAX_HELD_TOKENS:
            return ""
        self._n_read = len(self._ids)
        return whole[len(before) :] if whole.startswith(before) else whole[_common_prefix(before, whole) :]

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [index for index in (self._held.find(stop) for stop in self._stop) if index >= 0]
        if found:
            text, self._held, self.stopped = self._held[: min(found)], "", True
            return text
        n_kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - n_kept], self._held[len(self._held) - n_kept :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _common_prefix(first: str, second: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
