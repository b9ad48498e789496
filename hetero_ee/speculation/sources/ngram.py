"""NgramSource: what followed the last tokens where they stood before, in this text or in earlier ones.

Prompt lookup decoding, over falling orders: drafts that cost nothing, right where a text repeats its prompt or itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hetero_ee.speculation.sources.candidates import ChainJudge, Choose
from hetero_ee.speculation.sources.match_precision import MatchPrecision
from hetero_ee.speculation.sources.ngram_index import SEPARATOR, NgramIndex


@dataclass(frozen=True, slots=True)
class NgramLimits:
    """max_order: tokens of the longest n-gram looked up. min_draft_order: of the shortest that a chain may follow;
    candidates, which cost no row, follow single tokens too. max_matches: places visited for one order, newest first.
    max_history_tokens: kept of sequences that were closed, 0 for none.
    """

    max_order: int = 5
    min_draft_order: int = 2
    max_matches: int = 32
    max_history_tokens: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_draft_order <= self.max_order:
            raise ValueError(f"min_draft_order is {self.min_draft_order}, expected 1 to {self.max_order}")
        if self.max_matches < 1 or self.max_history_tokens < 0:
            raise ValueError("max_matches is at least 1, max_history_tokens at least 0")


class _Text:
    """One sequence's index; of its tokens the first n_observed are verified, the others came with a question."""

    def __init__(self, max_order: int) -> None:
        self.index = NgramIndex(max_order)
        self.n_observed = 0

    def leave_out(self, n_tokens: int) -> None:
        """So many tokens, if any, behind the verified ones stay unknown."""
        if n_tokens > 0:
            self.index.truncate(self.n_observed)
            self.index.extend([SEPARATOR] * n_tokens)
            self.n_observed += n_tokens

    def replace(self, first_position: int, token_ids: Sequence[int], first_doubtful: int) -> None:
        """Makes the text from first_position on equal token_ids; what stands before first_doubtful is known to be."""
        held = self.index.token_ids
        position = max(first_position, first_doubtful)
        end = min(len(held), first_position + len(token_ids))
        while position < end and held[position] == token_ids[position - first_position]:
            position += 1
        self.index.truncate(position)
        self.index.extend(token_ids[position - first_position :])


