"""The decoding loop: every step advances all sequences, and sequences join and leave between steps.

Each token's bits depend only on its own sequence, so a sequence gets the same tokens as when it is decoded alone.
Source for joining and leaving between passes (continuous batching): Orca (OSDI 2022).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hetero_ee.decoding.requests import (
    UNCACHED,
    Continuation,
    Ending,
    Prompts,
    Request,
    last_tokens,
    prefill,
    requests_of,
    step,
)
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.decoding.turns import NEVER, Turns
from hetero_ee.errors import HeteroError
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor, Observe
from hetero_ee.runtime.text_meter import TextMeter
from hetero_ee.text.text_stream import Decode

MAX_WAITED = 16  # steps without a chunk of a prompt, while shorter ones are read
Take = Callable[[], Sequence[GeneratedToken]]  # a sequence's tokens of one step; raises the HeteroError that ends it


class Mode(ABC):
    """Way in which sequences get their tokens after prefill. Each loop has one mode for its sequences.

    `observe` is called with each chunk of a prompt; it is None if the mode does not need the chunks.
    """

    observe: Observe | None = None

    def begin(self, request: Request) -> None:  # noqa: B027
        """Prepare for a sequence whose prompt is about to be read. The KV cache may already hold a prefix of it.

        Raises: UsageError: if the mode does not support the request's sampling.
        """

    @abstractmethod
    def advance(self, requests: Sequence[Request]) -> Sequence[Take]:
        """Run one step for all these sequences. Return, in the same order, functions that emit each one's tokens."""

    def leave(self, requests: Sequence[Request]) -> None:  # noqa: B027
        """Discard preparations for the next step of these sequences, so that the cache holds only verified tokens."""

    def close(self, sequence: int) -> None:  # noqa: B027
        """Free the mode's memory for a sequence of the KV cache that is being closed."""


class FullMode(Mode):
    """Mode in which each step gives one token per sequence, by a pass through all layers."""

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self._executor, self._clock = executor, clock

    def advance(self, requests: Sequence[Request]) -> list[Take]:
        logits = self._executor.logits(last_tokens(requests), range(len(requests)))
        return [partial(self._taken, request, row) for request, row in zip(requests, logits, strict=True)]

    def _taken(self, request: Request, logits: Tensor) -> list[GeneratedToken]:
        return [step(request, logits, self._clock())]


class SeparateModes(Mode):
    """Mode that advances each sequence with its own mode, so that no policy sees more than one sequence."""

    def __init__(self, make: Callable[[], Mode]) -> None:
        self._make, self._shared = make, make()
        self._modes: dict[int, Mode] = {}  # by sequence of the KV cache
        self.observe = self._shared.observe

    def begin(self, request: Request) -> None:
        mode = self._modes[request.kv_sequence] = self._make()
        mode.begin(request)

    def advance(self, requests: Sequence[Request]) -> list[Take]:
        return [partial(self._advanced, request) for request in requests]

    def leave(self, requests: Sequence[Request]) -> None:
        for request in requests:
            mode = self._modes.pop(request.kv_sequence, None)
            if mode is not None:
                mode.leave([request])

    def close(self, sequence: int) -> None:
        self._shared.close(sequence)

    def _advanced(self, request: Request) -> Sequence[GeneratedToken]:
        (take,) = self._modes[request.kv_sequence].advance([request])
        return take()


@dataclass(frozen=True, slots=True)
class Stepped:
    """Result of a step for one sequence: a token, or the error that ended the sequence."""

    number: int  # number of the sequence, from join()
    outcome: GeneratedToken | HeteroError

    @property
    def is_last(self) -> bool:
        return isinstance(self.outcome, HeteroError) or self.outcome.finish_reason is not None


@dataclass(slots=True, eq=False)
class _Running:
    """A sequence in the loop.

    owns_cache: whether the loop opened its sequence of the KV cache, and thus closes it. n_waited: number of steps
    since its prompt was last read in which other prompts were read instead.
    """

    number: int
    request: Request
    stop: threading.Event
    owns_cache: bool
    n_waited: int = 0

    @property
    def is_read(self) -> bool:
        """Whether the prompt is read, which is when the first token exists."""
        return len(self.request.token_ids) > self.request.n_prompt_tokens


