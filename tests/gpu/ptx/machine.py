"""Executes one launch of a translated kernel, with some thousand threads at a time and one array per register.

If threads diverge, the threads in the block with the lowest number run first, so that they converge again. A barrier
waits for all threads of a program.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gpu.ptx.accesses import Accesses
from tests.gpu.ptx.arithmetic import U32, UNSIGNED
from tests.gpu.ptx.memory import GlobalMemory
from tests.gpu.ptx.parsing import Block, Kernel, PtxError

CHUNK_THREADS = 8192  # threads that run at the same time, about


@dataclass(slots=True)
class Counts:
    """Counts of one launch. An instruction counts once per warp."""

    n_instructions: int = 0
    n_sectors: int = 0  # sectors (32 bytes of global memory) requested, summed over the accesses of warps
    n_touched_sectors: int = 0  # different sectors requested


class Machine(Accesses):
    """Emulator of one launch. `run` executes it.

    Args:
        grid: number of programs in x, y and z.
        values: bytes of each parameter, by its name.
        shared_bytes: dynamic shared memory per program.
        has_jitter: see Launcher.

    Raises:
        PtxError: from `run`, for accesses outside tensors, misaligned accesses, reads of unwritten registers or shared
            memory, races, warp instructions in diverged warps, and barriers that not all threads reach.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        values: dict[str, bytes],
        memory: GlobalMemory,
        shared_bytes: int,
        *,
        has_jitter: bool = False,
    ) -> None:
        super().__init__(kernel, memory, shared_bytes)
        self.grid, self.parameters, self.has_jitter = grid, values, has_jitter
        self.counts = Counts()

    def run(self) -> Counts:
        n_programs, n = int(np.prod(self.grid)), self.kernel.n_threads
        if n % 32:
            raise PtxError(f"programs of {n} threads, which are not whole warps")
        each = max(1, CHUNK_THREADS // n)
        with np.errstate(all="ignore"):
            for first in range(0, n_programs, each):
                last = min(first + each, n_programs)
                self.start_programs(first, last - first)
                self._run_chunk(np.arange(first * n, last * n))
        self.counts.n_touched_sectors = int(self.memory.is_touched.sum())
        return self.counts

    def special(self, c: Any, name: str) -> Any:
        """Return a special register of each thread."""
        n, (x, y, z), program = self.kernel.n_threads, self.grid, c // self.kernel.n_threads
        values = {"tid.x": c % n, "laneid": c % 32, "ntid.x": n, "nctaid.x": x, "nctaid.y": y, "nctaid.z": z}
        values |= {"ctaid.x": program % x, "ctaid.y": program // x % y, "ctaid.z": program // x // y}
        return self.full(c, values[name]).astype(U32)

    def _run_chunk(self, c: Any) -> None:
        place, waiting, end = np.zeros(len(c), np.int64), np.zeros(len(c), bool), len(self.kernel.blocks)
        registers = Registers(self.kernel, len(c))
        while (place != end).any():
            ready = ~waiting & (place != end)
            if not ready.any():
                raise PtxError("a barrier that not all threads of a program reach")
            number = int(place[ready].min())
            here, block = ready & (place == number), self.kernel.blocks[number]
            chosen = slice(None) if here.all() else here
            part = c[chosen]
            self.counts.n_instructions += (1 + int(np.count_nonzero(np.diff(part // 32)))) * len(block.instructions)
            results, condition = block.run(self, part, *registers.read(block, chosen))
            registers.write(block, chosen, results)
            jumps = {"bra": block.target, "ret": end}.get(block.end, number + 1)
            place[chosen] = jumps if condition is None else np.where(condition, jumps, number + 1)
            if block.end == "bar":
                waiting |= here
                self._release(place, waiting)

    def _release(self, place: Any, waiting: Any) -> None:
        """Let every program continue whose threads all wait at the same barrier."""
        waits, at = waiting.reshape(-1, self.kernel.n_threads), place.reshape(-1, self.kernel.n_threads)
        ready = waits.all(1)
        if (at[ready] != at[ready, :1]).any():
            raise PtxError("threads of a program wait at different barriers")
        waits[ready] = False
        self.program_time[ready] += 1


class Registers:
    """Registers of the threads that run at the same time.

    Those that no instruction of the kernel writes, such as the padding of a pair, have all bits set.
    """

    def __init__(self, kernel: Kernel, n_threads: int) -> None:
        self.n_threads = n_threads
        kinds = {name: UNSIGNED.get(kernel.widths[name], np.bool_) for name in kernel.never_written}
        self.values = {name: np.full(n_threads, -1).astype(kind) for name, kind in kinds.items()}
        self.is_written: dict[str, Any] = {}  # for registers that some threads have not written: which did

    def read(self, block: Block, chosen: Any) -> list[Any]:
        """Return the block's input registers for the chosen threads.

        Raises:
            PtxError: if a chosen thread has not written one of them.
        """
        for name in block.inputs:
            written = self.is_written.get(name)
            if name not in self.values or (written is not None and not written[chosen].all()):
                raise PtxError(f"{name} is read by threads that have not written it, in block {block.label}")
        return [self.values[name][chosen] for name in block.inputs]

    def write(self, block: Block, chosen: Any, results: Any) -> None:
        for name, value in zip(block.outputs, results, strict=True):
            if isinstance(chosen, slice):
                self.values[name] = value
                self.is_written.pop(name, None)
                continue
            if name not in self.values:
                self.values[name] = np.zeros(self.n_threads, value.dtype)
                self.is_written[name] = np.zeros(self.n_threads, bool)
            self.values[name] = self.values[name].copy()  # other registers may share the array
            self.values[name][chosen] = value
            if name in self.is_written:
                self.is_written[name] = self.is_written[name] | chosen
