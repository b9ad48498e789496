"""The certified policy: a token exits where the predictor is as sure as the certificate asks for."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hetero_ee.decoding.texts import Text
from hetero_ee.runtime.drafted import NO_TOKEN, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exits.certificate import CertifiedExit, check_sampling
from hetero_ee.speculation.policies.head_judge import HeadJudge


class Certified:
    """ends: of the exit layers where tokens are judged; allowed: by which threshold they may exit there."""

    name = "certified"

    def __init__(self, ends: Mapping[int, DraftEnd], allowed: CertifiedExit) -> None:
        self._ends, self._allowed = ends, allowed

    @property
    def most_different(self) -> float:
        """The share of exits that may differ from the full model's choice."""
        return self._allowed.risk / (sum(self._allowed.shares) or 1.0)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_Judge":
        """See ExitPolicy. Raises UsageError for texts that are not greedy."""
        check_sampling(sampler.params)
        return _Judge(executor, sampler, self._ends, self._allowed.threshold)


class _Judge(HeadJudge):
    def __init__(
        self, executor: Executor, sampler: DraftSampler, ends: Mapping[int, DraftEnd], threshold: float
    ) -> None:
        super().__init__(executor, sampler, ends)
        self._threshold = threshold

    def judge(self, exit_layer: int, hidden: Tensor, texts: Sequence[Text]) -> list[int | None]:
        found = self.drafted(exit_layer, hidden, texts)
        return [  # a confidence of NaN reaches no threshold
            token_id if confidence >= self._threshold and token_id != NO_TOKEN else None
            for token_id, confidence in found
        ]
