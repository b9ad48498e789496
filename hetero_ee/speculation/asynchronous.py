"""Asynchronous drafting: while the CPU verifies drafts, the GPU already runs the likeliest next token.

The likeliest token after a step's last token is its next-token guess. The guess is not a draft of that step. If all
drafts are right and the full model chooses the guess after them, the next step's first token has already passed some
layers. Otherwise the guess is rolled back like a wrong draft. The CPU receives the pending tokens before the GPU starts
the guess, so the guess delays nothing. On an emulated machine with the rates published for Llama-2-7B, this is 9, 3 and
1 % faster with 25, 50 and 75 % of the layers on the CPU (docs/early_exit.md). Source: derived.
"""

from collections.abc import Sequence

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import DeviceMemoryError, UsageError
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftStep
from hetero_ee.speculation.pending import PendingToken, advance, stacked
from hetero_ee.speculation.statistics import DraftCounts


class AsyncDrafting:
    """Next-token guesses of all requests. Off if max_layers is 0 or the executor's devices can't run in parallel."""

    def __init__(self, executor: Executor, exit_layer: int, max_layers: int, counts: DraftCounts) -> None:
        self._executor, self._exit_layer, self._counts = executor, exit_layer, counts
        self._max_layers = min(exit_layer, max_layers)
        self._begun: dict[int, PendingToken] = {}  # by Request.kv_sequence

    def run_remaining_layers(self, steps: Sequence[DraftStep]) -> Tensor:
        """Return all steps' states (m, hidden) after the last layer, and run the guesses in parallel."""
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

    def keep_if_right(self, request: Request) -> bool:
        """Return whether the request's newest token is its guess. A wrong guess is forgotten, and the caller must roll
        back the cache."""
        guess = self._begun.get(request.kv_sequence)
        if guess is None:
            return False
        if request.finished or (guess.position, guess.token_id) != (len(request.token_ids) - 1, request.token_ids[-1]):
            del self._begun[request.kv_sequence]
            return False
        self._counts.n_ahead_kept += 1
        return True

    def take(self, request: Request) -> PendingToken | None:
        """Remove and return the guess of this request, which is its newest token, or None if there is no guess."""
        return self._begun.pop(request.kv_sequence, None)

    def drop(self, requests: Sequence[Request]) -> None:
        for request in requests:
            guess = self._begun.pop(request.kv_sequence, None)
            if guess is not None and request.kv_sequence in self._executor.cache.sequences:
                self._executor.cache.cut(request.kv_sequence, guess.position)

    def _may_follow(self, step: DraftStep) -> bool:
        return step.next_guess is not None and len(step.tokens) < step.request.tokens_left

    def _begin(self, steps: Sequence[DraftStep], n_layers: int) -> None:
        """Run the first n_layers layers of the guesses, and give up guessing if memory runs out."""
        guesses = {step.request.kv_sequence: _guess_of(step) for step in steps}
        try:
            advance(self._executor, list(guesses.values()), n_layers)
        except (DeviceMemoryError, UsageError):  # no memory, or no room in a shared cache
            # Guesses are optional: give them up, as later ones will hardly find memory either.
            self._max_layers = 0
            return
        self._begun |= guesses
        self._counts.n_ahead += len(guesses)


def _guess_of(step: DraftStep) -> PendingToken:
    assert step.next_guess is not None
    return PendingToken(step.next_guess, step.request.kv_sequence, step.tokens[-1].position + 1)
