"""Text from tokens while they come: never half a character, never part of a stop string."""

from collections.abc import Callable

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet
CONTEXT_TOKENS = 8  # tokens kept before the new ones, so that spacing comes out as in the whole text
WINDOW_TOKENS = 32  # tokens decoded together at most; then the oldest are let go
MAX_HELD_TOKENS = 16  # an unfinished character has at most 4 bytes; what stays broken longer is not one


class TextStream:
    """Turns one sequence's tokens into text piece by piece; the pieces joined are the text of all tokens.

    The last tokens, the prompt's too, are decoded again with each new one: decoders strip a leading space at the start
    of a text, and some (ByteFallback) take a run of byte tokens for text only where the whole run is valid UTF-8.
    """

    def __init__(self, decode: Decode, prompt_ids: list[int], stop: tuple[str, ...] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(prompt_ids)  # the window
        self._text = decode(self._ids)  # its text
        self._n_taken = len(self._text)  # characters of it that have been handed on
        self._n_waiting = 0  # tokens since its end last was a whole character
        self._held = ""  # text that may yet turn out to begin a stop string
        self.stopped = False
        self._let_go()

    def add(self, token_id: int) -> str:
        """The text that is certain now; sets `stopped` when a stop string is complete."""
        self._read(token_id)
        text = self._release(self._take(self._certain_text()))
        self._let_go()
        return text

    def finish(self) -> str:
        """The rest, when no more tokens will come."""
        text = self._release(self._take(self._text))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _read(self, token_id: int) -> None:
        whole = self._decode([*self._ids, token_id])
        is_silent = whole == self._text != "" and not whole.endswith(REPLACEMENT)
        if not is_silent:  # special tokens have no text, and many of them must not push out those that have
            self._ids.append(token_id)
        self._text = whole
        self._n_waiting = self._n_waiting + 1 if whole.endswith(REPLACEMENT) else 0

    def _certain_text(self) -> str:
        """The window's text without its end where that may yet become another character."""
        if self._n_waiting == 0:
            return self._text
        return self._text.rstrip(REPLACEMENT) if self._n_waiting < MAX_HELD_TOKENS else self._text[:-1]

    def _take(self, text: str) -> str:
        new = text[self._n_taken :]
        self._n_taken = max(self._n_taken, len(text))
        return new

    def _let_go(self) -> None:
        """Shortens a full window to tokens whose text alone is the end of its text: not from within a character."""
        if len(self._ids) <= WINDOW_TOKENS or 0 < self._n_waiting < MAX_HELD_TOKENS:
            return
        n_untaken = len(self._text) - self._n_taken
        for n_kept in range(CONTEXT_TOKENS, WINDOW_TOKENS):
            text = self._decode(self._ids[-n_kept:])
            if len(text) > n_untaken and self._text.endswith(text):
                self._ids, self._text, self._n_taken = self._ids[-n_kept:], text, len(text) - n_untaken
                return

    def _release(self, text: str) -> str:
        """What of the held text and `text` can't be part of a stop string. The stop that is complete first counts."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            text, self._held, self.stopped = self._held[: min(found)[1]], "", True
            return text
        n_kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - n_kept], self._held[len(self._held) - n_kept :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
