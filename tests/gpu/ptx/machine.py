"""Executes one launch of a translated kernel, with some thousand threads at a time and one array per register.

If threads diverge, the threads in the block with the lowest number run first, so that they converge again. A barrier
waits for all threads of a program.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tests.gpu.ptx.accesses import Accesses
from tests.gpu.ptx.arithmetic import U32, UNSIGNED
from tests.gpu.ptx.memory import GlobalMemory
from tests.gpu.ptx.parsing import Block, Kernel, PtxError

CHUNK_THREADS = 8192  # threads that run at the same time, about


@dataclass(frozen=True, slots=True)
class Context:
    """The threads that execute a block. Each field is an array with one value per thread."""

    thread: Any  # number in the launch
    program: Any  # number in the launch
    shared_base: Any  # first byte of the program's shared memory
    tid_x: Any
    ctaid_x: Any
    ctaid_y: Any
    ctaid_z: Any
    ntid_x: Any
    nctaid_x: Any
    nctaid_y: Any
    nctaid_z: Any
    laneid: Any

    @property
    def n(self) -> int:
        return len(self.thread)

    @property
    def is_whole(self) -> bool:
        """Whether the threads form whole warps, in order."""
        if self.n % 32:
            return False
        rows = self.thread.reshape(-1, 32)
        return bool((rows // 32 == rows[:, :1] // 32).all())

    def some(self, chosen: Any) -> "Context":
        return Context(*(getattr(self, one.name)[chosen] for one in fields(self)))


@dataclass(slots=True)
class Counts:
    """Counts of one launch. An instruction counts once per warp."""

    n_warps: int
    by_block: Any  # how many warps executed each basic block
    n_sectors: int = 0  # sectors (32 bytes of global memory) requested, summed over the accesses of warps
    n_touched_sectors: int = 0  # different sectors requested

    def n_instructions(self, kernel: Kernel) -> int:
        sizes = [len(block.instructions) for block in kernel.blocks]
        return sum(n * size for n, size in zip(self.by_block.tolist(), sizes, strict=True))


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
        self.counts = Counts(int(np.prod(grid)) * kernel.n_threads // 32, np.zeros(len(kernel.blocks), np.int64))

    def run(self) -> Counts:
        n_programs = int(np.prod(self.grid))
        each = max(1, CHUNK_THREADS // self.kernel.n_threads)
        with np.errstate(all="ignore"):
            for first in range(0, n_programs, each):
                n_here = min(each, n_programs - first)
                self.start_programs(first, n_here)
                self._run_chunk(self._context(first, n_here))
        self.counts.n_touched_sectors = int(self.memory.is_touched.sum())
        return self.counts

    def _context(self, first: int, n_programs: int) -> Context:
        n = self.kernel.n_threads
        if n % 32:
            raise PtxError(f"programs of {n} threads, which are not whole warps")
        local, program = np.tile(np.arange(n), n_programs), np.repeat(np.arange(first, first + n_programs), n)
        x, y, _ = self.grid
        ids = (program % x, program // x % y, program // x // y)
        sizes = (np.full(n * n_programs, size, U32) for size in (n, *self.grid))
        base = (program - first) * self.shared_bytes
        places = [part.astype(U32) for part in (local, *ids)]
        return Context(program * n + local, program, base, *places, *sizes, (local % 32).astype(U32))

    def _run_chunk(self, c: Context) -> None:
        place, waiting, end = np.zeros(c.n, np.int64), np.zeros(c.n, bool), len(self.kernel.blocks)
        registers = Registers(self.kernel, c.n)
        while (place != end).any():
            ready = ~waiting & (place != end)
            if not ready.any():
                raise PtxError("a barrier that not all threads of a program reach")
            number = int(place[ready].min())
            here, block = ready & (place == number), self.kernel.blocks[number]
            chosen = slice(None) if here.all() else here
            part = c if here.all() else c.some(here)
            self.counts.by_block[number] += part.n // 32 if part.is_whole else len(np.unique(part.thread // 32))
            results, condition = block.run(self, part, *registers.read(block, chosen))
            registers.write(block, chosen, results)
            jumps = {"bra": block.target, "ret": end}.get(block.end, number + 1)
            place[chosen] = jumps if condition is None else np.where(condition, jumps, number + 1)
            if block.end == "bar":
                waiting |= here
                self._release(c, place, waiting)

    def _release(self, c: Context, place: Any, waiting: Any) -> None:
        """Let every program continue whose threads all wait at the same barrier."""
        waits, at = waiting.reshape(-1, self.kernel.n_threads), place.reshape(-1, self.kernel.n_threads)
        ready = waits.all(1)
        if (at[ready] != at[ready, :1]).any():
            raise PtxError("threads of a program wait at different barriers")
        waits[ready] = False
        self.program_time[c.program.reshape(waits.shape)[ready, 0] - self.first_program] += 1


class Registers:
    """Registers of the threads that run at the same time."""

    def __init__(self, kernel: Kernel, n_threads: int) -> None:
        self.kernel, self.n_threads = kernel, n_threads
        self.values: dict[str, Any] = {}
        self.is_written: dict[str, Any] = {}  # for registers that some threads have not written: which did

    def read(self, block: Block, chosen: Any) -> list[Any]:
        """Return the block's input registers for the chosen threads.

        Registers that no instruction of the kernel writes, such as the padding of a pair, have all bits set.

        Raises:
            PtxError: if a chosen thread has not written one of the others.
        """
        for name in set(block.inputs) & self.kernel.never_written:
            kind = UNSIGNED.get(self.kernel.widths[name], np.bool_)
            self.values[name] = np.full(self.n_threads, -1).astype(kind)
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
