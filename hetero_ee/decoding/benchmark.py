"""Timed runs as llama-bench makes them: a prompt of n tokens, or n tokens one after another, after a given depth."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median, stdev

from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Continuation, Ending
from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.kv.batch import Batch
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.executors.executor import Executor

FIRST_TOKEN_ID = 1
SHORT_CONTEXT_TOKENS = 16  # at which the executor itself is timed
EXECUTOR_SAMPLE_S = 0.2


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A run of n_prompt tokens at once, or of n_gen one by one."""

    n_prompt: int
    n_gen: int
    n_depth: int  # tokens in the context before them
    samples_s: tuple[float, ...]  # seconds of each repetition

    @property
    def name(self) -> str:
        """The name in llama-bench: pp512, tg128, with @ d1024 after that many tokens."""
        test = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{test} @ d{self.n_depth}" if self.n_depth else test

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple((self.n_prompt or self.n_gen) / seconds for seconds in self.samples_s)

    @property
    def avg_ts(self) -> float:
        return fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return stdev(self.samples_ts) if len(self.samples_s) > 1 else 0.0


def bench_run(
    executor: Executor,
    n_prompt: int,
    n_gen: int,
    n_depth: int,
    *,
    chunk_tokens: int,
    repetitions: int,
    clock: Callable[[], float],
) -> BenchRun:
    """One of n_prompt and n_gen is 0. The depth is filled before the clock starts; one run before the first is not
    counted. Tokens are those the model would choose greedily; tokenization is left out.
    """
    samples = []
    for repetition in range(repetitions + 1):
        sequence = executor.cache.open_new()
        try:
            _prefill(executor, sequence, 0, n_depth, chunk_tokens)
            _make_room(executor, sequence, n_depth, n_prompt + n_gen)
            start_s = clock()
            if n_prompt:
                _prefill(executor, sequence, n_depth, n_prompt, chunk_tokens)
            else:
                _decode(executor, sequence, n_depth, n_gen)
            elapsed_s = clock() - start_s
        finally:
            executor.cache.close(sequence)
        if repetition:
            samples.append(elapsed_s)
    return BenchRun(n_prompt, n_gen, n_depth, tuple(samples))


@dataclass(frozen=True, slots=True)
class DraftedWay:
    """A speculative mode: warm_up and timed take what loop.generate does, and only the second counts its drafts."""

    warm_up: Callable[..., Iterator[GeneratedToken]]
    timed: Callable[..., Iterator[GeneratedToken]]
    close: Callable[[int], None]  # frees what drafting keeps of a sequence of the KV cache


def bench_reading_run(
    executor: Executor,
    way: DraftedWay,
    n_prompt: int,
    n_depth: int,
    *,
    repetitions: int,
    clock: Callable[[], float],
) -> BenchRun:
    """Time a prompt that draft sources read too, up to its first token."""
    params, ending = SamplingParams(max_new_tokens=1), Ending(frozenset(), executor.cache.max_tokens)
    samples = []
    for repetition in range(repetitions + 1):
        sequence = executor.cache.open_new()

        def read(generate: Callable[..., Iterator[GeneratedToken]], n_tokens: int, sequence: int = sequence) -> float:
            prompt = Continuation(sequence, [FIRST_TOKEN_ID] * n_tokens)
            (token,) = generate(executor, prompt, params, ending, lambda _: "", clock)
            return token.elapsed_s

        try:
            if n_depth:
                read(way.warm_up, n_depth)
            _make_room(executor, sequence, n_depth, n_prompt)
            samples.append(read(way.timed if repetition else way.warm_up, n_depth + n_prompt))
        finally:
            executor.cache.close(sequence)
            way.close(sequence)
    return BenchRun(n_prompt, 0, n_depth, tuple(samples[1:]))


def bench_text_run(
    executor: Executor,
    way: DraftedWay,
    n_gen: int,
    n_depth: int,
    *,
    repetitions: int,
    clock: Callable[[], float],
) -> BenchRun:
    """Time n_gen tokens of a speculative mode, after one run that is not timed.

    Drafts come true in text alone, so it is the model's own, greedy and with no end: after n_depth tokens of it come a
    first token, which is not timed, and n_gen others. The context must hold n_depth + n_gen + 2 tokens.
    """
    ending = Ending(frozenset(), executor.cache.max_tokens)
    prompt, samples = bench_text(executor, n_depth, clock), []
    params = SamplingParams(max_new_tokens=n_gen + 1)
    for repetition in range(repetitions + 1):
        drafted = way.timed if repetition else way.warm_up
        tokens = list(drafted(executor, [prompt], params, ending, lambda _: "", clock))
        samples.append(tokens[-1].elapsed_s - tokens[0].elapsed_s)
    return BenchRun(0, n_gen, n_depth, tuple(samples[1:]))


def bench_text(executor: Executor, n_tokens: int, clock: Callable[[], float]) -> list[int]:
    """Return the tokens that bench_text_run generates: a first one, and the model's greedy ones after it."""
    text = [FIRST_TOKEN_ID]
    if n_tokens:
        params, ending = SamplingParams(max_new_tokens=n_tokens), Ending(frozenset(), executor.cache.max_tokens)
        text += [token.token_id for token in generate(executor, [text], params, ending, lambda _: "", clock)]
    return text


def executor_s_per_layer(executor: Executor, clock: Callable[[], float]) -> float | None:
    """Seconds of a layer, one token at a short context, outside of kernels. None unless the CPU's kernels run."""
    # The kernels look where to be cached when imported.
    from hetero_ee.profiling.pass_probe import probe_pass
    from hetero_ee.profiling.preset import PassSampling
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    if not isinstance(executor, CpuExecutor):
        return None
    context_tokens = min(SHORT_CONTEXT_TOKENS, executor.cache.max_tokens)
    return median(probe_pass(executor, 1, context_tokens, PassSampling(EXECUTOR_SAMPLE_S), clock).executor_s)


def _make_room(executor: Executor, sequence: int, length: int, n_tokens: int) -> None:
    """Grow the cache before the clock runs: it doubles, a cost that a short run would pay for a long one."""
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
        logits = executor.logits(Batch((token_id,), (sequence,), (position,)), (0,))
        token_id = int(logits[0].argmax())
