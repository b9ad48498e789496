"""Machines as their files and commands described them, for what reads facts about a machine."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from hetero_ee_profiles.host.host import Answer, CoreCounts, Host, MemoryCounts
from hetero_ee_profiles.units import GIB

MEMINFO = """MemTotal:       32768000 kB
MemFree:         1000000 kB
MemAvailable:   20480000 kB
SwapTotal:       2097152 kB
SwapFree:        1048576 kB
HugePages_Total:       0
"""
OS_RELEASE = 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n'


def recorded(
    files: Mapping[str, str] | None = None,
    commands: Mapping[str, Answer] | None = None,
    *,
    system: str = "linux",
    architecture: str = "x86_64",
    release: str = "6.8.0-40-generic",
    libc: str = "glibc 2.39",
    cores: CoreCounts | None = None,
    memory: MemoryCounts | None = None,
) -> Host:
    """A host with these files and no others, and these commands by their first word."""
    files, commands = files or {}, commands or {}

    def names(folder: str) -> list[str]:
        depth = len(PurePosixPath(folder).parts)
        inside = [PurePosixPath(file).parts for file in files if file.startswith(folder.rstrip("/") + "/")]
        return sorted({parts[depth] for parts in inside})

    def run(command: Sequence[str], timeout_s: float) -> Answer:
        return commands.get(command[0], Answer(problem="not found"))

    return Host(
        system=system,
        architecture=architecture,
        release=release,
        libc=libc,
        text=files.get,
        names=names,
        run=run,
        core_counts=lambda: cores or CoreCounts(None, None, None),
        memory_counts=lambda: memory or MemoryCounts(16 * GIB, 8 * GIB, 0),
    )


def x86_files(model: str, n_cpus: int, flags: str, siblings: Mapping[int, str], allowed: str = "") -> dict[str, str]:
    """/proc and /sys of a machine with n_cpus hardware threads; siblings: each thread's core, as a list of threads."""
    files = {
        "/proc/cpuinfo": "\n\n".join(
            f"processor\t: {cpu}\nmodel name\t: {model}\nflags\t\t: {flags}" for cpu in range(n_cpus)
        ),
        "/proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{allowed or f'0-{n_cpus - 1}'}\n",
        "/proc/meminfo": MEMINFO,
        "/etc/os-release": OS_RELEASE,
        "/sys/devices/system/cpu/online": f"0-{n_cpus - 1}\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    return files | {
        f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in siblings.items()
    }


def ryzen(allowed: str = "") -> dict[str, str]:
    """8 cores with two threads each, numbered as AMD does on Linux: 0 and 8 are one core."""
    siblings = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    flags = "fpu sse2 avx avx2 fma f16c avx512f avx512bw avx512_vnni"
    return x86_files("AMD Ryzen 7 7840HS w/ Radeon 780M Graphics", 16, flags, siblings, allowed)


def intel_hybrid() -> dict[str, str]:
    """2 performance cores with two threads each, 4 efficiency cores."""
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}
    files = x86_files("13th Gen Intel(R) Core(TM) i5-1335U", 8, "avx2 fma f16c avx_vnni", siblings)
    return files | {"/sys/devices/cpu_core/cpus": "0-3\n", "/sys/devices/cpu_atom/cpus": "4-7\n"}


def arm_board() -> dict[str, str]:
    """4 large and 4 small cores, without a model name in /proc/cpuinfo."""
    block = "processor\t: {}\nFeatures\t: fp asimd aes crc32 asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b"
    capacities = {
        f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity": "414\n" if cpu < 4 else "1024\n" for cpu in range(8)
    }
    return capacities | {
        "/proc/cpuinfo": "\n\n".join(block.format(cpu) for cpu in range(8)),
        "/proc/meminfo": MEMINFO,
        "/sys/devices/system/cpu/online": "0-7",
        "/sys/firmware/devicetree/base/model": "Radxa ROCK 5B\0",
    }


def in_cgroup_2(files: Mapping[str, str], cpu_max: str, memory_max: str) -> dict[str, str]:
    """In a container: the group's own folder says nothing, the root of what is mounted limits."""
    root = {"/sys/fs/cgroup/cpu.max": cpu_max, "/sys/fs/cgroup/memory.max": memory_max}
    return {**files, "/proc/self/cgroup": "0::/\n", "/.dockerenv": "", **root}


def in_cgroup_1(files: Mapping[str, str], quota_us: str, memory_limit: str) -> dict[str, str]:
    """The same in version 1, where the path is the host's and only the root is mounted."""
    lines = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
    root = {
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota_us,
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": memory_limit,
    }
    return {**files, "/proc/self/cgroup": lines, **root}