@dataclass(frozen=True, slots=True)
class Decoding:
    """Objects that all sequences of a model share.

    ending: returns the ends of sequences that join now. look: called before and after each sequence; raises HeteroError
    if the weights have changed.
    """

    executor: Executor
    ending: Callable[[], Ending]
    decode: Decode
    clock: Callable[[], float]
    turns: Turns
    look: Callable[[], None] = lambda: None


class DecodingLoop:
    """Decodes sequences that join and leave between two steps. Only one thread may use it.

    A sequence leaves with its last token or an error. If it joined as a Continuation, its sequence of the KV cache
    stays open.
    """

    def __init__(self, shared: Decoding, mode: Mode, someone_waits: Callable[[], bool] | None = None) -> None:
        """Create a loop without sequences.

        A step reads all prompts before any sequence advances. With `someone_waits`, which returns whether a sequence
        waits to join, it reads at most one chunk, or more while no other sequence runs or waits.
        """
        self._shared, self._mode, self._someone_waits = shared, mode, someone_waits
        self._running: dict[int, _Running] = {}
        self._next_number = 0

    def join(self, prompts: Prompts, params: SamplingParams, stop: threading.Event = NEVER) -> list[int]:
        """Add a sequence for each prompt and return their numbers. Later steps return their first tokens.

        Args:
            stop: Ends the sequences when it is set, even during prefill.

        Raises: UsageError: if the context cannot hold the longest prompt, or the mode does not support the sampling.
        """
        shared = self._shared
        shared.look()
        common = params, shared.decode, shared.ending(), shared.clock()
        requests = shared.turns.alone(lambda: requests_of(prompts, *common))  # the context may grow
        joined: list[int] = []
        try:
            for request in requests:
                owns_cache = request.kv_sequence == UNCACHED
                if owns_cache:
                    request.kv_sequence = shared.executor.cache.open_new()
                number, self._next_number = self._next_number, self._next_number + 1
                self._running[number] = _Running(number, request, stop, owns_cache)
                joined.append(number)
                self._mode.begin(request)
        except BaseException:
            self.leave(*joined)
            raise
        return joined

    def leave(self, *numbers: int) -> None:
        """End these sequences after the tokens so far."""
        left = [self._running.pop(number) for number in numbers if number in self._running]
        self._mode.leave([each.request for each in left])
        for each in left:
            if each.owns_cache:
                for close in (self._shared.executor.cache.close, self._mode.close):
                    close(each.request.kv_sequence)

    def step(self) -> list[Stepped]:
        """Advance all sequences whose prompts were read before, and read other prompts or a chunk of one.

        Raises: Exception: any error except a HeteroError of a single sequence, which is returned.
        """
        alone = self._shared.turns.alone
        reading = [each for each in self._running.values() if not each.is_read]
        decoding = [each for each in self._running.values() if each.is_read]
        stepped: list[Stepped] = []
        if reading and self._someone_waits is not None:
            chosen = self._next_to_read(reading)
            stepped += alone(lambda: self._read_part(chosen), chosen.stop)
        elif reading:
            stepped += self._read(reading)
            decoding = []
        if decoding:
            stepped += alone(lambda: self._advanced(decoding))
        self.leave(*(each.number for each in stepped if each.is_last))
        return stepped

    def generate(
        self, prompts: Prompts, params: SamplingParams, stop: threading.Event = NEVER, meter: TextMeter | None = None
    ) -> Generator[GeneratedToken]:
        """Yield the tokens of all prompts as they are generated, and count in `meter` the bytes they move.

        Closing the iterator ends the sequences. Raises: HeteroError: the error of the first sequence that fails.
        """
        executor = self._shared.executor
        try:
            if meter is not None:
                meter.begin(executor, 1 if isinstance(prompts, Continuation) else len(prompts))
            self.join(prompts, params, stop)
            while self._running:
                for each in self.step():
                    if isinstance(each.outcome, HeteroError):
                        raise each.outcome
                    if meter is not None:
                        meter.count(executor)
                    yield each.outcome
        finally:
            self.leave(*self._running)

    def _read(self, reading: Sequence[_Running]) -> list[Stepped]:
        """Read these prompts completely. The executor overlaps their chunks."""
        executor, observe, takes = self._shared.executor, self._mode.observe, list[Take]()
        stepped: list[Stepped] = []
        for each in reading:

            def read(request: Request = each.request) -> Tensor:
                return prefill(executor, request, observe)

            try:
                logits = self._shared.turns.alone(read, each.stop)
            except HeteroError as error:
                return [Stepped(each.number, error)]
            takes.append(partial(self._first_token, each.request, logits))
        for each, take in zip(reading, takes, strict=True):
            stepped += self._taken(each, take)
        return stepped

    def _next_to_read(self, reading: Sequence[_Running]) -> _Running:
        """Return the sequence with the shortest unread prompt, or one that has waited for MAX_WAITED steps."""
        cache = self._shared.executor.cache

        def order(each: _Running) -> tuple[bool, int]:
            n_left = each.request.n_prompt_tokens - cache.length(each.request.kv_sequence)
            return each.n_waited < MAX_WAITED, n_left

        chosen = min(reading, key=order)
        for each in reading:
            each.n_waited = 0 if each is chosen else each.n_waited + 1
        return chosen

    def _read_part(self, running: _Running) -> list[Stepped]:
        """Read one chunk of the prompt, or several overlapping ones while no other sequence runs or waits."""
        request, executor = running.request, self._shared.executor
        try:
            logits = prefill(executor, request, self._mode.observe, self._until_someone_waits)
        except HeteroError as error:
            return [Stepped(running.number, error)]
        if executor.cache.length(request.kv_sequence) < request.n_prompt_tokens:
            return []
        return self._taken(running, partial(self._first_token, request, logits))

    def _until_someone_waits(self, chunks: Iterator[Batch]) -> Iterator[Batch]:
        for chunk in chunks:
            yield chunk
            if len(self._running) > 1 or self._someone_waits is None or self._someone_waits():
                return

    def _first_token(self, request: Request, logits: Tensor) -> list[GeneratedToken]:
        return [step(request, logits, self._shared.clock())]

    def _advanced(self, decoding: Sequence[_Running]) -> list[Stepped]:
        """Advance these sequences. If that fails, advance each alone, so that an error ends only its own sequence.

        The error also ends sequences whose recurrent state it has lost.
        """
        requests, cache = [each.request for each in decoding], self._shared.executor.cache
        for request in requests:
            cache.settle(request.kv_sequence, len(request.token_ids) - 1)
        held = {each.kv_sequence: cache.length(each.kv_sequence) for each in requests if cache.is_bounded}
        try:
            takes = self._mode.advance(requests)
        except HeteroError as error:
            if len(decoding) == 1:
                return [Stepped(decoding[0].number, error)]
            self._mode.leave(requests)
            cache, stepped = self._shared.executor.cache, list[Stepped]()
            for each in decoding:
                sequence = each.request.kv_sequence
                cache.cut(sequence, len(each.request.token_ids) - 1)
                is_lost = cache.length(sequence) < held.get(sequence, 0)
                stepped += [Stepped(each.number, error)] if is_lost else self._advanced([each])
            return stepped
        return [stepped for each, take in zip(decoding, takes, strict=True) for stepped in self._taken(each, take)]

    def _taken(self, running: _Running, take: Take) -> list[Stepped]:
        """Emit one sequence's tokens of a step, or return the error that ended the sequence."""
        try:
            tokens = take()
            if tokens[-1].finish_reason is not None:
                self._shared.look()
        except HeteroError as error:
            return [Stepped(running.number, error)]
        return [Stepped(running.number, token) for token in tokens]


def generate(
    executor: Executor,
    prompts: Prompts,
    params: SamplingParams,
    ending: Ending,
    decode: Decode,
    clock: Callable[[], float],
    mode: Mode | None = None,
) -> Generator[GeneratedToken]:
    """Yield the tokens of all prompts, decoded by a new loop, in full mode by default."""
    shared = Decoding(executor, lambda: ending, decode, clock, Turns(None))
    return DecodingLoop(shared, mode or FullMode(executor, clock)).generate(prompts, params)
