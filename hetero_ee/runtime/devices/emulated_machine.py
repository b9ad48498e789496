"""A machine that is not there: a plan run with real numbers on this CPU, and the time it would have taken."""

from collections.abc import Callable, Sequence

from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.device import CPU, GPU, Link
from hetero_ee.runtime.devices.emulated import EmulatedDevice, EmulatedLink
from hetero_ee.runtime.devices.machine import CpuCopier, EmulatedMover, Machine
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.streaming.block_source import MappedBlocks
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee_profiles.hardware import HardwareProfile


def emulated_machine(profile: HardwareProfile, spec: ModelSpec, plan: Plan, timeline: Timeline) -> Machine:
    """The profile's machine with the plan's budgets and threads, going on where the time line is."""
    cpu = EmulatedDevice(CPU, timeline, profile, spec, plan.ram_budget_bytes, plan.threads)
    if profile.gpu is None or not plan.n_bytes(GPU):
        return Machine(cpu, None, None, CpuCopier())
    gpu = EmulatedDevice(GPU, timeline, profile, spec, plan.vram_budget_bytes)
    link = EmulatedLink(timeline, profile)

    return Machine(cpu, gpu, link, EmulatedMover(), make_source)


def make_source(
    blocks: Sequence[Block], weights: ModelWeights, more_bytes: Callable[[int], int], link: Link
) -> MappedBlocks:
    """See MakeSource."""
    return MappedBlocks(blocks, weights, link, more_bytes)
