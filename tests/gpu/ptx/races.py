"""Detects races from the last writer and reader of each byte and the barriers since then."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that threads access with one instruction, and the time of the access, counted in barriers."""

    at: Any  # (threads, bytes): byte indices
    thread: Any  # (threads, 1), like all below: number of the thread in the launch
    warp: Any
    program: Any
    program_time: Any  # barriers that the program has passed
    warp_time: Any  # barriers that the warp has passed


class Races:
    """Race detector for one memory. It keeps the last write and read of each byte.

    Args:
        n_bytes: size of the memory.
        n_threads: threads per program.
        in_step: assume that the threads of a warp run in lockstep, so that they never race.
    """

    def __init__(self, n_bytes: int, n_threads: int, in_step: bool) -> None:
        self.n_threads, self.in_step = n_threads, in_step
        self.writer, self.reader = np.full(n_bytes, -1, np.int64), np.full(n_bytes, -1, np.int64)
        self.writer_time, self.reader_time = np.zeros((2, n_bytes), np.int32), np.zeros((2, n_bytes), np.int32)
        self.has_many_readers = np.zeros(n_bytes, bool)  # several warps since the last barrier

    def record(self, access: Access, is_store: bool) -> str:
        """Record an access. Return a description of its race with an earlier one, or an empty string."""
        problem = self._problem(access, self.writer, self.writer_time, None, is_store)
        if is_store:
            many = self.has_many_readers[access.at]
            problem = problem or self._problem(access, self.reader, self.reader_time, many, is_store)
            self._keep(self.writer, self.writer_time, access)
        else:
            old, is_old = self.reader[access.at], self.reader_time[0][access.at] < access.program_time
            others = ~is_old & (old >= 0) & (self._warp(old) != access.warp)
            self.has_many_readers[access.at] = (self.has_many_readers[access.at] & ~is_old) | others
            self._keep(self.reader, self.reader_time, access)
            late = self._warp(self.reader[access.at]) != access.warp
            self.has_many_readers[access.at[late]] = True
        return problem

    def _problem(self, access: Access, owner: Any, times: Any, many: Any, is_store: bool) -> str:
        who, then = owner[access.at], [time[access.at] for time in times]
        is_ordered = (who < 0) | (who == access.thread)
        same_warp = self._warp(who) == access.warp
        is_earlier = same_warp & ((then[1] < access.warp_time) | self.in_step)
        if many is not None:
            is_ordered, is_earlier = is_ordered & ~many, is_earlier & ~many
        is_ordered |= is_earlier | ((who // self.n_threads == access.program) & (then[0] < access.program_time))
        if is_ordered.all():
            return ""
        row, byte = np.argwhere(~is_ordered)[0]
        verbs = "writes" if is_store else "reads", "wrote" if many is None else "read"
        return f"thread {access.thread[row, 0]} {verbs[0]} what thread {who[row, byte]} {verbs[1]} without a barrier"

    def _warp(self, thread: Any) -> Any:
        return thread // 32  # programs have whole warps

    @staticmethod
    def _keep(owner: Any, times: Any, access: Access) -> None:
        owner[access.at] = np.broadcast_to(access.thread, access.at.shape)
        times[0][access.at] = np.broadcast_to(access.program_time, access.at.shape)
        times[1][access.at] = np.broadcast_to(access.warp_time, access.at.shape)
