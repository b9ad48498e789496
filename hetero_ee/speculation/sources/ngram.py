"""Drafts the tokens that followed an earlier occurrence of the last tokens in the same sequence.

This is prompt lookup decoding with decreasing n-gram sizes. Its drafts cost no computation, and are right if a sequence
repeats its prompt or itself.
"""

import itertools
from collections.abc import Generator, Sequence

from torch import Tensor

from hetero_ee.speculation.sources.source import Choose, Draft
from hetero_ee.speculation.stop_rule import LearnedChances

MAX_ORDER = 5  # tokens of the longest n-gram looked up
TOKEN_BITS = 32  # an n-gram's key is its tokens side by side in one integer
PRIOR_ORDER = 4.0  # order of which one in two is believed to be right: low, as computed drafts are there instead


class NgramSource:
    """A free DraftSource. It prefers longer n-grams, then newer ones. Its memory grows with the open sequences."""

    name = "n-grams"
    is_free = True
    draft_s = 0.0

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._precision = MatchPrecision()

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        """See DraftSource.drafts. Yields the tokens after the newest match of the longest n-gram, and repeats them at
        the end of the sequence. A draft's chance is how often matches of its length were right; each draft lengthens
        the match."""
        text = self._texts.setdefault(sequence, _Text())
        text.become(token_ids)
        found = text.longest_match()
        if found is None:
            return
        order, start = found
        period = len(text.token_ids) - start
        for offset in itertools.count():
            yield Draft(text.token_ids[start + offset % period], self._precision.chance(order + offset))

    def observe(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor | None, *captured: Tensor
    ) -> None:
        """See DraftSource.observe. States are ignored. Tokens that were not observed are taken from `drafts` later."""
        text = self._texts.setdefault(sequence, _Text())
        text.truncate(first_position)
        if len(text.token_ids) < first_position:
            return
        for token_id in token_ids:
            found = text.longest_match()
            if found is not None:
                order, start = found
                self._precision.add(order, text.token_ids[start] == token_id)
            text.append(token_id)
        text.n_verified = len(text.token_ids)

    read_prompt = observe  # indexing its tokens is all that a prompt asks for

    def truncate(self, sequence: int, length: int) -> None:
        if sequence in self._texts:
            self._texts[sequence].truncate(length)

    def close(self, sequence: int) -> None:
        self._texts.pop(sequence, None)


class MatchPrecision:
    """Share of right drafts by the length of the n-gram match, up to MAX_ORDER.

    The share for n tokens starts at n / (n + PRIOR_ORDER).
    """

    def __init__(self) -> None:
        self._chances = LearnedChances([order / (order + PRIOR_ORDER) for order in range(1, MAX_ORDER + 1)])

    def add(self, order: int, was_right: bool) -> None:
        self._chances.add(order - 1, was_right)

    def chance(self, order: int) -> float:
        return self._chances.of(min(order, MAX_ORDER) - 1)


class _Text:
    """A growing token sequence with the last position of each of its n-grams, and exact rollback.

    For each order, a table maps an n-gram to the newest position after it. Another gives, for each position, the
    previous one after the same n-gram: the chains of LZ77 encoders. Appending and undoing cost O(MAX_ORDER) per token,
    whatever the length. If Ctrl-C interrupts a change, the next change rebuilds the tables from the tokens.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.n_verified = 0  # tokens that were observed; those after them came with a question
        self._newest: list[dict[int, int]] = [{} for _ in range(MAX_ORDER)]
        self._earlier: list[list[int]] = [[] for _ in range(MAX_ORDER)]
        self._is_changing = False

    def longest_match(self) -> tuple[int, int] | None:
        """Find the longest final n-gram that occurred before. Return its order and the newest position after it."""
        keys = self._last_keys()
        for order in range(len(keys), 0, -1):
            position = self._newest[order - 1].get(keys[order - 1])
            if position is not None:
                return order, position
        return None

    def become(self, token_ids: Sequence[int]) -> None:
        """Change the sequence to these tokens. Verified tokens must be equal; they are not compared."""
        if len(token_ids) < self.n_verified:
            raise ValueError(f"{len(token_ids)} tokens of a sequence of which {self.n_verified} are verified")
        position = self.n_verified
        while position < min(len(self.token_ids), len(token_ids)) and self.token_ids[position] == token_ids[position]:
            position += 1
        self.truncate(position)
        for token_id in token_ids[position:]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self._begin()
        position = len(self.token_ids)
        keys = self._last_keys()
        for newest, earlier, key in zip(self._newest, self._earlier, keys, strict=False):
            earlier.append(newest.get(key, -1))
            newest[key] = position
        for earlier in self._earlier[len(keys) :]:
            earlier.append(-1)
        self.token_ids.append(token_id)
        self._is_changing = False

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. A shorter sequence stays unchanged."""
        self.n_verified = min(self.n_verified, length)
        if len(self.token_ids) <= length:
            return
        self._begin()
        while len(self.token_ids) > length:
            self.token_ids.pop()
            positions = [earlier.pop() for earlier in self._earlier]
            for newest, position, key in zip(self._newest, positions, self._last_keys(), strict=False):
                if position < 0:
                    del newest[key]
                else:
                    newest[key] = position
        self._is_changing = False

    def _begin(self) -> None:
        """Start a change, after rebuilding the tables if the last change was interrupted."""
        if self._is_changing:
            whole = _Text()
            for token_id in self.token_ids:
                whole.append(token_id)
            self._newest, self._earlier = whole._newest, whole._earlier
        self._is_changing = True

    def _last_keys(self) -> list[int]:
        """Return the n-grams of 1, 2, ... MAX_ORDER tokens that end the text."""
        keys: list[int] = []
        key = 0
        for order, token_id in enumerate(reversed(self.token_ids[-MAX_ORDER:])):
            key |= token_id << (TOKEN_BITS * order)
            keys.append(key)
        return keys
