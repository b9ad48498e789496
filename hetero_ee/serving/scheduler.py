"""The engine's thread: requests wait in a bounded queue, run in slots, and leave between two steps."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from hetero_ee.decoding.logprobs import TokenLogprobs
from hetero_ee.decoding.loop import Stepped
from hetero_ee.decoding.requests import Continuation, room_for_reply
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.engine import Engine
from hetero_ee.errors import DeviceMemoryError, HeteroError, UsageError
from hetero_ee.kv.devices import DeviceCaches
from hetero_ee.kv.snapshots import Snapshots
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.profiling.expectation import dropped_profile
from hetero_ee.serving.settings import N_EXPRESS
from hetero_ee.serving.slots import Slot, Slots, SlotState

LOG = logging.getLogger(__name__)
T = TypeVar("T")
STOPPING = "the server is shutting down; send the request again when it is back."


class BusyError(HeteroError):
    """The server can't accept a request, because the queue is full or it is shutting down."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Event: a request has left the queue."""

    n_cached_tokens: int  # prompt tokens that were already cached
    slot_number: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Event: the log-probabilities of a prompt's tokens are known."""

    logprobs: list[TokenLogprobs]  # for all prompt tokens except the first


Event = Begun | Scored | GeneratedToken | HeteroError


@dataclass(frozen=True, slots=True)
class Scoring:
    """A request for the log-probabilities of the prompt's tokens, which are computed before any token is generated."""

    n_top: int  # likeliest tokens to report at each position
    is_all: bool  # nothing is generated afterwards


@dataclass(slots=True, eq=False)
class Job:
    """One request, from the queue to its end.

    Args:
        tell: Called from the engine's thread with each event. The last event is the last token, an error, or Scored if
            the prompt is only scored.
        stop: Set by the client's side to cancel the request.
    """

    prompt_ids: list[int]
    params: SamplingParams
    tell: Callable[[Event], None]
    scoring: Scoring | None = None
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    slot: Slot
    generated: list[int] = field(default_factory=list)
    scoring: Generator[list[TokenLogprobs]] | None = None  # until the prompt is scored
    scored: list[TokenLogprobs] = field(default_factory=list)


