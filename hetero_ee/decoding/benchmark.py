"""Timed runs like those of llama-bench: a prompt of n tokens, or n generated tokens, after a given context length."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median, stdev

from hetero_ee.decoding.loop import Mode, generate
from hetero_ee.decoding.requests import Continuation, Ending, Prompts
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor

FIRST_TOKEN_ID = 1
SHORT_CONTEXT_TOKENS = 16  # at which the executor itself is timed
EXECUTOR_SAMPLE_S = 0.2

MakeMode = Callable[[], Mode]  # a mode of its own for each run


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Timed repetitions of a prompt of n_prompt tokens, or of n_gen generated tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int  # tokens in the context before them
    samples_s: tuple[float, ...]  # seconds of each repetition

    @property
    def name(self) -> str:
        """Name as in llama-bench: pp512 or tg128, with @ d1024 after a context of 1,024 tokens."""
        test = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{test} @ d{self.n_depth}" if self.n_depth else test

    @property
    def samples_ts(self) -> tuple[float, ...]:
        return tuple((self.n_prompt or self.n_gen) / seconds for seconds in self.samples_s)

    @property
    def avg_ts(self) -> float:
        return fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return stdev(self.samples_ts) if len(self.samples_s) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Bench:
    """Benchmark of an executor by a clock. The first run of each test is a warm-up and not counted."""

    executor: Executor
    repetitions: int
    clock: Callable[[], float]

    def run(self, n_prompt: int, n_gen: int, n_depth: int, *, chunk_tokens: int) -> BenchRun:
        """Time a prompt or generated tokens. Either n_prompt or n_gen is 0.

        The context of n_depth tokens is filled before the clock starts. Generated tokens are greedy and not turned into
        text.
        """
        samples, executor = [], self.executor
        for repetition in range(self.repetitions + 1):
            sequence = executor.cache.open_new()
            try:
                _prefill(executor, sequence, 0, n_depth, chunk_tokens)
                _make_room(executor, sequence, n_depth, n_prompt + n_gen)
                start_s = self.clock()
                if n_prompt:
                    _prefill(executor, sequence, n_depth, n_prompt, chunk_tokens)
                else:
                    _decode(executor, sequence, n_depth, n_gen)
                elapsed_s = self.clock() - start_s
            finally:
                executor.cache.close(sequence)
            if repetition:
                samples.append(elapsed_s)
        return BenchRun(n_prompt, n_gen, n_depth, tuple(samples))

    def reading_run(self, warm_up: MakeMode, timed: MakeMode, n_prompt: int, n_depth: int) -> BenchRun:
        """Time a prompt up to its first token, including the time in which draft sources read it. The untimed warm-up
        and the filling of the context use the mode `warm_up`."""
        samples, executor = [], self.executor
        for repetition in range(self.repetitions + 1):
            sequence, mode = executor.cache.open_new(), timed() if repetition else warm_up()
            try:
                if n_depth:
                    self._read(warm_up(), sequence, n_depth)
                _make_room(executor, sequence, n_depth, n_prompt)
                samples.append(self._read(mode, sequence, n_depth + n_prompt))
            finally:
                executor.cache.close(sequence)
                mode.close(sequence)
        return BenchRun(n_prompt, 0, n_depth, tuple(samples[1:]))

    def text_run(self, warm_up: MakeMode, timed: MakeMode, n_gen: int, n_depth: int) -> BenchRun:
        """Time n_gen tokens of a speculative mode, after one untimed run with the mode `warm_up`.

        Drafts only come true in real text. So the text is the model's own greedy one, without an end: n_depth tokens,
        an untimed first token, and n_gen others. The context must hold n_depth + n_gen + 2 tokens.
        """
        prompt, samples = self.text(n_depth), []
        for repetition in range(self.repetitions + 1):
            tokens = self._generated(timed() if repetition else warm_up(), [prompt], n_gen + 1)
            samples.append(tokens[-1].elapsed_s - tokens[0].elapsed_s)
        return BenchRun(0, n_gen, n_depth, tuple(samples[1:]))

    def text(self, n_tokens: int) -> list[int]:
        """Return the tokens that text_run generates: a first one, and the model's greedy continuation."""
        text = [FIRST_TOKEN_ID]
        return [*text, *(each.token_id for each in self._generated(None, [text], n_tokens))] if n_tokens else text

    def _read(self, mode: Mode, sequence: int, n_tokens: int) -> float:
        (token,) = self._generated(mode, Continuation(sequence, [FIRST_TOKEN_ID] * n_tokens), 1)
        return token.elapsed_s

    def _generated(self, mode: Mode | None, prompts: Prompts, n_tokens: int) -> list[GeneratedToken]:
        params, ending = SamplingParams(max_new_tokens=n_tokens), Ending(frozenset(), self.executor.cache.max_tokens)
        return list(generate(self.executor, prompts, params, ending, lambda _: "", self.clock, mode))


def executor_s_per_layer(executor: Executor, clock: Callable[[], float]) -> float | None:
    """Return the seconds per layer spent outside of kernels, for one token at a short context; None without CPU
    kernels."""
    # The kernels look where to be cached when imported.
    from hetero_ee.profiling.pass_probe import probe_pass
    from hetero_ee.profiling.preset import PassSampling
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    if not isinstance(executor, CpuExecutor):
        return None
    context_tokens = min(SHORT_CONTEXT_TOKENS, executor.cache.max_tokens)
    return median(probe_pass(executor, 1, context_tokens, PassSampling(EXECUTOR_SAMPLE_S), clock).executor_s)


def _make_room(executor: Executor, sequence: int, length: int, n_tokens: int) -> None:
    """Grow the KV cache before the clock runs. It doubles when full, which would make a short run look slow."""
    executor.cache.admit(Batch.of_sequence(sequence, length, [FIRST_TOKEN_ID] * n_tokens))
    executor.cache.truncate(sequence, length)


def _prefill(executor: Executor, sequence: int, first: int, n_tokens: int, chunk_tokens: int) -> None:
    for start in range(first, first + n_tokens, chunk_tokens):
        ids = [FIRST_TOKEN_ID] * min(chunk_tokens, first + n_tokens - start)
        hidden = executor.hidden(Batch.of_sequence(sequence, start, ids))
    if n_tokens:
        executor.to_logits(hidden[-1:])


def _decode(executor: Executor, sequence: int, first: int, n_tokens: int) -> None:
    token_id = FIRST_TOKEN_ID
    for position in range(first, first + n_tokens):
        executor.cache.settle(sequence, position)
        logits = executor.logits(Batch((token_id,), (sequence,), (position,)), (0,))
        token_id = int(logits[0].argmax())
