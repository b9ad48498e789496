"""Checks the machine: system, processor, memory, GPU, clock."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hetero_ee_cli.checks.finding import Finding, fail, gib, ok, warn
from hetero_ee_profiles.gpu.inventory import GpuInfo, gpu_inventory
from hetero_ee_profiles.host.cpu import cpu_info
from hetero_ee_profiles.host.host import Host
from hetero_ee_profiles.host.instruction_set import GENERIC, kernel_instruction_set, rank, system_instruction_set
from hetero_ee_profiles.host.memory import memory_info
from hetero_ee_profiles.host.system import system_info
from hetero_ee_profiles.host.torch_build import TorchBuild

LOW_MEMORY_BYTES = 2**30
NUMBA_VARIABLES = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")
INSTALL_TORCH = "Install the torch build that the selector on pytorch.org gives for this GPU."


def operating_system(host: Host) -> Finding:
    system = system_info(host)
    inside = [name for name, is_there in (("WSL", system.is_wsl), ("container", system.is_container)) if is_there]
    parts = [system.distribution or system.name, f"kernel {system.release}", system.libc, *inside]
    text = ", ".join(part for part in parts if part)
    if system.name != "Linux":
        return warn(text, "Only Linux is tested, WSL included.")
    if not system.libc.startswith("glibc"):
        return warn(f"{text}, no glibc", "torch is built for glibc; use a distribution with glibc.")
    return ok(text)


def processor(host: Host) -> Finding:
    cpu = cpu_info(host)
    threads = f" with {cpu.n_logical} hardware threads" if cpu.n_logical != cpu.n_physical else ""
    cores = f"{cpu.n_physical} {'core' if cpu.n_physical == 1 else 'cores'}"
    parts = [cpu.model, f"{cores}{threads} ({cpu.architecture})"]
    if cpu.n_efficiency:
        parts.append(f"{cpu.n_performance} performance and {cpu.n_efficiency} efficiency cores")
    if cpu.quota_cores is not None:
        parts.append(f"container limit of {cpu.quota_cores:g} cores")
    parts.append(f"{cpu.n_usable} usable")
    return ok(", ".join(parts))


def instructions(
    host: Host, environment: Mapping[str, str], compiled_for: Callable[[], str] = kernel_instruction_set
) -> Finding:
    """Report the processor's instruction set for which the kernels are compiled."""
    has = system_instruction_set(cpu_info(host).features)
    try:
        uses = compiled_for()
    except Exception as error:
        return fail(f"Numba can't be used ({type(error).__name__}: {error})", "Reinstall hetero-ee.")
    if rank(uses) < rank(has):
        limits = ", ".join(name for name in NUMBA_VARIABLES if environment.get(name) is not None)
        advice = f"Unset {limits}." if limits else "Update numba and llvmlite."
        return warn(f"the kernels use {uses} code, but the processor has {has}", advice)
    if uses == GENERIC:
        return warn("the kernels use generic code", "With AVX2 or Arm's dot product, it would be many times faster.")
    return ok(f"the kernels use {uses}")


def memory(host: Host) -> Finding:
    found = memory_info(host)
    swap = f"swap {gib(found.swap_total_bytes)}" if found.swap_total_bytes else "no swap"
    parts = [f"{gib(found.total_bytes)}, {gib(found.available_bytes)} available", swap]
    if found.usable_bytes < found.total_bytes:
        parts.append(f"container limit of {gib(found.usable_bytes)}")
    text = ", ".join(parts)
    if min(found.available_bytes, found.usable_bytes) < LOW_MEMORY_BYTES:
        return warn(text, "Close other programs: models with a few billion weights need several GiB.")
    return ok(text)


def huge_pages(host: Host) -> Finding:
    mode = memory_info(host).huge_pages
    return ok(f"transparent huge pages: {mode}" if mode else "no transparent huge pages")


def gpu(host: Host, torch: Callable[[], TorchBuild]) -> Finding:
    """Report the GPUs that the drivers list, and the GPUs that torch can use."""
    inventory, build = gpu_inventory(host), torch()
    known_driver = next((found.driver for found in inventory.gpus if found.driver), None)
    if build.gpus:
        driver = f", driver {known_driver}" if known_driver else ""
        shown = [
            f"{seen.name}, {gib(seen.total_bytes)} ({gib(seen.free_bytes)} free), "
            f"compute capability {seen.compute_capability}{driver}"
            for seen in build.gpus
        ]
        return ok("; ".join(shown))
    problems = "".join(f"; {problem}" for problem in inventory.problems)
    if not inventory.gpus:
        if inventory.problems:
            return warn(problems.removeprefix("; "), "Check the GPU's driver, or use the CPU alone.")
        return ok("none found; everything runs on the CPU")
    text = "; ".join(_listed(found) for found in inventory.gpus) + problems
    if not known_driver:
        return warn(f"{text}, without a driver", "Install the GPU's driver, then run doctor again.")
    built_for = {"NVIDIA": build.cuda, "AMD": build.hip}
    if not any(built_for.get(found.vendor) for found in inventory.gpus):
        return warn(f"{text}; torch is built for {build.platform}", INSTALL_TORCH)
    reason = f" ({build.problem})" if build.problem else ""
    return warn(f"{text}; torch for {build.platform} can't use it{reason}", f"Update the driver. {INSTALL_TORCH}")


def _listed(found: GpuInfo) -> str:
    parts = [found.name]
    if found.total_bytes is not None:
        free = f" ({gib(found.free_bytes)} free)" if found.free_bytes is not None else ""
        parts.append(gib(found.total_bytes) + free)
    if found.compute_capability:
        parts.append(f"compute capability {found.compute_capability}")
    if found.driver:
        parts.append(f"driver {found.driver}")
    return ", ".join(parts)


def clock(now_s: float, installed: Path) -> Finding:
    """Check the clock. If it is behind, downloads fail because certificates seem not yet valid."""
    text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s))
    if now_s < installed.stat().st_mtime - 24 * 3600:
        return warn(f"{text}, before hetero_ee was installed", "Set the clock: downloads fail while it is wrong.")
    return ok(text)
