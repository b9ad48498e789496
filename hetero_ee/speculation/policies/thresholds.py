"""Policies that compare the confidence of an exit's predictor or gate with one threshold: certified and joint gate.

Source of the joint gate: JEI-DNN (arXiv 2310.09163, section 3). A token exits at the first exit layer whose gate opens.
The gates were fitted together with one loss; calibration/predictor_fitting.py lists the differences from the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import UsageError
from hetero_ee.runtime.drafted import NO_TOKEN, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import CertifiedExit, check_sampling
from hetero_ee.speculation.exits.predictor import ExitConfidence
from hetero_ee.speculation.policies.policy import ExitJudge, require_number


@dataclass(frozen=True, slots=True, eq=False)
class Certified:
    """The certified policy: `ends` by exit layer, and the certified threshold at which tokens may exit."""

    ends: Mapping[int, DraftEnd]
    allowed: CertifiedExit

    @property
    def threshold(self) -> float:
        return self.allowed.threshold

    @property
    def most_different(self) -> float:
        """Largest share of exits that may differ from the full model's choice: the risk by the share of tokens that
        exit."""
        return self.allowed.risk / (sum(self.allowed.shares) or 1.0)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_GreedyJudge":
        return _GreedyJudge(executor, sampler, self)


@dataclass(frozen=True, slots=True, eq=False)
class JointGatePolicy:
    """The joint-gate policy: `ends` by exit layer, each judged by its gate.

    Raises: UsageError: if the threshold is out of range.
    """

    ends: Mapping[int, DraftEnd]
    threshold: float = 0.5  # from which on a gate is open

    def __post_init__(self) -> None:
        require_number("threshold", self.threshold, 0, 1)

    def judging(self, executor: Executor, sampler: DraftSampler) -> "_ThresholdJudge":
        return _ThresholdJudge(executor, sampler, self)


class _ThresholdJudge(ExitJudge[Certified | JointGatePolicy]):
    """Lets a token exit if its confidence reaches the policy's threshold. A confidence of NaN never does."""

    def judge(self, exit_layer: int, hidden: Tensor, requests: Sequence[Request]) -> list[int | None]:
        found, least = self.drafted(exit_layer, hidden, requests), self._policy.threshold
        return [each.token_id if each.token_id != NO_TOKEN and each.confidence >= least else None for each in found]


class _GreedyJudge(_ThresholdJudge):
    def begin(self, request: Request) -> None:
        """See ExitJudge. Raises: UsageError: if the request is not greedy."""
        check_sampling(request.params)


def joint_gate(calibration: Calibration, ends: Mapping[int, DraftEnd]) -> JointGatePolicy:
    """Return the joint-gate policy with its default threshold. Raises: UsageError: if the calibration has no gates."""
    return JointGatePolicy({exit_layer: _gated(calibration, exit_layer, end) for exit_layer, end in ends.items()})


def _gated(calibration: Calibration, exit_layer: int, end: DraftEnd) -> DraftEnd:
    gate = calibration.at(exit_layer).gate
    if gate is None:
        raise UsageError(
            f"the calibration has no joint gate at exit layer {exit_layer}; run hetero-ee calibrate --force for gates "
            "at the exit layers of its schedule."
        )
    compiled = isinstance(end.judge, ExitConfidence) and end.judge.is_compiled
    return replace(end, judge=ExitConfidence(gate, compiled=compiled))
