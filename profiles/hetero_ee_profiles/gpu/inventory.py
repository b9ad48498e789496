"""Lists GPUs from drivers and the PCI bus, without torch, which may be unable to use them."""

from collections.abc import Iterator
from dataclasses import dataclass

from hetero_ee_profiles.host.host import TIMEOUT_S, Answer, Host

NVIDIA, AMD = "NVIDIA", "AMD"
PCI = "/sys/bus/pci/devices"
PCI_VENDORS = {"0x10de": NVIDIA, "0x1002": AMD}
SMI_PLACES = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
SMI_FIELDS = ("name", "memory.total", "memory.free", "driver_version", "uuid")
COMPUTE_CAPABILITY = "compute_cap"  # drivers before 2021 reject a query with this field


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU. Fields are None if unknown, as most are without a driver."""

    vendor: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: str | None = None  # such as 8.9, only for NVIDIA
    driver: str | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """GPUs that were found, and problems while searching for them."""

    gpus: tuple[GpuInfo, ...]
    problems: tuple[str, ...]

    @property
    def kind(self) -> str | None:
        """Kind of platform: "rocm" if all GPUs are AMD's, else "cuda"; None without GPUs."""
        if not self.gpus:
            return None
        return "rocm" if all(gpu.vendor == AMD for gpu in self.gpus) else "cuda"


def gpu_inventory(host: Host) -> GpuInventory:
    """Find NVIDIA GPUs by nvidia-smi or driver files, AMD GPUs by driver files, and others on the PCI bus."""
    nvidia, problem = _nvidia_smi(host)
    gpus = nvidia or list(_nvidia_files(host))
    gpus += _amd(host)
    known = {gpu.vendor for gpu in gpus}
    gpus += [gpu for gpu in _pci(host) if gpu.vendor not in known]
    return GpuInventory(tuple(gpus), (problem,) if problem else ())


def _nvidia_smi(host: Host) -> tuple[list[GpuInfo], str]:
    """Return the GPUs that nvidia-smi lists, and a problem or "". A missing nvidia-smi is not a problem."""
    for program in SMI_PLACES:
        answer = _queried(host, program, (*SMI_FIELDS, COMPUTE_CAPABILITY))
        if answer.problem.startswith("exit code"):
            answer = _queried(host, program, SMI_FIELDS)
        if answer.problem == "not found":
            continue
        if answer.problem:
            said = answer.output.strip().partition("\n")[0][:200]
            return [], f"nvidia-smi: {answer.problem}{': ' if said else ''}{said}"
        lines = answer.output.splitlines()
        gpus = [gpu for line in lines if (gpu := _gpu_of_line(line)) is not None]
        return gpus, "" if gpus or not answer.output.strip() else "nvidia-smi gave an unreadable answer"
    return [], ""


def _queried(host: Host, program: str, fields: tuple[str, ...]) -> Answer:
    return host.run([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], TIMEOUT_S)


def _gpu_of_line(line: str) -> GpuInfo | None:
    values = [value.strip() for value in line.split(",")]
    if not len(SMI_FIELDS) <= len(values) <= len(SMI_FIELDS) + 1 or not values[0]:
        return None
    total, free = (_mib(value) for value in values[1:3])
    known = [None if value.startswith("[") or not value else value for value in [*values, ""]]
    if total is None and known[3] is None:
        return None
    return GpuInfo(NVIDIA, values[0], total, free, known[5], known[3], known[4])


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if text.isdecimal() else None


def _nvidia_files(host: Host) -> Iterator[GpuInfo]:
    folder = "/proc/driver/nvidia/gpus"
    words = (host.text("/proc/driver/nvidia/version") or "").split()
    driver = next((word for word in words if word[0].isdecimal() and word.count(".") in (1, 2)), None)
    for name in host.names(folder):
        lines = (host.text(f"{folder}/{name}/information") or "").splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        yield GpuInfo(NVIDIA, fields.get("Model") or "NVIDIA GPU", driver=driver, uuid=fields.get("GPU UUID"))


def _amd(host: Host) -> list[GpuInfo]:
    """Return AMD GPUs from the driver's files. Integrated ones have a few hundred MiB of memory reserved."""
    found = []
    for card in host.names("/sys/class/drm"):
        device = f"/sys/class/drm/{card}/device"
        if not card.removeprefix("card").isdecimal() or _line(host, f"{device}/vendor") != "0x1002":
            continue
        total, used = (_line(host, f"{device}/mem_info_vram_{kind}") for kind in ("total", "used"))
        total_bytes = int(total) if total.isdecimal() else None
        free_bytes = total_bytes - int(used) if total_bytes is not None and used.isdecimal() else None
        name = _line(host, f"{device}/product_name") or f"AMD GPU {_line(host, f'{device}/device')}"
        driver = _line(host, "/sys/module/amdgpu/version") or "amdgpu"
        found.append(GpuInfo(AMD, name.strip(), total_bytes, free_bytes, driver=driver))
    return found


def _pci(host: Host) -> list[GpuInfo]:
    """Return display controllers of NVIDIA and AMD on the PCI bus, which need no driver."""
    found = []
    for slot in host.names(PCI):
        vendor = PCI_VENDORS.get(_line(host, f"{PCI}/{slot}/vendor"))
        if vendor and _line(host, f"{PCI}/{slot}/class").startswith("0x03"):
            found.append(GpuInfo(vendor, f"{vendor} GPU {_line(host, f'{PCI}/{slot}/device')}".strip()))
    return found


def _line(host: Host, path: str) -> str:
    return (host.text(path) or "").strip()
