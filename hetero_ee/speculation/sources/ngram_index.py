"""NgramIndex: what followed the n-grams of a growing text, newest first, with exact rollback."""

from collections.abc import Iterator, Sequence

SEPARATOR = -1  # stands between texts that share an index; no n-gram spans it
TOKEN_BITS = 32  # an n-gram's key is its tokens side by side in one integer


class NgramIndex:
    """One text and its n-grams of 1 to max_order tokens.

    For each order a table from n-gram to the newest place behind one, and for each place the one before it of the same
    n-gram: the chains of LZ77 encoders. An n-gram is entered when a token follows it. Appending and taking back cost
    O(max_order) a token, whatever the text's length.

    A change that was broken off, by Ctrl-C, is mended by the next one from the tokens that are there.

    keys: of the last 1, 2, .. max_order tokens, fewer where the text or a separator begins before.
    """

    def __init__(self, max_order: int) -> None:
        self.token_ids: list[int] = []
        self.keys: list[int] = []
        self._newest: list[dict[int, int]] = [{} for _ in range(max_order)]
        self._before: list[list[int]] = [[] for _ in range(max_order)]
        self._is_changing = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Adds a token, or SEPARATOR."""
        self._begin()
        place = len(self.token_ids)
        keys = [] if token_id == SEPARATOR else self.keys
        for newest, before, key in zip(self._newest, self._before, keys, strict=False):
            before.append(newest.get(key, -1))
            newest[key] = place
        for before in self._before[len(keys) :]:
            before.append(-1)
        self.token_ids.append(token_id)
        longer = [key << TOKEN_BITS | token_id for key in keys[: len(self._newest) - 1]]
        self.keys = [] if token_id == SEPARATOR else [token_id, *longer]
        self._is_changing = False

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds several tokens."""
        for token_id in token_ids:
            self.append(token_id)

    def truncate(self, length: int) -> None:
        """Back to the first `length` tokens, exactly as before the others came; no effect on a shorter text."""
        if len(self.token_ids) <= length:
            return
        self._begin()
        while len(self.token_ids) > length:
            token_id = self.token_ids.pop()
            self.keys = self._last_keys()
            earlier = [before.pop() for before in self._before]
            entered = [] if token_id == SEPARATOR else self.keys
            for newest, place, key in zip(self._newest, earlier, entered, strict=False):
                if place < 0:
                    del newest[key]
                else:
                    newest[key] = place
        self._is_changing = False

    def places(self, order: int, key: int, n_most: int) -> Iterator[int]:
        """Places of the tokens that follow the n-grams with this key, newest first, at most n_most."""
        place = self._newest[order - 1].get(key, -1)
        while place >= 0 and n_most > 0:
            yield place
            place = self._before[order - 1][place]
            n_most -= 1

    def _begin(self) -> None:
        """A change begins; what one before has left half done is made again."""
        if self._is_changing:
            whole = NgramIndex(len(self._newest))
            whole.extend(self.token_ids)
            self._newest, self._before, self.keys = whole._newest, whole._before, whole.keys
        self._is_changing = True

    def _last_keys(self) -> list[int]:
        keys: list[int] = []
        key = 0
        for order in range(min(len(self._newest), len(self.token_ids))):
            token_id = self.token_ids[-1 - order]
            if token_id == SEPARATOR:
                break
            key |= token_id << (TOKEN_BITS * order)
            keys.append(key)
        return keys
