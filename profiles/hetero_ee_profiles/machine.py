"""Describes this machine with all that must stay the same for measurements to be valid."""

from hetero_ee_profiles.gpu.inventory import gpu_inventory
from hetero_ee_profiles.hardware import Machine
from hetero_ee_profiles.host.cpu import cpu_info
from hetero_ee_profiles.host.host import Host
from hetero_ee_profiles.host.instruction_set import kernel_instruction_set
from hetero_ee_profiles.host.memory import memory_info


def this_machine(host: Host, versions: str) -> Machine:
    """Describe this machine, with its largest GPU. `versions` are those of the engine and of its compilers."""
    cpu = cpu_info(host)
    gpus = sorted(gpu_inventory(host).gpus, key=lambda gpu: gpu.total_bytes or 0)
    gpu = gpus[-1] if gpus else None
    return Machine(
        cpu_model=cpu.model,
        n_cores=cpu.n_usable,
        instruction_set=kernel_instruction_set(),
        ram_bytes=memory_info(host).usable_bytes,
        gpu_model=gpu.name if gpu else None,
        vram_bytes=(gpu.total_bytes or 0) if gpu else 0,
        driver=gpu.driver if gpu else None,
        versions=versions,
    )
