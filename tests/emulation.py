"""Plans run on an emulated machine, for tests."""

from collections.abc import Callable, Sequence

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.runtime.devices.emulated import emulated_machine
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.execution import open_plan
from hetero_ee.runtime.executors.dummy import DummyExecutor, dummy_weights
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.opening import open_on_cpu
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_profile

LAPTOP = "rtx-4060-laptop-8gb"
Wrap = Callable[[Machine], Machine]  # puts faulty devices in place of the machine's own


def planned(spec: ModelSpec, hardware: str = LAPTOP, n_known: int = 64, **limits: object) -> Plan:
    """The plan of these limits on a shipped profile's machine."""
    return make_plan(spec, reference_profile(hardware), Limits(**limits), predict_at_tokens=n_known)  # type: ignore[arg-type]


def emulated(
    spec: ModelSpec,
    weights: ModelWeights,
    plan: Plan,
    hardware: str = LAPTOP,
    timeline: Timeline | None = None,
    wrap: Wrap = lambda machine: machine,
) -> PlannedExecutor:
    """The plan on its emulated machine, numbers by this CPU's kernels or, of fp32 weights, the reference."""

    def executor(layers: tuple[int, ...]) -> HostExecutor:
        return open_on_cpu(
            spec, weights, plan.context_tokens, 1, cache=host_cache(spec, plan.context_tokens, plan.kv_type, layers)
        )

    machine = emulated_machine(reference_profile(hardware), spec, plan, timeline or Timeline())
    return open_plan(spec, weights, plan, wrap(machine), executor)


def dummy(spec: ModelSpec, plan: Plan, profile: HardwareProfile, timeline: Timeline) -> PlannedExecutor:
    """The same without numbers."""

    machine = emulated_machine(profile, spec, plan, timeline)
    return open_plan(
        spec, dummy_weights(spec), plan, machine, lambda layers: DummyExecutor(spec, plan.context_tokens, layers)
    )


def prompt_of(executor: Executor, sequence: int, token_ids: Sequence[int]) -> list[Batch]:
    """The prompt in the chunks that this executor likes."""
    n = executor.prompt_chunk_tokens
    return [Batch.of_sequence(sequence, i, list(token_ids[i : i + n])) for i in range(0, len(token_ids), n)]
