"""CombinedSource: repeated n-grams, which cost nothing, before and behind the drafts of a source that computes."""

from collections.abc import Sequence

from torch import Tensor

from hetero_ee.speculation.sources.candidates import ChainJudge, Choose, DraftSource, merged_candidates
from hetero_ee.speculation.sources.ngram import NgramSource


class CombinedSource:
    """Two DraftSources as one. A chain is of n-grams or computed, whichever the judge expects more of; where a computed
    one ends early, n-grams go on with it. Candidates are the computed ones, filled up from n-grams."""

    def __init__(self, ngrams: NgramSource, computed: DraftSource) -> None:
        self._ngrams, self._computed = ngrams, computed

    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        """See DraftSource.propose. Without a judge n-grams are taken where there are any, and else the other's."""
        if judge is None:
            chain = self._ngrams.propose(sequence, token_ids, n_tokens, choose)
            return chain or self._computed.propose(sequence, token_ids, n_tokens, choose)
        free, chances = self._ngrams.forecast(sequence, token_ids, n_tokens)
        if n_leading := judge.leading(chances, n_tokens):
            return free[:n_leading]
        chain = self._computed.propose(sequence, token_ids, n_tokens, choose, judge)
        if len(chain) < n_tokens:
            free, chances = self._ngrams.forecast(sequence, [*token_ids, *chain], n_tokens - len(chain))
            chain += free[: judge.following(chances)]
        return chain

    def candidates(self, sequence: int, token_ids: Sequence[int], k: int) -> list[int]:
        """See DraftSource.candidates."""
        found = self._computed.candidates(sequence, token_ids, k)
        if len(found) == k:
            return found
        return merged_candidates((found, self._ngrams.candidates(sequence, token_ids, k)), k)

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        """See DraftSource.observe."""
        self._ngrams.observe(sequence, first_position, token_ids, normed)
        self._computed.observe(sequence, first_position, token_ids, normed)

    def truncate(self, sequence: int, length: int) -> None:
        """See DraftSource.truncate."""
        self._ngrams.truncate(sequence, length)
        self._computed.truncate(sequence, length)

    def close(self, sequence: int) -> None:
        """See DraftSource.close."""
        self._ngrams.close(sequence)
        self._computed.close(sequence)
