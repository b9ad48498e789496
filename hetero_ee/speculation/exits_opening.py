"""Opens the exits of a plan in an early-exit mode."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hetero_ee.errors import UsageError
from hetero_ee.models.blocks import has_trees
from hetero_ee.options.engine import BOTH, EARLY_EXIT_MODES, UNQUANTIZED
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.early_exits import early_step
from hetero_ee.planning.times.prediction import step_times
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.opening import Opened
from hetero_ee.speculation.audit import ExitAudit
from hetero_ee.speculation.early_exit import EarlyExits
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.certificate import WAY_OUT, Certificate
from hetero_ee.speculation.exits.features import N_CANDIDATES
from hetero_ee.speculation.opening import DraftKnowledge, sequence_rule
from hetero_ee.speculation.policies.calm import CalmPolicy
from hetero_ee.speculation.policies.certified import Certified
from hetero_ee.speculation.policies.draft_candidates import DraftCandidates
from hetero_ee.speculation.policies.exit_head import exit_end
from hetero_ee.speculation.policies.policy import ExitPolicy
from hetero_ee.speculation.policies.skipdecode import SkipDecodePolicy
from hetero_ee.speculation.policies.specee import SpecEE
from hetero_ee.speculation.sources.beside import Running
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.draft_model import DraftModelSource
from hetero_ee.speculation.sources.draft_model_opening import DraftModelOpener
from hetero_ee.speculation.sources.source import DraftSource
from hetero_ee.speculation.speed_switch import SpeculationSwitch


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """The model and plan that an exit policy is made for. If compiled, the model runs on kernels."""

    calibration: Calibration
    plan: Plan
    compiled: bool
    candidates: DraftCandidates | None = None
    certificate: Certificate | None = None
    activation_terms: int = 1  # see ModelSpec
    scheduling: str = BOTH  # of mode specee, one of SCHEDULES

    @property
    def schedule(self) -> tuple[int, ...]:
        """Exit layers that judge every token, from the plan or calibration. Raises: UsageError: if there are none."""
        found = self.plan.exit_layers or self.calibration.schedule_of(is_drafted=self.candidates is not None)
        if not found:  # a file of an earlier version
            raise UsageError(
                f"this calibration names no exit layers for mode {self.plan.mode}; make it again with hetero-ee "
                "calibrate --force."
            )
        return found

    def ends(self, exit_layers: Iterable[int]) -> Mapping[int, DraftEnd]:
        """Return, for each of these exit layers, the end that chooses a token from a hidden state."""
        return {each: exit_end(self.calibration.at(each), compiled=self.compiled) for each in sorted(exit_layers)}


def open_exits(knowledge: DraftKnowledge, opened: Opened, warn: Callable[[str], None]) -> EarlyExits | None:
    """Return the exits of the plan, or None if the plan's mode is not an early-exit mode.

    A mode that is expected to be slower than full mode is opened with a warning.

    Raises: UsageError: if the policy lacks something, such as a calibration.
    """
    plan, calibration = opened.plan, knowledge.calibration
    if plan.mode not in EARLY_EXIT_MODES:
        return None
    if calibration is None:
        raise UsageError(f"mode {plan.mode} needs a model whose exits were measured; run hetero-ee calibrate.")
    opens = plan.mode == "specee"
    candidates = open_candidates(knowledge, opened.executor, warn, opened.running) if opens else None
    if candidates is not None and knowledge.is_asked and not calibration.suits(candidates.title):
        warn(f"The exits were calibrated without {candidates.title}; calibrate with it for exits that suit it.")
    compiled = opened.executor.weights.quantizer != UNQUANTIZED
    known = calibration, plan, compiled, candidates, knowledge.certificate, opened.executor.spec.activation_terms
    scheduling = None if opened.request is None else opened.request.limits.exit_schedule
    policy = POLICIES[plan.mode](PolicyRequest(*known, scheduling or BOTH))
    _warn_if_slower(opened, calibration, warn)
    audit = ExitAudit(policy.most_different) if isinstance(policy, Certified) else None
    width = 1 if candidates is None or not has_trees(opened.executor.spec) else min(plan.tree_width, N_CANDIDATES)
    profile = None if opened.request is None else opened.request.profile
    rule = sequence_rule(opened, profile) if width > 1 else None
    switch = None if opened.is_emulated else SpeculationSwitch()
    return EarlyExits(policy, plan.draft_length - 1, candidates, audit, warn, width, rule, switch)


def open_candidates(
    knowledge: DraftKnowledge, executor: Executor, warn: Callable[[str], None], running: Running | None = None
) -> DraftCandidates | None:
    """Return candidates from the draft model or the draft head, None if there is neither.

    Args:
        running: See BesideOpener.
    """
    source: DraftSource
    if knowledge.draft_model is not None:
        opener = DraftModelOpener(knowledge.draft_model, executor, running, warn)
        opener.open()
        source = DraftModelSource(opener, warn)
    elif knowledge.draft_head is not None:
        source = open_draft_head(knowledge.draft_head, executor, running, warn)
    else:
        return None
    return DraftCandidates(source, warn, knowledge.title)


def _warn_if_slower(opened: Opened, calibration: Calibration, warn: Callable[[str], None]) -> None:
    """Warn with the predicted speeds if the plan's mode is slower than full mode.

    For modes whose depths are unknown, tokens are assumed to exit where mode specee's do.
    """
    plan, request = opened.plan, opened.request
    rate, full = plan.prediction.generated_tokens_per_s, plan.prediction.other_mode_tokens_per_s
    assumed, assumption = calibration.depths_at_schedule(plan.mode), ""
    if request is None or request.profile is None or full is None:
        return
    if request.statistics.depths_of(plan) is None and plan.mode != "skipdecode" and assumed is not None:
        spec, n_tokens = opened.executor.spec, plan.prediction.context_tokens
        step = early_step(step_times(spec, request.profile, plan, n_tokens), assumed, plan.draft_length)
        rate, assumption = 1 / step.seconds_per_token, " if its tokens exit as in mode specee"
    if rate < full:
        warn(
            f"Mode {plan.mode} is expected to reach {rate:.1f} tokens/s{assumption}, less than the {full:.1f} of full "
            "mode, since few tokens exit for what judging them costs."
        )


def _certified(request: PolicyRequest) -> ExitPolicy:
    """Return the certified policy. Raises: UsageError: if there is no certificate, or it does not allow the plan."""
    plan, certificate = request.plan, request.certificate
    if certificate is None:
        raise UsageError(f"mode certified needs a certificate of this model's exits; {WAY_OUT}.")
    certificate.require_kv_type(plan.kv_type)
    certificate.require_activations(request.activation_terms)
    assert plan.risk is not None, "a plan of this mode has a risk"
    if not plan.exit_layers:
        raise UsageError(
            f"at risk {plan.risk:g} the certificate lets no token exit; raise the risk, or choose another mode."
        )
    return Certified(request.ends(plan.exit_layers), certificate.certified_exit(plan.exit_layers, plan.risk))


def _specee(request: PolicyRequest) -> ExitPolicy:
    named, scheduling = request.schedule, request.scheduling
    return SpecEE.of(request.calibration, request.candidates, named, scheduling, compiled=request.compiled)


def _skipdecode(request: PolicyRequest) -> ExitPolicy:
    """Return the SkipDecode policy. Since it does not judge tokens, any layer can be an exit layer."""
    return SkipDecodePolicy(request.ends(request.plan.exit_layers or range(1, request.calibration.n_layers)))


# Every policy there is; a new one takes a line here, and its name in planning/limits.py.
POLICIES: Mapping[str, Callable[[PolicyRequest], ExitPolicy]] = {
    "specee": _specee,
    "certified": _certified,
    "calm": lambda request: CalmPolicy(request.ends(request.schedule)),
    "skipdecode": _skipdecode,
}
