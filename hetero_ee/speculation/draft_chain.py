"""DraftChain: what one text's chain is made by: which token each draft is, and whether another is worth its time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetero_ee.planning.plan import NGRAM, SEQUENCE
from hetero_ee.speculation.chain_rule import ChainRule


class DraftChain:
    """A ChainJudge that also chooses the tokens, and remembers what was drafted how.

    choose: as a source calls it. is_end: of tokens that no draft follows. rule: None drafts as much as there is room.
    asked: what the gate is to hear of them, (token, confidence) of those computed.
    """

    def __init__(
        self, choose: Callable[[Tensor, Sequence[int]], int], is_end: Callable[[int], bool], rule: ChainRule | None
    ) -> None:
        self._choose, self._is_end, self._rule = choose, is_end, rule
        self._chances: list[float] = []
        self._has_ended = False
        self._origins: list[str] = []
        self.asked: dict[int, list[tuple[int, float]]] = {}

    def choose(self, logits: Tensor, before: Sequence[int]) -> int:
        """See candidates.Choose: the token of one more computed draft."""
        token_id = self._choose(logits, before)
        self._has_ended = self._is_end(token_id)
        if self._rule is not None:
            confidence = torch.softmax(logits, 0)[token_id].item()
            self.asked[len(self._chances)] = [(token_id, confidence)]
            self._rule.gate.spend(self._rule.draft_s)
            self._chances.append(self._rule.gate.chance(confidence))
        self._origins.append(SEQUENCE)
        return token_id

    def goes_on(self) -> bool:
        """See ChainJudge.goes_on."""
        return not self._has_ended and (self._rule is None or self._rule.goes_on(self._chances))

    def leading(self, chances: Sequence[float], n_tokens: int) -> int:
        """See ChainJudge.leading."""
        return self._taken(0 if self._rule is None else self._rule.leading(chances, n_tokens))

    def following(self, chances: Sequence[float]) -> int:
        """See ChainJudge.following."""
        if self._has_ended:
            return 0
        return self._taken(len(chances) if self._rule is None else self._rule.following(self._chances, chances))

    def origins_of(self, n_drafts: int) -> list[str]:
        """Of the first drafts; SEQUENCE where a source did not say."""
        return [*self._origins, *[SEQUENCE] * n_drafts][:n_drafts]

    def _taken(self, n_drafts: int) -> int:
        self._origins += [NGRAM] * n_drafts
        return n_drafts
