"""The certified policy: a token exits if the predictor's confidence reaches the certificate's threshold."""

from collections.abc import Mapping

from hetero_ee.decoding.requests import Request
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exits.certificate import CertifiedExit, check_sampling
from hetero_ee.speculation.policies.head_judge import ThresholdJudge


class Certified:
    """The certified policy. ends: of the exit layers where tokens are judged; allowed: the threshold at which they may
    exit."""

    def __init__(self, ends: Mapping[int, DraftEnd], allowed: CertifiedExit) -> None:
        self._ends, self._allowed = ends, allowed

    @property
    def most_different(self) -> float:
        """Largest share of exits that may differ from the full model's choice."""
        return self._allowed.risk / (sum(self._allowed.shares) or 1.0)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_GreedyJudge":
        """See ExitPolicy."""
        return _GreedyJudge(executor, sampler, self._ends, self._allowed.threshold)


class _GreedyJudge(ThresholdJudge):
    def begin(self, request: Request) -> None:
        """See ExitJudge.

        Raises:
            UsageError: if the request is not greedy.
        """
        check_sampling(request.params)
