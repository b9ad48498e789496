"""What one kernel is compiled as: enough to compile it ahead of time on a machine without a GPU."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Compilation:
    """One specialization of one kernel. Every file of an operation lists its own in `compilations()`.

    function: the @triton.jit function. signature: the type of each run-time argument by name ("*fp16", "i32").
    constants: the value of every other argument, None for a pointer that is not given. is_memory_bound: its large
    operand must be read 16 bytes at a time. runs_on_hip, runs_on_cuda: it holds no instruction of the
    other's. needs_tensor_cores: its sums fit into registers only where Triton uses tensor cores.
    """

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    n_warps: int
    n_stages: int
    is_memory_bound: bool
    runs_on_hip: bool
    needs_tensor_cores: bool = False
    runs_on_cuda: bool = True

    def runs_on(self, architecture: str) -> bool:
        """architecture: the compiler's target, as "sm_86" or "gfx1100"."""
        if not architecture.startswith("sm_"):
            return self.runs_on_hip
        has_tensor_cores = int(architecture.removeprefix("sm_")) >= 80
        return self.runs_on_cuda and (has_tensor_cores or not self.needs_tensor_cores)