class NgramSource:
    """A DraftSource that looks up the last tokens. Longer n-grams first; of one length this text before earlier ones,
    the newest place first. Memory grows with the tokens of open sequences, and by max_history_tokens at most."""

    def __init__(self, limits: NgramLimits | None = None) -> None:
        self._limits = limits or NgramLimits()
        self._texts: dict[int, _Text] = {}
        self._precision = MatchPrecision(self._limits.max_order)
        # Two generations of earlier texts: where the younger is full, it takes the place of the older, which goes.
        self._history = [NgramIndex(self._limits.max_order), NgramIndex(self._limits.max_order)]

    @property
    def n_tokens(self) -> int:
        """Tokens held, of open sequences and of history."""
        return sum(len(index) for index in (*(text.index for text in self._texts.values()), *self._history))

    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        """What followed the newest match of the longest n-gram. Nobody is asked: there are no logits, and no cost."""
        found = _longest_match(*self._asked(sequence, token_ids), self._limits.min_draft_order)
        return [] if found is None else _continuation(found[1].token_ids, found[2], n_tokens)

    def forecast(self, sequence: int, token_ids: Sequence[int], n_tokens: int) -> tuple[list[int], list[float]]:
        """What followed the newest match of the longest n-gram, single tokens too, and for each token the chance that
        it is right where all before it are: as often as matches of that length were, which grows with each token."""
        found = _longest_match(*self._asked(sequence, token_ids), 1)
        if found is None:
            return [], []
        order, index, start = found
        chain = _continuation(index.token_ids, start, n_tokens)
        return chain, [self._precision.chance(order + place) for place in range(len(chain))]

    def candidates(self, sequence: int, token_ids: Sequence[int], k: int) -> list[int]:
        """The newest k different followers over falling orders."""
        found: list[int] = []
        indexes, keys = self._asked(sequence, token_ids)
        for order in range(len(keys), 0, -1):
            for index in indexes:
                for place in index.places(order, keys[order - 1], self._limits.max_matches):
                    if len(found) >= k:
                        return found
                    if index.token_ids[place] not in found:
                        found.append(index.token_ids[place])
        return found

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor | None) -> None:
        """Keeps the tokens; the states are not looked at. Where tokens in between are missing, no n-gram spans them."""
        text = self._text(sequence)
        text.leave_out(first_position - text.n_observed)
        n_known = max(0, text.n_observed - first_position)
        text.replace(first_position, token_ids[:n_known], first_position)
        if n_known < len(token_ids):
            text.index.truncate(first_position + n_known)
            self._learn(text.index, token_ids[n_known:])
        text.n_observed = min(max(text.n_observed, first_position + len(token_ids)), len(text.index))

    def truncate(self, sequence: int, length: int) -> None:
        """See DraftSource.truncate; a sequence that holds fewer stays as it is."""
        text = self._texts.get(sequence)
        if text is not None:
            text.index.truncate(length)
            text.n_observed = min(text.n_observed, length)

    def close(self, sequence: int) -> None:
        """Frees the sequence; its verified tokens go to history where there is any."""
        text = self._texts.pop(sequence, None)
        capacity = self._limits.max_history_tokens // 2
        if text is None or not text.n_observed or capacity < 2:
            return
        kept = [*text.index.token_ids[max(0, text.n_observed - capacity + 1) : text.n_observed], SEPARATOR]
        if len(self._history[0]) + len(kept) > capacity:
            self._history = [NgramIndex(self._limits.max_order), self._history[0]]
        self._history[0].extend(kept)

    def _learn(self, index: NgramIndex, token_ids: Sequence[int]) -> None:
        """Adds verified tokens, each checked against what followed the longest match before it."""
        for token_id in token_ids:
            found = _longest_match([index, *filter(len, self._history)], index.keys, 1)
            if found is not None:
                order, other, start = found
                self._precision.add(order, other.token_ids[start] == token_id)
            index.append(token_id)

    def _text(self, sequence: int) -> _Text:
        if sequence not in self._texts:
            self._texts[sequence] = _Text(self._limits.max_order)
        return self._texts[sequence]

    def _asked(self, sequence: int, token_ids: Sequence[int]) -> tuple[list[NgramIndex], list[int]]:
        """Where to look and for which n-grams: token_ids, unverified ones included, become this sequence's text."""
        text = self._text(sequence)
        if len(token_ids) < text.n_observed:
            raise ValueError(
                f"{len(token_ids)} tokens of sequence {sequence}, of which {text.n_observed} are verified."
            )
        text.replace(0, token_ids, text.n_observed)
        return [text.index, *filter(len, self._history)], text.index.keys


def _longest_match(
    indexes: Sequence[NgramIndex], keys: Sequence[int], min_order: int
) -> tuple[int, NgramIndex, int] | None:
    """The order of the longest n-gram of these keys that stood anywhere before, and the newest place behind it."""
    for order in range(len(keys), min_order - 1, -1):
        for index in indexes:
            for start in index.places(order, keys[order - 1], 1):
                return order, index, start
    return None


def _continuation(token_ids: Sequence[int], start: int, n_tokens: int) -> list[int]:
    """n_tokens tokens from `start` on, to a separator at most; past the text's end it goes on with itself, as a
    repetition does."""
    chain = list(token_ids[start : start + n_tokens])
    if SEPARATOR in chain:
        return chain[: chain.index(SEPARATOR)]
    for _ in range(n_tokens - len(chain)):
        chain.append(chain[len(chain) - (len(token_ids) - start)])
    return chain
