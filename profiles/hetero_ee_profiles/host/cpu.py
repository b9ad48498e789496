"""Describes the processor: its name, its cores of each kind, and how many of them this process may use."""

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_ee_profiles.host.cgroup import cgroup_limits
from hetero_ee_profiles.host.host import TIMEOUT_S, Host

CPUS = "/sys/devices/system/cpu"
ARM_MAKERS = {
    "0x41": "Arm",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
    "0x4e": "NVIDIA",
    "0x48": "HiSilicon",
}
REGISTRY_KEY = r"HKLM\HARDWARE\DESCRIPTION\System\CentralProcessor\0"
MAC_KEYS = (
    "machdep.cpu.brand_string",
    "machdep.cpu.leaf7_features",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel1.physicalcpu",
    "hw.optional.arm.FEAT_DotProd",
)


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The processor, and the share of it that this process may use."""

    model: str
    architecture: str
    n_physical: int  # cores
    n_logical: int  # hardware threads
    n_allowed: int  # cores that affinity lets this process use
    quota_cores: float | None  # CPU time a container grants, in cores; None without a limit
    n_performance: int  # performance cores; 0 if all cores are alike or it is unknown
    n_efficiency: int  # efficiency cores; 0 if all cores are alike or it is unknown
    features: frozenset[str]  # instructions as the system names them, in lower case; empty if unknown

    @property
    def n_usable(self) -> int:
        """Number of cores that this process can keep busy. Threads beyond a container's quota would be suspended."""
        return max(1, min(self.n_allowed, int(self.quota_cores or self.n_allowed)))


def cpu_info(host: Host) -> CpuInfo:
    """Describe the processor from /proc and /sys; on other systems from psutil and a system command."""
    if host.text("/proc/cpuinfo") is not None:
        return _linux(host)
    return _mac(host) if host.system == "darwin" else _other(host)


def cpu_set(text: str | None) -> frozenset[int]:
    """Parse a Linux list of CPUs such as 0-3,8. Invalid parts are skipped."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(last or first) < 2**16:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _linux(host: Host) -> CpuInfo:
    records = _records(host.text("/proc/cpuinfo") or "")
    listed = [int(record["processor"]) for record in records if record.get("processor", "").isdecimal()]
    online = cpu_set(host.text(f"{CPUS}/online")) or frozenset(listed) or frozenset(range(_n_logical(host)))
    cores = _cores(host, online, records)
    allowed = cpu_set(_status_field(host, "Cpus_allowed_list")) & online or online
    fast, slow = _kinds(host, online)
    first = records[0] if records else {}
    return CpuInfo(
        model=_model(host, records),
        architecture=host.architecture,
        n_physical=_count(cores, online),
        n_logical=len(online),
        n_allowed=_count(cores, allowed),
        quota_cores=cgroup_limits(host).cores,
        n_performance=_count(cores, fast) if slow else 0,
        n_efficiency=_count(cores, slow),
        features=frozenset((first.get("flags") or first.get("Features") or "").lower().split()),
    )


def _records(text: str) -> list[dict[str, str]]:
    """Return the blocks of /proc/cpuinfo as dicts. On Arm the last one describes the board."""
    found = []
    for block in text.split("\n\n"):
        fields = (line.partition(":") for line in block.splitlines())
        found.append({name.strip(): value.strip() for name, colon, value in fields if colon})
    return [record for record in found if record]


def _model(host: Host, records: list[dict[str, str]]) -> str:
    for field in ("model name", "cpu model", "Hardware", "Model"):
        for record in records:
            if name := record.get(field):
                return " ".join(name.split())
    board = (host.text("/sys/firmware/devicetree/base/model") or "").strip("\0 \n")
    first = records[0] if records else {}
    maker, part = first.get("CPU implementer"), first.get("CPU part")
    made = f"{ARM_MAKERS.get(maker, maker)} CPU, part {part}" if maker and part else ""
    return ", ".join(name for name in (board, made) if name) or "unknown"


def _cores(host: Host, online: Iterable[int], records: list[dict[str, str]]) -> dict[int, object]:
    """Map each CPU (hardware thread) to an object that stands for its physical core."""
    cores: dict[int, object] = {}
    for record in records:
        if record.get("processor", "").isdecimal() and "core id" in record:
            cores[int(record["processor"])] = (record.get("physical id"), record["core id"])
    return {
        cpu: cpu_set(host.text(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list")) or cores.get(cpu, cpu)
        for cpu in online
    }


def _count(cores: dict[int, object], cpus: Iterable[int]) -> int:
    return len({cores[cpu] for cpu in cpus if cpu in cores})


def _kinds(host: Host, online: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the fast and the slow CPUs. Linux lists them for Intel's hybrids, and gives Arm's CPUs a capacity."""
    fast = cpu_set(host.text("/sys/devices/cpu_core/cpus"))
    slow = cpu_set(host.text("/sys/devices/cpu_atom/cpus")) | cpu_set(host.text("/sys/devices/cpu_lowpower/cpus"))
    if fast and slow:
        return fast & online, slow & online
    texts = {cpu: (host.text(f"{CPUS}/cpu{cpu}/cpu_capacity") or "").strip() for cpu in online}
    capacities = {cpu: int(text) for cpu, text in texts.items() if text.isdecimal()}
    if len(set(capacities.values())) < 2:
        return frozenset(), frozenset()
    slow = frozenset(cpu for cpu, capacity in capacities.items() if capacity == min(capacities.values()))
    return online - slow, slow


def _status_field(host: Host, name: str) -> str:
    for line in (host.text("/proc/self/status") or "").splitlines():
        if line.startswith(name + ":"):
            return line.partition(":")[2]
    return ""


def _n_logical(host: Host) -> int:
    return host.core_counts().logical or 1


def _mac(host: Host) -> CpuInfo:
    lines = host.run(["sysctl", *MAC_KEYS], TIMEOUT_S).output.splitlines()
    found = {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    features = set(found.get("machdep.cpu.leaf7_features", "").lower().split())
    if found.get("hw.optional.arm.FEAT_DotProd") == "1":
        features.add("asimddp")
    fast, slow = (found.get(f"hw.perflevel{level}.physicalcpu", "") for level in (0, 1))
    kinds = (int(fast), int(slow)) if fast.isdecimal() and slow.isdecimal() else (0, 0)
    return _counted(host, found.get("machdep.cpu.brand_string") or "unknown", kinds, frozenset(features))


def _other(host: Host) -> CpuInfo:
    """Describe the processor on Windows and other systems without /proc."""
    answer = host.run(["reg", "query", REGISTRY_KEY, "/v", "ProcessorNameString"], TIMEOUT_S).output
    model = " ".join(answer.partition("REG_SZ")[2].split())
    return _counted(host, model or "unknown", (0, 0), frozenset())


def _counted(host: Host, model: str, kinds: tuple[int, int], features: frozenset[str]) -> CpuInfo:
    counts = host.core_counts()
    logical = counts.logical or 1
    physical = min(counts.physical or logical, logical)
    allowed = min(physical, counts.allowed or physical)
    return CpuInfo(model, host.architecture, physical, logical, allowed, None, *kinds, features)
