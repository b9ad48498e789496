"""Asynchronous drafting: while the CPU verifies, the GPU already runs the likeliest next token.

A step's last token has a likeliest successor too, its next-token guess, though no draft was made of it. Where all
drafts are right and the full model says the guess after them, the next step's first token has passed layers already;
else it is rolled back as any wrong draft. The waiting tokens reach the CPU before the guess begins, so that nobody
waits for it. Emulated, with the rates published for Llama-2-7B: 9, 3 and 1 % faster with 25, 50 and 75 % of the layers
on the CPU (docs/early_exit.md). Source: derived.
"""

from collections.abc import Sequence

from torch import Tensor

from hetero_ee.decoding.texts import Text
from hetero_ee.errors import DeviceMemoryError, UsageError
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftStep
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.waiting import WaitingToken, advance, stacked


class AsyncDrafting:
    """The guessed tokens of all texts; none where max_layers is 0 or the executor's devices don't work side by side."""

    def __init__(self, executor: Executor, exit_layer: int, max_layers: int, counts: DraftCounts) -> None:
        self._executor, self._exit_layer, self._counts = executor, exit_layer, counts
        self._max_layers = min(exit_layer, max_layers)
        self._begun: dict[int, WaitingToken] = {}  # by Text.cached_as

    def run_remaining_layers(self, steps: Sequence[DraftStep]) -> Tensor:
        """Hidden states (m, hidden) of all steps' tokens after the last layer; the guesses run meanwhile."""
        tokens = [token for step in steps for token in step.tokens]
        overlap = self._executor.overlap if self._max_layers else None
        guessing = [step for step in steps if overlap is not None and self._may_follow(step)]
        if overlap is not None and guessing:
            advance(self._executor, tokens, overlap.layers_behind(self._exit_layer))
            hidden = stacked(tokens)
            assert hidden is not None
            for token, state in zip(tokens, self._executor.on_cpu(hidden).unbind(), strict=True):
                token.hidden = state
            self._begin(guessing, overlap.layers_ahead(self._max_layers))
        found = advance(self._executor, tokens, self._executor.spec.n_layers)
        assert found is not None
        return found

    def keep_if_right(self, text: Text) -> bool:
        """Whether the text's last token, now that a step was verified, is the guess; else the guess is forgotten here,
        and the cache is the caller's to roll back."""
        guess = self._begun.get(text.cached_as)
        if guess is None:
            return False
        if text.finished or (guess.position, guess.token_id) != (len(text.token_ids) - 1, text.token_ids[-1]):
            del self._begun[text.cached_as]
            return False
        self._counts.n_ahead_kept += 1
        return True

    def take(self, text: Text) -> WaitingToken | None:
        """The text's last token where it was guessed."""
        return self._begun.pop(text.cached_as, None)

    def drop(self, texts: Sequence[Text]) -> None:
        """Rolls back every guess of these texts."""
        for text in texts:
            guess = self._begun.pop(text.cached_as, None)
            if guess is not None and text.cached_as in self._executor.cache.sequences:
                self._executor.cache.cut(text.cached_as, guess.position)

    def _may_follow(self, step: DraftStep) -> bool:
        return step.next_guess is not None and len(step.tokens) < step.text.tokens_left

    def _begin(self, steps: Sequence[DraftStep], n_layers: int) -> None:
        """The guesses through the first layers; nobody waits for them."""
        guesses = {step.text.cached_as: _guess_of(step) for step in steps}
        try:
            advance(self._executor, list(guesses.values()), n_layers)
        except (DeviceMemoryError, UsageError):  # of memory, or of a cache that all texts share
            # No reason to fail, where no smaller plan was made for them; there will hardly be room for more later.
            self._max_layers = 0
            return
        self._begun |= guesses
        self._counts.n_ahead += len(guesses)


def _guess_of(step: DraftStep) -> WaitingToken:
    assert step.next_guess is not None
    return WaitingToken(step.next_guess, step.text.cached_as, step.tokens[-1].position + 1)
