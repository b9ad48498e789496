"""Compiles the grammars of requests: first in a process that can be killed, then in this process's own threads."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hetero_ee.decoding.constrained.grammars import Grammars
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.sampling import SAMPLING, SamplingParams
from hetero_ee.serving.scheduler import BusyError
from hetero_ee.text.child_process import ChildProcess

PROGRAM = "hetero_ee.decoding.constrained.grammar_program"
N_THREADS = 2
MAX_WAITING = 16  # grammars that wait for a thread
MAX_ANSWER_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits on the time and memory for compiling one grammar and computing its first mask."""

    seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    start_seconds: float = 60.0  # for the process to start and read the tokenizer


DEFAULT_LIMITS = CompileLimits()


class GrammarChecks:
    """Compiler of grammars for one server. close() ends its processes."""

    def __init__(self, grammars: Grammars, limits: CompileLimits = DEFAULT_LIMITS) -> None:
        self._grammars, self._limits = grammars, limits
        self._threads = ThreadPoolExecutor(N_THREADS, "grammar")
        self._idle: list[ChildProcess] = []
        self._lock = threading.Lock()  # who kills a process, or gives it back
        self._n_asked, self._is_closed = 0, False
        self._began_s: dict[object, float] = {}  # start times of compilations in this process

    @property
    def is_stuck(self) -> bool:
        """Whether this process has been compiling a grammar for ten times longer than its check may take."""
        return any(time.monotonic() - each > 10 * self._limits.seconds for each in list(self._began_s.values()))

    async def require(self, params: SamplingParams) -> None:
        """Compile the grammar of these parameters, if they have one. Cancelling the call ends the compilation.

        Raises:
            UsageError: if the grammar can't be used, or needs too much time or memory.
            BusyError: if too many grammars are waiting.
        """
        if self._grammars.knows(params):
            return
        if self._n_asked >= MAX_WAITING + N_THREADS:
            raise BusyError(f"{MAX_WAITING} grammars wait to be compiled, which is the limit; try again later.")
        self._n_asked += 1
        held = list[ChildProcess]()
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, params, held)
        finally:
            self._n_asked -= 1
            with self._lock:
                for child in held:  # if cancelled
                    child.kill()

    def close(self) -> None:
        """End the processes and refuse further grammars."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            for child in self._idle:
                child.close()

    def _compile(self, params: SamplingParams, held: list[ChildProcess]) -> None:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        held.append(idle or self._new_child())  # a new one takes the time of writing the tokenizer down
        try:
            self._check(params, held[0])
        finally:
            with self._lock:
                self._idle.append(held.pop())
                if self._is_closed:
                    self._idle[-1].close()
        key = object()
        self._began_s[key] = time.monotonic()
        try:
            self._grammars.constraint(params)
        finally:
            del self._began_s[key]

    def _check(self, params: SamplingParams, child: ChildProcess) -> None:
        fields, limits = {"json_schema": params.json_schema, "grammar": params.grammar}, self._limits
        option = SAMPLING["grammar" if params.json_schema is None else "json_schema"]
        try:
            parts = child.ask(fields, MAX_ANSWER_BYTES, limits.seconds)
        except TimeoutError as error:
            raise UsageError(option, f" takes longer than {limits.seconds:g} s to compile; simplify it.") from error
        except EOFError as error:
            most = f"{limits.memory_bytes // 2**20} MiB"
            raise UsageError(option, f" needs more than {most} of memory to compile; simplify it.") from error
        except OSError as error:
            raise HeteroError(f"the process that compiles grammars can't be started ({error}).") from error
        if parts:
            raise UsageError(*(each if isinstance(each, str) else SAMPLING[each[0]] for each in parts))

    def _new_child(self) -> ChildProcess:
        limits = self._limits
        arguments = ["-m", PROGRAM, str(limits.seconds), str(limits.memory_bytes)]
        return ChildProcess(arguments, limits.start_seconds, self._grammars.described())
