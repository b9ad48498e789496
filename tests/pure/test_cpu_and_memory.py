"""Processor, memory and system as recorded machines describe them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee_profiles.host.cgroup import CgroupLimits, cgroup_limits
from hetero_ee_profiles.host.cpu import CpuInfo, cpu_info, cpu_set
from hetero_ee_profiles.host.host import Answer, CoreCounts, Host, MemoryCounts
from hetero_ee_profiles.host.instruction_set import system_instruction_set
from hetero_ee_profiles.host.memory import MemoryInfo, memory_info
from hetero_ee_profiles.host.system import SystemInfo, system_info
from tests.recorded_hosts import GIB, arm_board, in_cgroup_1, in_cgroup_2, intel_hybrid, recorded, ryzen

MAC = """machdep.cpu.brand_string: Apple M2
hw.perflevel0.physicalcpu: 4
hw.perflevel1.physicalcpu: 4
hw.optional.arm.FEAT_DotProd: 1
"""
REG = "\r\nHKEY_LOCAL_MACHINE\\HARDWARE\r\n    ProcessorNameString    REG_SZ    Intel(R) Core(TM) i7-8750H CPU\r\n\r\n"
UNLIMITED_1 = "9223372036854771712\n"
HOSTS: dict[str, tuple[Host, tuple[object, ...], str]] = {
    # name: host, (model, physical, logical, allowed, quota, performance, efficiency, usable), instruction set
    "AMD": (
        recorded(ryzen()),
        ("AMD Ryzen 7 7840HS w/ Radeon 780M Graphics", 8, 16, 8, None, 0, 0, 8),
        "AVX-512 VNNI",
    ),
    "AMD bound to 3 threads of 2 cores": (
        recorded(ryzen(allowed="0,7-8")),
        ("AMD Ryzen 7 7840HS w/ Radeon 780M Graphics", 8, 16, 2, None, 0, 0, 2),
        "AVX-512 VNNI",
    ),
    "Intel hybrid": (
        recorded(intel_hybrid()),
        ("13th Gen Intel(R) Core(TM) i5-1335U", 6, 8, 6, None, 2, 4, 6),
        "AVX-VNNI",
    ),
    "Arm board": (
        recorded(arm_board(), architecture="aarch64"),
        ("Radxa ROCK 5B, Arm CPU, part 0xd0b", 8, 8, 8, None, 4, 4, 8),
        "NEON dot product",
    ),
    "container with a quota": (
        recorded(in_cgroup_2(ryzen(), "250000 100000\n", "max\n")),
        ("AMD Ryzen 7 7840HS w/ Radeon 780M Graphics", 8, 16, 8, 2.5, 0, 0, 2),
        "AVX-512 VNNI",
    ),
    "container with half a core, version 1": (
        recorded(in_cgroup_1(ryzen(), "50000\n", UNLIMITED_1)),
        ("AMD Ryzen 7 7840HS w/ Radeon 780M Graphics", 8, 16, 8, 0.5, 0, 0, 1),
        "AVX-512 VNNI",
    ),
    "macOS": (
        recorded(
            {},
            {"sysctl": Answer(MAC, "exit code 1")},  # what one key more or less costs
            system="darwin",
            architecture="arm64",
            cores=CoreCounts(8, 8, None),
        ),
        ("Apple M2", 8, 8, 8, None, 4, 4, 8),
        "NEON dot product",
    ),
    "Windows": (
        recorded({}, {"reg": Answer(REG)}, system="win32", architecture="AMD64", cores=CoreCounts(6, 12, 12)),
        ("Intel(R) Core(TM) i7-8750H CPU", 6, 12, 6, None, 0, 0, 6),
        "generic",
    ),
    "nothing known": (recorded(system="freebsd14"), ("unknown", 1, 1, 1, None, 0, 0, 1), "generic"),
    "an empty /proc/cpuinfo": (recorded({"/proc/cpuinfo": ""}), ("unknown", 1, 1, 1, None, 0, 0, 1), "generic"),
}


def numbers(cpu: CpuInfo) -> tuple[object, ...]:
    kinds = cpu.n_performance, cpu.n_efficiency
    return cpu.model, cpu.n_physical, cpu.n_logical, cpu.n_allowed, cpu.quota_cores, *kinds, cpu.n_usable


@pytest.mark.parametrize("name", HOSTS)
def test_processors(name: str) -> None:
    host, expected, instructions = HOSTS[name]
    cpu = cpu_info(host)
    assert numbers(cpu) == expected
    assert system_instruction_set(cpu.features) == instructions


def test_cores_by_their_ids_where_sys_is_not_mounted() -> None:
    block = "processor\t: {}\nmodel name\t: A\nphysical id\t: 0\ncore id\t\t: {}\n"
    host = recorded({"/proc/cpuinfo": "\n".join(block.format(cpu, cpu // 2) for cpu in range(4))})
    assert numbers(cpu_info(host))[1:4] == (2, 4, 2)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,5\n", {0, 1, 2, 5}), ("", set()), (None, set()), ("3", {3}), ("x", set()), ("1-", {1}), ("5-3", set())],
)
def test_lists_of_cpus(text: str | None, cpus: set[int]) -> None:
    assert cpu_set(text) == cpus


V2 = {"/proc/self/cgroup": "0::/user.slice/app.service\n"}
FOLDER = "/sys/fs/cgroup/user.slice"
CGROUPS: dict[str, tuple[dict[str, str], CgroupLimits]] = {
    "none": ({}, CgroupLimits(None, None)),
    "no limits": (
        {**V2, f"{FOLDER}/cpu.max": "max 100000\n", f"{FOLDER}/memory.max": "max\n"},
        CgroupLimits(None, None),
    ),
    "the group's own": ({**V2, f"{FOLDER}/app.service/memory.max": "1048576\n"}, CgroupLimits(None, 2**20, 2**20)),
    "the least of those around it": (
        {
            **V2,
            f"{FOLDER}/app.service/cpu.max": "400000 100000\n",
            f"{FOLDER}/cpu.max": "150000 100000\n",
            f"{FOLDER}/app.service/memory.max": "8589934592\n",
            "/sys/fs/cgroup/memory.max": "4294967296\n",
        },
        CgroupLimits(1.5, 4 * GIB, 4 * GIB),
    ),
    "a path outside of what is mounted": (
        {"/proc/self/cgroup": "0::/../../x\n", "/sys/fs/cgroup/x/cpu.max": "100000 50000"},
        CgroupLimits(2.0, None),
    ),
    "both versions": (
        {"/proc/self/cgroup": "3:memory:/\n0::/\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n"},
        CgroupLimits(None, GIB, GIB),
    ),
    "what is in use": (
        {
            **V2,
            f"{FOLDER}/memory.max": "1000000000\n",
            f"{FOLDER}/memory.current": "700000000\n",
            f"{FOLDER}/memory.stat": "anon 400000000\nfile 300000000\ninactive_file 100000000\nactive_file 150000000\n",
            "/sys/fs/cgroup/memory.max": "1200000000\n",
            "/sys/fs/cgroup/memory.current": "1100000000\n",
        },
        CgroupLimits(None, 10**9, 10**8),
    ),
    "what is in use in version 1, subgroups included": (
        {
            "/proc/self/cgroup": "3:memory:/\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000000\n",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": "900000000\n",
            "/sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 200000000\nactive_file 7\n",
        },
        CgroupLimits(None, 10**9, 3 * 10**8 + 7),
    ),
    "more in use than is allowed": (
        {**V2, f"{FOLDER}/memory.max": "1000\n", f"{FOLDER}/memory.current": "2000\n"},
        CgroupLimits(None, 1000, 0),
    ),
    "nonsense": (
        {"/proc/self/cgroup": "\n::\nx\n0::/\n", "/sys/fs/cgroup/cpu.max": "a b", "/sys/fs/cgroup/memory.max": "-1"},
        CgroupLimits(None, None),
    ),
    "a period of zero": ({**V2, "/sys/fs/cgroup/cpu.max": "100 0"}, CgroupLimits(None, None)),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_limits_of_control_groups(name: str) -> None:
    files, limits = CGROUPS[name]
    assert cgroup_limits(recorded(files)) == limits


def test_memory() -> None:
    kib = 1024
    swap = 2097152 * kib
    total, available = 32768000 * kib, 20480000 * kib
    free = memory_info(recorded(ryzen()))
    assert free == MemoryInfo(total, available, swap, None, "madvise")
    assert free.usable_bytes == total
    limited = memory_info(recorded(in_cgroup_2(ryzen(), "max 100000", str(2 * GIB))))
    assert (limited.limit_bytes, limited.usable_bytes, limited.available_bytes) == (2 * GIB, 2 * GIB, 2 * GIB)
    assert memory_info(recorded(in_cgroup_1(ryzen(), "-1\n", UNLIMITED_1))).limit_bytes is None


def test_memory_without_proc_is_psutils() -> None:
    counts = MemoryCounts(8 * GIB, 3 * GIB, GIB)
    assert memory_info(recorded(memory=counts)) == MemoryInfo(8 * GIB, 3 * GIB, GIB, None, None)
    cut_off = recorded({"/proc/meminfo": "MemTotal: 1 kB\nMemAvail"}, memory=counts)
    assert memory_info(cut_off).total_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (recorded(ryzen()), ("Linux", "Ubuntu 24.04.1 LTS", False, False)),
        (recorded(release="5.15.153.1-microsoft-standard-WSL2"), ("Linux", "", True, False)),
        (recorded(in_cgroup_2(ryzen(), "", "")), ("Linux", "Ubuntu 24.04.1 LTS", False, True)),
        (recorded(system="win32", release="10"), ("Windows", "", False, False)),
        (recorded(system="sunos5"), ("sunos5", "", False, False)),
    ],
)
def test_systems(host: Host, expected: tuple[object, ...]) -> None:
    name, distribution, is_wsl, is_container = expected
    assert system_info(host) == SystemInfo(
        str(name), str(distribution), host.release, host.libc, bool(is_wsl), bool(is_container)
    )


PLACES = [*ryzen(), "/proc/self/cgroup", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max"]
TEXTS = st.text(max_size=40) | st.from_regex(r"[0-9a-z: ,\-\n]{0,40}", fullmatch=True)


@given(st.dictionaries(st.sampled_from(PLACES), TEXTS, max_size=6))
def test_no_contents_of_these_files_raise(spoiled: dict[str, str]) -> None:
    host = recorded({**ryzen(), **spoiled})
    cpu, memory = cpu_info(host), memory_info(host)
    assert 1 <= cpu.n_usable <= cpu.n_allowed <= cpu.n_physical <= cpu.n_logical
    assert memory.usable_bytes <= memory.total_bytes
