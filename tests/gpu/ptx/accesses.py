"""Loads, stores and atomics of an emulated launch. Every access is checked and counted."""

from typing import Any

import numpy as np

from tests.gpu.ptx.arithmetic import U64, UNSIGNED, jittered
from tests.gpu.ptx.memory import BASE, SECTOR_BYTES, GlobalMemory
from tests.gpu.ptx.parsing import Kernel, PtxError
from tests.gpu.ptx.races import Races
from tests.gpu.ptx.warps import Warps

WATCHED_BYTES = 1 << 26  # global memory from this size on is not checked for races, which would need gigabytes


class Accesses(Warps):
    """Memory instructions, as methods that translated blocks call.

    Args of all methods:
        c: the numbers of the threads that execute the instruction, in the launch.
        at: address of each thread.
        size: bytes per word.
        guard: whether each thread executes the instruction; None for all.
        site: index in Kernel.sites, for messages.
    """

    counts: Any
    parameters: dict[str, bytes]
    has_jitter: bool

    def __init__(self, kernel: Kernel, memory: GlobalMemory, shared_bytes: int) -> None:
        self.kernel, self.memory = kernel, memory
        self.shared_bytes = -(-max(shared_bytes + kernel.static_shared_bytes, 16) // 16) * 16
        is_watched = memory.n_bytes < WATCHED_BYTES
        self.global_races = Races(memory.n_bytes, kernel.n_threads, True) if is_watched else None

    def start_programs(self, first: int, n_programs: int) -> None:
        """Start to run programs first .. first + n_programs - 1, with unwritten shared memory."""
        self.first_program = first
        self.program_time = np.ones(n_programs, np.int32)
        self.warp_time = np.ones(n_programs * self.kernel.n_threads // 32, np.int32)
        self.shared_words = np.zeros(n_programs * self.shared_bytes // 8, U64)
        self.is_written = np.zeros(n_programs * self.shared_bytes, bool)
        self.shared_races = Races(n_programs * self.shared_bytes, self.kernel.n_threads, False)

    @staticmethod
    def full(c: Any, value: Any) -> Any:
        return np.full(len(c), value) if np.ndim(value) == 0 else value

    def parameter(self, c: Any, name: str, kind: Any) -> Any:
        return np.full(len(c), np.frombuffer(self.parameters[name], kind)[0])

    def approximate(self, value: Any) -> Any:
        """Return the result of an approximate instruction, with an error if the launch has jitter."""
        return jittered(value) if self.has_jitter else value

    def load(self, c: Any, space: str, at: Any, size: int, n: int, guard: Any, site: int) -> list[Any]:
        """Load n adjacent words per thread. Threads whose guard is false get 0."""
        active = self.full(c, True if guard is None else guard)
        index = self.place(c, space, at, size * n, active, site, False)[active]
        results = [np.zeros(len(c), UNSIGNED[8 * size]) for _ in range(n)]
        for result, value in zip(results, self._read(space, index, size, n), strict=True):
            result[active] = value
        return results

    def store(self, c: Any, space: str, at: Any, size: int, values: Any, guard: Any, site: int) -> None:
        """Store adjacent words per thread. Raises: PtxError: if threads store different values to one address."""
        active = self.full(c, True if guard is None else guard)
        index = self.place(c, space, at, size * len(values), active, site, True)[active]
        values = [value[active] for value in values]
        if space == "shared":
            for i, value in enumerate(values):
                self.shared_words.view(UNSIGNED[8 * size])[index // size + i] = value
        else:
            self.memory.write(index, size, values)
        kept = self._read(space, index, size, len(values))
        if any((a != b).any() for a, b in zip(kept, values, strict=True)):
            self._fail(site, "threads store different values to one address")

    def _read(self, space: str, index: Any, size: int, n: int) -> list[Any]:
        if space == "global":
            return self.memory.read(index, size, n)
        return [self.shared_words.view(UNSIGNED[8 * size])[index // size + i] for i in range(n)]

    def atomic_add(self, c: Any, at: Any, size: int, value: Any, guard: Any, site: int) -> Any:
        """Add to one word of global memory per thread, in the threads' order, and return the old values."""
        active = self.full(c, True if guard is None else guard)
        races, self.global_races = self.global_races, None  # atomics don't race
        index = self.place(c, "global", at, size, active, site, True)
        self.global_races = races
        old = np.zeros_like(value)
        for thread in np.flatnonzero(active):
            [old[thread : thread + 1]] = self.memory.read(index[thread : thread + 1], size, 1)
            self.memory.write(index[thread : thread + 1], size, [(old + value)[thread : thread + 1]])
        return old

    def place(self, c: Any, space: str, at: Any, n_bytes: int, active: Any, site: int, is_store: bool) -> Any:
        """Check accesses of n_bytes each, and return their byte indices in `space`; 0 for inactive threads.

        Raises:
            PtxError: for accesses outside tensors, misaligned ones, reads of unwritten shared memory, and races.
        """
        if space == "global":
            index = (at - U64(BASE)).astype(np.int64)
            inside = self.memory.contains(index, n_bytes)
        else:
            inside = at.astype(np.int64) + n_bytes <= self.shared_bytes
            index = at.astype(np.int64) + (c // self.kernel.n_threads - self.first_program) * self.shared_bytes
        index = np.where(inside & active, index, 0)
        if (wrong := active & ~inside).any():
            self._fail(site, f"thread {c[wrong][0]} is outside of {space} memory, {wrong.sum()} threads in all")
        if (wrong := active & (at % at.dtype.type(n_bytes) != 0)).any():
            self._fail(site, f"{wrong.sum()} threads are misaligned")
        if active.any():
            self._watch(c[active], space, index[active], n_bytes, site, is_store)
        return index

    def _watch(self, c: Any, space: str, index: Any, n_bytes: int, site: int, is_store: bool) -> None:
        at, races = index[:, None] + np.arange(n_bytes), self.global_races
        if space == "shared":
            races = self.shared_races
            if not is_store and not self.is_written[at].all():
                self._fail(site, "reads shared memory that no thread has written")
            self.is_written[at] = True
        else:
            sectors = index // SECTOR_BYTES
            self.memory.is_touched[sectors] = True
            self.counts.n_sectors += len(np.unique((c // 32 << 36) + sectors))
        if races is not None:
            program = c // self.kernel.n_threads - self.first_program
            times = self.program_time[program], self.warp_time[self.warp(c)]
            if problem := races.record(at, *(part[:, None] for part in (c, *times)), is_store=is_store):
                self._fail(site, problem)

    def _fail(self, site: int, problem: str) -> None:
        raise PtxError(f"{self.kernel.sites[site]}: {problem}")
