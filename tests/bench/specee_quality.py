"""What early exits change: multiple-choice questions scored as lm-eval does, with each mode's own log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specee_subjects import Question

from hetero_ee.evaluation.open_mode import EngineMode
from hetero_ee.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answers:
    """The chosen continuations of a mode, and its mean layers per scored token."""

    chosen: tuple[int, ...]
    mean_depth: float

    def accuracy(self, asked: Sequence[Question]) -> float:
        return sum(each.right == number for each, number in zip(asked, self.chosen, strict=True)) / len(asked)

    def agreement(self, other: "Answers") -> float:
        """Return the share of questions to which both chose the same continuation."""
        return sum(a == b for a, b in zip(self.chosen, other.chosen, strict=True)) / len(self.chosen)


@torch.inference_mode()
def answered(mode: EngineMode, tokenizer: Tokenizer, asked: Sequence[Question]) -> Answers:
    """Choose the continuation with the largest sum of log-probabilities, lm-eval's `acc`, by the mode's own logits."""
    chosen, depths = [], list[int]()
    for question in asked:
        scores = []
        n_context = len(tokenizer.encode(question.context))
        for choice in question.choices:
            ids = tokenizer.encode(question.context + choice)
            logprob = 0.0
            for (logits, depth), token_id in zip(mode.score(ids, n_context), ids[n_context:], strict=True):
                logprob += float(logits.float().log_softmax(-1)[token_id])
                depths.append(depth)
            scores.append(logprob)
        chosen.append(scores.index(max(scores)))
    return Answers(tuple(chosen), sum(depths) / len(depths))