class Scheduler:
    """Runs requests in free slots, first come, first served. close() ends the thread and every request."""

    def __init__(self, engine: Engine, n_slots: int, queue_size: int) -> None:
        """Start the engine's thread.

        Args:
            n_slots: Number of requests that run at a time. An extra short one may run while a long prompt is read.
            queue_size: Number of requests that may wait.
        """
        self._engine, self._loop, self.n_slots = engine, engine.loop(self._someone_waits), n_slots
        self._slots = Slots(engine.executor, n_slots + N_EXPRESS, engine.close_sequence)
        self._queue, self._queue_size = deque[Job](), queue_size
        self._calls = deque[Callable[..., None]]()  # run between steps; given an error, each only passes it on
        self._running: dict[int, _Running] = {}  # by the loop's numbers; scored prompts have negative ones
        self._scoring_numbers = count(-1, -1)
        self._changed = threading.Condition()
        self._is_closing = False
        self.n_held_tokens = 0  # in the KV cache, after the latest step
        self.memory = engine.memory()  # after the latest request
        self.watch: Callable[[int, int], None] | None = None  # gets each step's number of sequences and new tokens
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    @property
    def most_held_tokens(self) -> int:
        """Number of tokens that the KV cache can hold before its context must grow."""
        return self._engine.context_tokens

    @property
    def snapshots(self) -> Snapshots | None:
        """Snapshots of state, None if every layer can be rolled back to any length."""
        cache = self._engine.executor.cache
        return cache.snapshots if isinstance(cache, DeviceCaches) and cache.is_bounded else None

    def slot_states(self) -> list[SlotState]:
        """Return the state of each slot. The extra slot is among them only while a request runs in it."""
        found = {number: SlotState(number) for number in range(self.n_slots)}
        for each in list(self._running.values()):
            counts = len(each.job.prompt_ids), len(each.generated)
            found[each.slot.number] = SlotState(each.slot.number, True, *counts)
        return [found[number] for number in sorted(found)]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    def dropped_profile(self, n_prompt: int, n_new: int, seconds: float) -> str:
        """Call dropped_profile (profiling/expectation.py) for a request that has ended."""
        return dropped_profile(self._engine, n_prompt, n_new, seconds) if self.is_alive else ""

    @property
    def _keeps_generated(self) -> bool:
        """Whether generated tokens may stay in the KV cache for a later prompt.

        Tokens that exited early or skipped neurons have other keys and values than prefill would compute.
        """
        return self._engine.exits is None and self._engine.executor.neurons.n_neurons == 0

    def submit(self, job: Job) -> None:
        """Append the job to the queue. Raises: BusyError: if the queue is full or the server shuts down."""
        with self._changed:
            if self._is_closing:
                raise BusyError(STOPPING)
            n_free = max(0, self.n_slots - len(self._running))
            if len(self._queue) >= self._queue_size + n_free:
                raise BusyError(f"{len(self._queue)} requests wait already, which is the limit; try again later.")
            self._queue.append(job)
            self._changed.notify()

    def call(self, work: Callable[[Slots], T]) -> Future[T]:
        """Run `work` in the engine's thread between two steps. The future receives its result or error.

        Raises:
            BusyError: if the server shuts down.
        """
        result: Future[T] = Future()

        def run(error: HeteroError | None = None) -> None:
            try:
                if error is not None:
                    raise error
                result.set_result(work(self._slots))
            except Exception as raised:
                result.set_exception(_failure(raised))

        with self._changed:
            if self._is_closing:
                raise BusyError(STOPPING)
            self._calls.append(run)
            self._changed.notify()
        return result

    def cancel(self, job: Job) -> None:
        """End the job after the current step, or after the current chunk of its prompt."""
        job.stop.set()
        with self._changed:
            self._changed.notify()

    def stop_soon(self) -> None:
        """End every request with an error, without waiting. Signal handlers may call it."""
        self._is_closing = True
        for running in list(self._running.values()):
            running.job.stop.set()

    def close(self) -> None:
        """End every request with an error and wait for the thread to end. Closing twice does nothing."""
        self.stop_soon()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                while self._calls:
                    self._calls.popleft()()
                self._drop_stopped()
                self._admit()
                if self._running:
                    n_running, n_tokens = len(self._running), self._step()
                    if self.watch is not None:
                        self.watch(n_running, n_tokens)
                self.n_held_tokens = self._slots.n_tokens
        finally:
            error = BusyError(STOPPING)
            with self._changed:  # later requests are refused
                self._is_closing = True
                waiting, self._queue = list(self._queue), deque()
            with ExitStack() as every:  # if one of these raises, the others still run; the last one runs first
                every.callback(self._slots.free_idle)
                for job in waiting:
                    every.callback(job.tell, error)
                for call in self._calls:
                    every.callback(call, error)
                for number in list(self._running):
                    every.callback(self._end, number, error)

    def _someone_waits(self) -> bool:
        return len(self._running) > 1 or self._next() is not None

    def _next(self) -> Job | None:
        """Return the next job to start: the first in the queue, or None if no slot is free.

        While a long prompt is read and all regular slots are in use, the first short prompt gets the extra slot.
        """
        n_free, n_short = self._slots.n_idle - N_EXPRESS, self._engine.executor.prompt_chunk_tokens
        with self._changed:
            if n_free > 0:
                return self._queue[0] if self._queue else None
            is_held_up = any(
                not each.generated and len(each.job.prompt_ids) > n_short for each in self._running.values()
            )
            if n_free < 0 or not is_held_up:
                return None
            return next((job for job in self._queue if len(job.prompt_ids) <= n_short), None)

    def _wait(self) -> bool:
        """Wait until there are requests. Return False if the scheduler is closing."""
        with self._changed:
            while not (self._running or self._queue or self._calls or self._is_closing):
                self._changed.wait()
        return not self._is_closing

    def _drop_stopped(self) -> None:
        with self._changed:
            for job in [job for job in self._queue if job.stop.is_set()]:
                self._queue.remove(job)
        for number, running in list(self._running.items()):
            if running.job.stop.is_set():
                self._end(number, None)

    def _admit(self) -> None:
        """Start waiting requests while slots are free."""
        while (job := self._next()) is not None:
            with self._changed:
                self._queue.remove(job)
            try:
                self._begin(job)
            except Exception as error:
                job.tell(_failure(error))

    def _begin(self, job: Job) -> None:
        n_reply = room_for_reply(self._engine.context_tokens, job.params)
        slot, n_cached = self._slots.take(job.prompt_ids, n_reply)
        if job.scoring is None:
            self._join(job, slot, n_cached)
            job.tell(Begun(n_cached, slot.number))
            return
        self._engine.executor.cache.truncate(slot.sequence, 0)  # every token's logits are wanted
        scoring = self._engine.prompt_logprobs(slot.sequence, job.prompt_ids, job.scoring.n_top)
        self._running[next(self._scoring_numbers)] = _Running(job, slot, scoring=scoring)
        job.tell(Begun(0, slot.number))

    def _join(self, job: Job, slot: Slot, n_cached: int) -> None:
        """Add the job to the decoding loop. The KV cache already holds n_cached tokens of its prompt."""
        try:
            (number,) = self._loop.join(Continuation(slot.sequence, job.prompt_ids), job.params, job.stop)
        except BaseException:
            self._slots.give_back(slot, job.prompt_ids[:n_cached])
            raise
        self._running[number] = _Running(job, slot)

    def _score(self, number: int, running: _Running, scoring: Generator[list[TokenLogprobs]]) -> None:
        """Run one pass over a prompt that is scored. After the last pass, generation starts if it was requested."""
        job, slot = running.job, running.slot
        try:
            said = next(scoring, None)
            if said is not None:
                running.scored += said
                return
            job.tell(Scored(running.scored))
            if job.scoring is not None and job.scoring.is_all:
                self._end(number, None)
                return
            del self._running[number]
            if self._engine.drafting is not None:  # draft sources have not seen the prompt
                self._engine.executor.cache.truncate(slot.sequence, 0)
            self._join(job, slot, 0)
        except Exception as error:
            failure = _failure(error)
            if number in self._running:
                self._pass_on(Stepped(number, failure))
            else:
                job.tell(failure)

    def _step(self) -> int:
        """Advance every running request by a step and return the number of new tokens."""
        for number, running in list(self._running.items()):
            if running.scoring is not None:
                self._score(number, running, running.scoring)
        try:
            stepped = self._loop.step()
        except Exception as error:
            failure = _failure(error)
            for number in list(self._running):
                self._end(number, failure)
            return 0
        for each in stepped:
            self._pass_on(each)
        return sum(isinstance(each.outcome, GeneratedToken) for each in stepped)

    def _pass_on(self, stepped: Stepped) -> None:
        running = self._running[stepped.number]
        if isinstance(stepped.outcome, HeteroError):
            if self._again_with_more_memory(stepped.number, stepped.outcome):
                return
            # The shared cache was full, or the request was stopped: by its client, which has left, or by a shutdown.
            is_shared = len(self._running) > 1 and isinstance(stepped.outcome, UsageError)
            message = STOPPING if running.job.stop.is_set() else str(stepped.outcome)
            is_busy = is_shared or running.job.stop.is_set()
            self._end(stepped.number, BusyError(message) if is_busy else stepped.outcome)
            return
        running.generated.append(stepped.outcome.token_id)
        running.job.tell(stepped.outcome)
        if stepped.is_last:
            self._end(stepped.number, None)

    def _again_with_more_memory(self, number: int, error: HeteroError) -> bool:
        """Queue a request again if memory ran out before its first token and idle sequences can be freed.

        Returns:
            Whether the request was queued again.
        """
        running = self._running[number]
        is_of_memory = isinstance(error, DeviceMemoryError | UsageError)
        if running.generated or not is_of_memory or not self._slots.held_idle():
            return False
        del self._running[number]
        self._slots.give_back(running.slot, [])
        self._slots.free_idle()
        with self._changed:
            self._queue.appendleft(running.job)
        return True

    def _end(self, number: int, error: HeteroError | None) -> None:
        """Remove a request and give its slot back.

        The slot keeps the valid prefix of the sequence. After an error or an unfinished prompt, it keeps nothing.
        """
        running = self._running.pop(number)
        try:
            self._loop.leave(number)
            if running.scoring is not None:
                running.scoring.close()
            kept: list[int] = []
            if error is None and running.generated:
                kept = [*running.job.prompt_ids, *(running.generated[:-1] if self._keeps_generated else ())]
            self._slots.give_back(running.slot, kept)
            self.memory = self._engine.memory()
        finally:
            if error is not None:
                running.job.tell(error)


def _failure(error: Exception) -> HeteroError:
    """Return the error to send to the client. An unexpected error is logged, and the server keeps running."""
    if isinstance(error, HeteroError):
        return error
    LOG.error("the engine failed", exc_info=error)
    return HeteroError(f"the engine failed ({type(error).__name__}); the server's log has more.")
