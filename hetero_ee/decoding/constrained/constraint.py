"""Computes which tokens a grammar allows next in one sequence, with llguidance's matcher.

A sequence may be queried with drafts at its end, and then without them. The masks for the longer one are kept until its
drafts turn out wrong, so that verification finds the masks of its drafts. If the grammar forces bytes, the mask allows
only the token with which the tokenizer would begin them, so that forced tokens are certain.
"""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from hetero_ee.errors import GrammarError

MAX_MASKS = 32  # kept of the latest places: more than a draft-verify step has
# Of this thread's CPU time, since a token of one text holds all others up. Usual grammars take 0.02 to 2 ms per token.
FREE_S, TOKEN_S = 2.0, 0.02


class Constraint:
    """Constraint of one sequence, for use by one thread.

    It needs 20 to 120 microseconds per token (demo model, a busy 2-core Zen 4, 2026-11-24). matcher: a new one that
    nothing else uses. n_tokens: size of the vocabulary. banned: tokens that may not end the text.
    """

    def __init__(self, matcher: LLMatcher, n_tokens: int, banned: Sequence[int] = ()) -> None:
        self._matcher, self._n_tokens, self._banned = matcher, n_tokens, list(banned)
        self._used_s = 0.0
        self._taken: list[int] = []  # tokens that the matcher stands after
        self._masks: dict[int, NDArray[np.bool_]] = {}  # by the number of tokens before them

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask (vocab,) of the tokens that may follow the generated ones, or of the end tokens at the end.

        Raises: GrammarError: if the grammar needs too much memory or time.
        """
        generated = list(generated)
        known = self._masks.get(len(generated))
        if known is not None and self._begins_with(generated):
            return known
        self._go_to(generated)
        begin_s = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check(begin_s)
        mask = np.unpackbits(bits, bitorder="little")[: self._n_tokens].view(np.bool_)
        if self._banned and not self._matcher.is_stopped():
            mask[self._banned] = False
        if not mask.any():
            raise GrammarError("the model has no token that the grammar lets follow here; loosen the grammar.")
        self._masks[len(generated)] = mask
        if len(self._masks) > MAX_MASKS:
            del self._masks[next(iter(self._masks))]
        return mask

    def forced(self, generated: Sequence[int]) -> list[int]:
        """Return the tokens that must follow the generated ones, up to the first choice."""
        self._go_to(list(generated))
        found = self._matcher.compute_ff_tokens()
        return found if max(found, default=0) < self._n_tokens else []

    def is_complete(self, generated: Sequence[int]) -> bool:
        """Return whether the grammar allows no token after the generated ones."""
        generated = list(generated)
        if len(generated) < len(self._taken) and self._begins_with(generated):
            return False  # something did
        self._go_to(generated)
        return self._matcher.is_stopped()

    def _begins_with(self, generated: list[int]) -> bool:
        return self._taken[: len(generated)] == generated

    def _go_to(self, generated: list[int]) -> None:
        """Move the matcher to the end of the generated tokens, each of which was allowed."""
        n_common, begin_s = len(self._taken), time.thread_time()
        if generated[:n_common] != self._taken:
            pairs = enumerate(zip(self._taken, generated, strict=False))
            shorter = min(n_common, len(generated))
            n_common = next((place for place, (one, other) in pairs if one != other), shorter)
            self._matcher.rollback(len(self._taken) - n_common)
            self._masks = {place: mask for place, mask in self._masks.items() if place <= n_common}
        self._matcher.consume_tokens(generated[n_common:])
        self._taken = generated
        self._check(begin_s)

    def _check(self, begin_s: float) -> None:
        """Check the time and the errors of the matcher after work that began at `begin_s` (thread time)."""
        self._used_s += time.thread_time() - begin_s
        if self._used_s > FREE_S + TOKEN_S * len(self._taken):
            used = f"{self._used_s:.1f} s for {len(self._taken)} tokens"
            raise GrammarError(f"the grammar took {used}, which holds up other texts; simplify it.")
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0][:200]
            raise GrammarError(f"the text can't be held to its grammar any more ({reason}); simplify the grammar.")
