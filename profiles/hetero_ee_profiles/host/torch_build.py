"""Finds the installed torch and the GPUs that it can use, in a child process, since a broken torch may crash."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from hetero_ee_profiles.host.host import Host

TIMEOUT_S = 30.0
PROGRAM = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": [], "problem": ""}
if found["cuda"] or found["hip"]:
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            major, minor = properties.major, properties.minor
            found["gpus"].append([properties.name, total, free, f"{major}.{minor}"])
    except Exception as error:
        found["problem"] = (str(error).splitlines() or [type(error).__name__])[0]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class TorchGpu:
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch, its platform and its GPUs."""

    version: str  # empty if it cannot be imported
    cuda: str | None  # the CUDA version it was built for
    hip: str | None  # the HIP version it was built for
    gpus: tuple[TorchGpu, ...]
    problem: str  # why no GPU is usable

    @property
    def platform(self) -> str:
        """GPU platform of this torch build, or "CPU only"."""
        return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU only"


def torch_build(host: Host) -> TorchBuild:
    """Describe the installed torch by a child process, which needs a second or two."""
    answer = host.run([sys.executable, "-P", "-W", "ignore", "-c", PROGRAM], TIMEOUT_S)
    if answer.problem:
        return TorchBuild("", None, None, (), answer.problem)
    try:
        return _read(json.loads(answer.output.strip().splitlines()[-1]))
    except (ValueError, LookupError, TypeError):
        return TorchBuild("", None, None, (), "an unreadable answer")


def _read(found: dict[str, Any]) -> TorchBuild:
    gpus = tuple(TorchGpu(str(name), int(total), int(free), str(cc)) for name, total, free, cc in found["gpus"])
    return TorchBuild(str(found["version"]), found["cuda"], found["hip"], gpus, str(found["problem"]))
