"""Joint gate: a token exits at the first exit layer whose gate opens; the gates were fitted together, by one loss.

Source: JEI-DNN (arXiv 2310.09163, section 3); see calibration/gate_fitting.py for what is theirs and what is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero_ee.errors import UsageError
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.drafts import DraftSampler
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.predictor import ExitConfidence
from hetero_ee.speculation.policies.head_judge import ThresholdJudge, require_number


@dataclass(frozen=True, slots=True, eq=False)
class JointGatePolicy:
    """The joint-gate policy. ends: by exit layer; each one's judge is its gate.

    Raises:
        UsageError: if the threshold is out of range.
    """

    ends: Mapping[int, DraftEnd]
    threshold: float = 0.5  # from which on a gate is open

    def __post_init__(self) -> None:
        require_number("threshold", self.threshold, 0, 1)

    def judging(self, executor: Executor, sampler: DraftSampler) -> ThresholdJudge:
        """See ExitPolicy."""
        return ThresholdJudge(executor, sampler, self.ends, self.threshold)


def joint_gate(calibration: Calibration, ends: Mapping[int, DraftEnd]) -> JointGatePolicy:
    """Return the policy with its default threshold.

    Raises:
        UsageError: if the calibration has no gates.
    """
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
