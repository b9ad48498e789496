"""GPUs as drivers and the PCI bus list them, and what torch makes of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee_profiles.gpu.inventory import GpuInfo, GpuInventory, gpu_inventory
from hetero_ee_profiles.host.host import Answer, this_host
from hetero_ee_profiles.host.torch_build import TorchBuild, TorchGpu, torch_build
from tests.recorded_hosts import GIB, recorded

UUID = "GPU-5c1d9ba4-0000-0000-0000-000000000000"
FULL = f"NVIDIA GeForce RTX 3060 Laptop GPU, 6144, 5890, 560.35.03, {UUID}, 8.6\n"
RTX_3060 = GpuInfo("NVIDIA", "NVIDIA GeForce RTX 3060 Laptop GPU", 6 * GIB, 5890 * 2**20, "8.6", "560.35.03", UUID)
CARD = "/sys/class/drm/card1/device"
AMD_FILES = {
    f"{CARD}/vendor": "0x1002\n",
    f"{CARD}/device": "0x744c\n",
    f"{CARD}/mem_info_vram_total": f"{20 * GIB}\n",
    f"{CARD}/mem_info_vram_used": f"{GIB}\n",
    "/sys/class/drm/card1-DP-1/status": "connected",
    "/sys/class/drm/card0/device/vendor": "0x8086\n",
}
DRIVER_FILES = {
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024\n",
    "/proc/driver/nvidia/gpus/0000:01:00.0/information": f"Model: \t\t NVIDIA T4\nIRQ:   \t 33\nGPU UUID: \t {UUID}\n",
}
PCI_FILES = {
    "/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:01:00.0/device": "0x2520\n",
    "/sys/bus/pci/devices/0000:01:00.0/class": "0x030000\n",
    "/sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",  # its sound
    "/sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
    "/sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n",
    "/sys/bus/pci/devices/0000:00:02.0/class": "0x030000\n",
}
T4_FROM_FILES = GpuInfo("NVIDIA", "NVIDIA T4", driver="535.183.01", uuid=UUID)
FOUND: dict[str, tuple[dict[str, str], dict[str, Answer], GpuInventory]] = {
    "none": ({}, {}, GpuInventory((), ())),
    "NVIDIA": (PCI_FILES, {"nvidia-smi": Answer(FULL)}, GpuInventory((RTX_3060,), ())),
    "NVIDIA in WSL": ({}, {"/usr/lib/wsl/lib/nvidia-smi": Answer(FULL)}, GpuInventory((RTX_3060,), ())),
    "two, one with fields that are not there": (
        {},
        {"nvidia-smi": Answer(FULL + "Orin (nvgpu), [N/A], [N/A], 540.4.0, [N/A], [Not Supported]\n")},
        GpuInventory((RTX_3060, GpuInfo("NVIDIA", "Orin (nvgpu)", driver="540.4.0")), ()),
    ),
    "no answer": (
        DRIVER_FILES,
        {"nvidia-smi": Answer("", "no answer within 2 s")},
        GpuInventory((T4_FROM_FILES,), ("nvidia-smi: no answer within 2 s",)),
    ),
    "garbage": (
        DRIVER_FILES,
        {"nvidia-smi": Answer("\x00\x1b[31m<html>\n,,,,,\n")},
        GpuInventory((T4_FROM_FILES,), ("nvidia-smi gave an unreadable answer",)),
    ),
    "a driver that doesn't answer": (
        PCI_FILES,
        {"nvidia-smi": Answer("NVIDIA-SMI has failed because it couldn't communicate.\nMake sure\n", "exit code 9")},
        GpuInventory(
            (GpuInfo("NVIDIA", "NVIDIA GPU 0x2520"),),
            ("nvidia-smi: exit code 9: NVIDIA-SMI has failed because it couldn't communicate.",),
        ),
    ),
    "no tool": (DRIVER_FILES, {}, GpuInventory((T4_FROM_FILES,), ())),
    "no driver": (PCI_FILES, {}, GpuInventory((GpuInfo("NVIDIA", "NVIDIA GPU 0x2520"),), ())),
    "AMD": (
        AMD_FILES,
        {},
        GpuInventory((GpuInfo("AMD", "AMD GPU 0x744c", 20 * GIB, 19 * GIB, driver="amdgpu"),), ()),
    ),
    "AMD and NVIDIA": (
        {**AMD_FILES, f"{CARD}/product_name": "Radeon RX 7900 XT\n"},
        {"nvidia-smi": Answer(FULL)},
        GpuInventory((RTX_3060, GpuInfo("AMD", "Radeon RX 7900 XT", 20 * GIB, 19 * GIB, driver="amdgpu")), ()),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_inventories(name: str) -> None:
    files, commands, expected = FOUND[name]
    assert gpu_inventory(recorded(files, commands)) == expected


def test_drivers_that_do_not_know_the_compute_capability() -> None:
    def run(command: list[str], timeout_s: float) -> Answer:
        if "compute_cap" in command[1]:
            return Answer('Field "compute_cap" is not a valid field to query.\n', "exit code 2")
        return Answer(FULL.rpartition(",")[0] + "\n") if command[0] == "nvidia-smi" else Answer(problem="not found")

    host = recorded()
    object.__setattr__(host, "run", run)
    (found,) = gpu_inventory(host).gpus
    assert (found.name, found.compute_capability, found.uuid) == (RTX_3060.name, None, UUID)


@given(st.text(max_size=200) | st.from_regex(r"([a-z0-9.\[\]\-]{0,6}, ?){3,7}\n?", fullmatch=True))
def test_no_answer_of_nvidia_smi_raises(output: str) -> None:
    inventory = gpu_inventory(recorded({}, {"nvidia-smi": Answer(output)}))
    assert all(gpu.name for gpu in inventory.gpus)
    assert inventory.gpus or inventory.problems or not output.strip()


def torch_says(output: str, problem: str = "") -> TorchBuild:
    host = recorded()
    object.__setattr__(host, "run", lambda command, timeout_s: Answer(output, problem))
    return torch_build(host)


def test_torch_with_a_gpu() -> None:
    document = {"version": "2.13.0+cu130", "cuda": "13.0", "hip": None, "gpus": [["T4", 16 * GIB, GIB, "7.5"]]}
    build = torch_says(f"some warning\n{json.dumps({**document, 'problem': ''})}\n")
    assert build == TorchBuild("2.13.0+cu130", "13.0", None, (TorchGpu("T4", 16 * GIB, GIB, "7.5"),), "")
    assert build.platform == "CUDA 13.0"


@pytest.mark.parametrize("output", ["", "Segmentation fault", "[]", "{}", '{"version": 1, "gpus": [[1]]}', "3"])
def test_answers_of_torch_that_make_no_sense(output: str) -> None:
    assert torch_says(output) == TorchBuild("", None, None, (), "an unreadable answer")
    assert torch_says(output, "exit code -11") == TorchBuild("", None, None, (), "exit code -11")


def test_the_installed_torch_answers() -> None:
    import torch

    build = torch_build(this_host())
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)
    assert len(build.gpus) == torch.cuda.device_count()


@pytest.mark.parametrize(
    "vendors, kind", [((), None), (("NVIDIA",), "cuda"), (("AMD",), "rocm"), (("AMD", "NVIDIA"), "cuda")]
)
def test_the_engines_word_for_the_gpus(vendors: tuple[str, ...], kind: str | None) -> None:
    assert GpuInventory(tuple(GpuInfo(vendor, "a card") for vendor in vendors), ()).kind == kind
