"""Convert tokens to text as they are generated, without yielding half a character or part of a stop string."""

from collections.abc import Callable

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"  # decoders return it for bytes that are not, or not yet, a character
CONTEXT_TOKENS = 8  # tokens kept before the new ones, so that spacing is as in the whole text
WINDOW_TOKENS = 32  # most tokens decoded together; then the oldest are dropped
MAX_HELD_TOKENS = 16  # an unfinished character has at most 4 bytes, so longer ones are invalid


class TextStream:
    """Converts one sequence's tokens to text piece by piece. The pieces join to the text of all tokens.

    Each new token is decoded together with the latest ones, including the prompt's: decoders strip a leading space, and
    some (ByteFallback) decode a run of byte tokens only if the whole run is valid UTF-8.
    """

    def __init__(self, decode: Decode, prompt_ids: list[int], stop: tuple[str, ...] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(prompt_ids)  # the window
        self._text = decode(self._ids)  # the window's text
        self._n_taken = len(self._text)  # number of its characters that were returned
        self._n_waiting = 0  # tokens since it last ended with a whole character
        self._held = ""  # text that may be the start of a stop string
        self.stopped_by: str | None = None  # the stop string that ended the text
        self._shorten()

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def add(self, token_id: int) -> str:
        """Add a token and return the text that can't change any more. Sets `stopped` if a stop string is complete."""
        is_silent = self._read(token_id)
        text = self._release(self._take(self._certain_text()))
        if is_silent:  # a special token: no stop string extends across it, and its marker belongs after the held text
            text, self._held = text + self._held, ""
        self._shorten()
        return text

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        text = self._release(self._take(self._text))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _read(self, token_id: int) -> bool:
        """Append a token to the window of latest tokens and return whether it has no text."""
        whole = self._decode([*self._ids, token_id])
        is_silent = whole == self._text != "" and not whole.endswith(REPLACEMENT)
        if not is_silent:  # special tokens without text must not push out tokens with text
            self._ids.append(token_id)
        self._text = whole
        self._n_waiting = self._n_waiting + 1 if whole.endswith(REPLACEMENT) else 0
        return is_silent

    def _certain_text(self) -> str:
        """Return the window's text without an end that may still become another character."""
        if self._n_waiting == 0:
            return self._text
        return self._text.rstrip(REPLACEMENT) if self._n_waiting < MAX_HELD_TOKENS else self._text[:-1]

    def _take(self, text: str) -> str:
        new = text[self._n_taken :]
        self._n_taken = max(self._n_taken, len(text))
        return new

    def _shorten(self) -> None:
        """Drop the oldest tokens of a full window if the remaining ones decode to the end of the window's text."""
        if len(self._ids) <= WINDOW_TOKENS or 0 < self._n_waiting < MAX_HELD_TOKENS:
            return
        n_untaken = len(self._text) - self._n_taken
        for n_kept in range(CONTEXT_TOKENS, WINDOW_TOKENS):
            text = self._decode(self._ids[-n_kept:])
            if len(text) > n_untaken and self._text.endswith(text):
                self._ids, self._text, self._n_taken = self._ids[-n_kept:], text, len(text) - n_untaken
                return

    def _release(self, text: str) -> str:
        """Return the part of the held text and `text` that cannot belong to a stop string, up to the first one."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            text, self._held = self._held[:at], ""
            return text
        n_kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - n_kept], self._held[len(self._held) - n_kept :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
