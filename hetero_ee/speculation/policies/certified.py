"""The certified policy: compares the confidence of an exit's predictor with the certificate's threshold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.runtime.drafted import NO_TOKEN, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exits.certificate import CertifiedExit, check_sampling
from hetero_ee.speculation.policies.policy import ExitJudge


@dataclass(frozen=True, slots=True, eq=False)
class Certified:
    """The certified policy: `ends` by exit layer, and the certified threshold at which tokens may exit."""

    ends: Mapping[int, DraftEnd]
    allowed: CertifiedExit

    @property
    def most_different(self) -> float:
        """Largest share of exits that may differ from the full model's choice: the risk by the share of tokens that
        exit."""
        return self.allowed.risk / (sum(self.allowed.shares) or 1.0)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_CertifiedJudge":
        return _CertifiedJudge(executor, sampler, self)


class _CertifiedJudge(ExitJudge[Certified]):
    """Lets a token exit if its confidence reaches the policy's threshold. A confidence of NaN never does."""

    def begin(self, request: Request) -> None:
        """See ExitJudge. Raises: UsageError: if the request is not greedy."""
        check_sampling(request.params)

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        found, least = self.drafted(exit_layer, hidden, requests), self._policy.allowed.threshold
        return [each.token_id if each.token_id != NO_TOKEN and each.confidence >= least else None for each in found]
