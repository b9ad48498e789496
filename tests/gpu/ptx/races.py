"""Detects races from the last writer and reader of each byte and the barriers since then."""

from typing import Any

import numpy as np

WRITER, READER = 0, 1


class Races:
    """Race detector for one memory. It keeps the last write and read of each byte.

    Args:
        n_bytes: size of the memory.
        n_threads: threads per program.
        in_step: assume that the threads of a warp run in lockstep, so that they never race.
    """

    def __init__(self, n_bytes: int, n_threads: int, in_step: bool) -> None:
        self.n_threads, self.in_step = n_threads, in_step
        self.last = np.zeros(
            (2, 3, n_bytes), np.int64
        )  # last write and read of each byte: thread and times, see record
        self.last[:, 0] = -1
        self.has_many_readers = np.zeros(n_bytes, bool)  # several warps since the last barrier

    def record(self, at: Any, thread: Any, program_time: Any, warp_time: Any, *, is_store: bool) -> str:
        """Record an access. Return a description of its race with an earlier one, or an empty string.

        Args:
            at: (threads, bytes): index of each byte.
            thread: (threads, 1), like the times: number of the thread in the launch.
            program_time: how many barriers the program has passed.
            warp_time: how many barriers of its own the warp has passed.
        """
        access = at, thread, program_time, warp_time
        problem = self._problem(*access, WRITER, is_store)
        if is_store:
            problem = problem or self._problem(*access, READER, is_store)
        else:
            old, old_time, _ = self.last[READER][:, at]
            is_old = old_time < program_time
            others = ~is_old & (old >= 0) & (old // 32 != thread // 32)
            self.has_many_readers[at] = (self.has_many_readers[at] & ~is_old) | others
        kept = self.last[WRITER if is_store else READER]
        for row, value in enumerate((thread, program_time, warp_time)):
            kept[row][at] = np.broadcast_to(value, at.shape)
        if not is_store:
            self.has_many_readers[at[kept[0][at] // 32 != thread // 32]] = True
        return problem

    def _problem(self, at: Any, thread: Any, program_time: Any, warp_time: Any, role: int, is_store: bool) -> str:
        (who, old_program_time, old_warp_time), verb = self.last[role][:, at], ("wrote", "read")[role]
        same_warp = (who // 32 == thread // 32) & (self.in_step | (old_warp_time < warp_time))
        is_ordered = (who == thread) | same_warp
        if role == READER:
            is_ordered &= ~self.has_many_readers[at]
        same_program = who // self.n_threads == thread // self.n_threads
        is_ordered |= (who < 0) | (same_program & (old_program_time < program_time))
        if is_ordered.all():
            return ""
        row, byte = np.argwhere(~is_ordered)[0]
        does = "writes" if is_store else "reads"
        return f"thread {thread[row, 0]} {does} what thread {who[row, byte]} {verb} without a barrier"
