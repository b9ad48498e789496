"""ExitDrafter: drafts by early exit. A token whose state at the exit layer already tells what follows is drafted on.

Source: LayerSkip (arXiv 2404.16710) for self-speculation, SpecEE (arXiv 2504.08850) for the predictor that decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from hetero_ee.decoding.sampling import all_finite
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler, DraftStep
from hetero_ee.speculation.stop_rule import StopRule
from hetero_ee.speculation.waiting import WaitingToken, advance, stacked

EXIT = "exit"  # the origin of these drafts

# Normed state (hidden,) at the exit layer and logits (vocab,) made of it -> chance that their likeliest token is right.
Confidence = Callable[[Tensor, Tensor], float]


def largest_probability(normed: Tensor, logits: Tensor) -> float:
    """The confidence where no predictor was fitted."""
    return float(torch.softmax(logits, 0).max())


@dataclass(frozen=True, slots=True)
class ExitHead:
    """Makes logits of hidden states at the exit layer: final norm, exit map, the model's lm_head."""

    exit_map: Callable[[Tensor], Tensor] | None = None  # normed states (m, hidden) -> estimates of the final ones
    confidence: Confidence = largest_probability


class ExitDrafter:
    """Drafts of all texts in lockstep; their tokens share each pass through the layers before the exit layer."""

    def __init__(
        self,
        executor: Executor,
        exit_layer: int,
        head: ExitHead,
        rule: StopRule,
        sampler: DraftSampler,
        warn: Callable[[str], None],
        *,
        guesses_next: bool,
    ) -> None:
        """guesses_next: a token that no draft may follow is judged too, for what is drafted asynchronously after it."""
        self._executor, self._exit_layer, self._head, self._rule = executor, exit_layer, head, rule
        self._sampler, self._warn, self._guesses_next = sampler, warn, guesses_next

    def draft(self, steps: Sequence[DraftStep]) -> None:
        """Adds each step's drafts; all its tokens wait at the exit layer."""
        while steps:
            advance(self._executor, [step.tokens[-1] for step in steps], self._exit_layer)
            steps = self._draft_once([step for step in steps if step.has_room or self._may_guess(step)])

    def _may_guess(self, step: DraftStep) -> bool:
        return self._guesses_next and len(step.tokens) < self._sampler.n_left(step.text)

    def _draft_once(self, steps: Sequence[DraftStep]) -> list[DraftStep]:
        """Adds a draft to each step whose last token exits here; those steps."""
        if not steps:
            return []
        normed, logits = self._logits([step.tokens[-1] for step in steps])
        return [step for step, *judged in zip(steps, normed, logits, strict=True) if self._try_draft(step, *judged)]

    def _try_draft(self, step: DraftStep, normed: Tensor, logits: Tensor) -> bool:
        """Whether a draft was added, by what the lm_head makes of the last token's state."""
        if not all_finite(logits):
            self._warn("exits' logits are not finite")
            return False
        token_id = self._sampler.choose(step.text, step.history, logits)
        if self._sampler.is_end(token_id):
            return False
        step.next_guess = token_id
        if not step.has_room:
            return False
        confidence = self._head.confidence(normed, logits)
        if not isfinite(confidence):
            self._warn("exits' confidences are not finite")
            return False
        step.judged.append((token_id, confidence))
        chance = self._rule.chance(confidence)
        if not self._rule.is_worth([*step.chances, chance], self._rule.draft_s):
            return False
        step.add(token_id, EXIT, chance)
        return True

    def _logits(self, tokens: Sequence[WaitingToken]) -> tuple[Tensor, Tensor]:
        """What the lm_head multiplies (m, hidden), and logits (m, vocab)."""
        hidden = stacked(tokens)
        assert hidden is not None, "an exit layer is after the embedding"
        normed = self._executor.final_norm(hidden)
        if self._head.exit_map is not None:
            normed = self._head.exit_map(normed)
        return normed, self._executor.lm_head(normed)
