"""Drafts by early exit, from the hidden states of pending tokens at the exit layer.

Source: LayerSkip (arXiv 2404.16710) for self-speculation, SpecEE (arXiv 2504.08850) for the predictor that decides.
"""

from collections.abc import Callable, Sequence
from math import isfinite

from hetero_ee.decoding.result import EXIT
from hetero_ee.runtime.drafted import NO_TOKEN, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.pending import advance, stacked
from hetero_ee.speculation.stop_rule import StopRule


class ExitDrafter:
    """Drafts for all requests in lockstep: their tokens share each pass through the layers before the exit layer. If
    guesses_next, a step's last token is judged even if no draft may follow it, for asynchronous drafting."""

    def __init__(
        self,
        executor: Executor,
        exit_layer: int,
        end: DraftEnd,
        rule: StopRule,
        sampler: DraftSampler,
        warn: Callable[[str], None],
        *,
        guesses_next: bool,
    ) -> None:
        self._executor, self._exit_layer, self._end, self._rule = executor, exit_layer, end, rule
        self._sampler, self._warn, self._guesses_next = sampler, warn, guesses_next

    def draft(self, steps: Sequence[DraftStep]) -> None:
        """Add drafts to each step. Afterwards all tokens of the steps are pending at the exit layer."""
        together = steps
        while steps:
            pending = [token for step in steps for token in step.tokens if token.depth < self._exit_layer]
            if pending:
                advance(self._executor, pending, self._exit_layer)
            asked = [step for step in steps if step.has_room or self._may_guess(step)]
            steps = self._draft_once(asked, sum(len(step.tokens) for step in together))

    def _may_guess(self, step: DraftStep) -> bool:
        return self._guesses_next and len(step.tokens) < step.request.tokens_left

    def _draft_once(self, steps: Sequence[DraftStep], n_in_pass: int) -> list[DraftStep]:
        """Add a draft to each step whose last token exits, and return these steps. n_in_pass counts the tokens of all
        steps."""
        if not steps:
            return []
        hidden = stacked([step.tokens[-1] for step in steps])
        assert hidden is not None, "an exit layer is after the embedding"
        judged = self._sampler.drafted(self._executor, hidden, self._end, [(s.request, s.history) for s in steps])
        added = []
        for step, draft in zip(steps, judged, strict=True):
            self._rule.n_beside = n_in_pass - len(step.tokens)
            if self._try_draft(step, *draft):
                added.append(step)
        return added

    def _try_draft(self, step: DraftStep, token_id: int, confidence: float) -> bool:
        """Add this token as a draft if it is worth its time, and return whether it was added."""
        if token_id == NO_TOKEN:
            self._warn("exits' logits are not finite")
            return False
        if step.request.ends_with(token_id):
            return False
        step.next_guess = token_id
        if not step.has_room:
            return False
        if not isfinite(confidence):
            self._warn("exits' confidences are not finite")
            return False
        step.judge(token_id, confidence)
        chance = self._rule.chance(confidence)
        if not self._rule.is_worth([*step.chances, chance], self._rule.draft_s):
            return False
        step.add(token_id, EXIT, chance)
        step.add_forced()
        return True
